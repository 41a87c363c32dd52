"""How much memory of the host could be taken now."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path


def available(root: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc")) -> int | None:
    """Return the bytes of memory that this process and its children could still take; None if it is not known.

    The least of what the kernel estimates for the host (proc_meminfo(5), MemAvailable) and of what is left to each
    control group above this process (cgroup v2: memory.max less memory.current, whose inactive files can be dropped).
    """
    host = of_host(proc / "meminfo")
    found = [] if host is None else [host]
    for group in _groups(root, proc):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # no limit there: "max", or no such file
            limit, used = (int((group / f"memory.{name}").read_text(encoding="ascii")) for name in ("max", "current"))
            stat = (group / "memory.stat").read_text(encoding="ascii")
            cached = int(re.search(r"^inactive_file (\d+)$", stat, re.MULTILINE)[1])  # type: ignore[index]
            found.append(max(0, limit - used + cached))
    return min(found, default=None)


def of_host(meminfo: Path = Path("/proc/meminfo")) -> int | None:
    """Return the bytes that the kernel can give without swapping; None where it does not say."""
    with contextlib.suppress(OSError, AttributeError):
        text = meminfo.read_text(encoding="ascii")
        return int(re.search(r"^MemAvailable:\s+(\d+) kB$", text, re.MULTILINE)[1]) << 10  # type: ignore[index]
    return None


def _groups(root: Path, proc: Path) -> list[Path]:
    """Return the control group of this process and those above it."""
    try:
        text = (proc / "self/cgroup").read_text(encoding="utf-8")
    except OSError:
        return []
    own = next((line[3:] for line in text.splitlines() if line.startswith("0::/")), None)
    if own is None:
        return []
    group = root / own.lstrip("/")
    return [each for each in (group, *group.parents) if each == root or root in each.parents]
