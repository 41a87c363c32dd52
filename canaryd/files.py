"""Files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def write_whole(path: Path, data: bytes, mode: int | None = None) -> None:
    """Put `data` at `path` in one step: a reader, and a machine that loses power, sees the old file or the new one.

    `mode`: its rights (default: those that the umask gives). Raises `OSError`; nothing is left behind then.
    """
    part = path.with_name(f".{path.name}.{os.urandom(4).hex()}")  # no collector reads it: it is no *.prom
    try:
        with part.open("xb") as file:
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink()
        raise
