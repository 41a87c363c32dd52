"""The host's pages: hold them in memory, and ask where they lie."""

from __future__ import annotations

import ctypes
import mmap
import struct
from pathlib import Path

PRESENT, FRAME = 1 << 63, (1 << 55) - 1
"""Bits of an entry of /proc/PID/pagemap: the page is in memory; the number of its frame (Linux, pagemap.rst)."""


def lock(address: int, size: int) -> bool:
    """Keep pages from being swapped or moved to another place on disk; return whether the system allows it (mlock(2)).

    They are unlocked when the memory is given back.
    """
    mlock = getattr(ctypes.CDLL(None), "mlock", None)
    if mlock is None:
        return False
    mlock.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    return bool(mlock(address, size) == 0)


def physical_address(address: int, pagemap: Path = Path("/proc/self/pagemap")) -> int | None:
    """Return the physical address behind a virtual one of this process; None where the system does not tell it.

    The kernel tells frames only to processes with CAP_SYS_ADMIN; others read zeros.
    """
    page, inside = divmod(address, mmap.PAGESIZE)
    try:
        with pagemap.open("rb", buffering=0) as file:
            file.seek(page * 8)
            (entry,) = struct.unpack("<Q", file.read(8))
    except (OSError, struct.error):
        return None
    frame = entry & FRAME
    return frame * mmap.PAGESIZE + inside if entry & PRESENT and frame else None
