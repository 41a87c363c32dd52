"""Lines of the kernel log."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
DATA = ROOT / "tests" / "data" / "kernel-log"
XID = "NVRM: Xid (PCI:0000:65:00): {}, something"


def line(sequence: int, text: str = "", *, prefix: int = 3, usec: int = 1) -> str:
    return f"{prefix},{sequence},{usec},-;{text or XID.format(sequence)}\n"
