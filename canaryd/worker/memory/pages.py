"""The host's memory pages: lock them in memory, and look up their physical addresses."""

from __future__ import annotations

import ctypes
import mmap
import struct
from pathlib import Path

PRESENT, FRAME = 1 << 63, (1 << 55) - 1
"""Masks for an entry of /proc/PID/pagemap: the bit "the page is in memory", and the bits of the frame number (Linux,
pagemap.rst)."""


def lock(address: int, size: int) -> bool:
    """Lock pages until they are freed, so that they are not swapped; return whether the system allows it (mlock)."""
    mlock = getattr(ctypes.CDLL(None), "mlock", None)
    if mlock is None:
        return False
    mlock.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    return bool(mlock(address, size) == 0)


def physical_address(address: int, pagemap: Path = Path("/proc/self/pagemap")) -> int | None:
    """Return the physical address of a virtual address of this process, or None if the system does not give it.

    The kernel shows frame numbers only to processes with CAP_SYS_ADMIN; other processes read zeros.
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
