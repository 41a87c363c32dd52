"""Which process may keep the capability to read the kernel log: the one that reads it, and no other.

A service manager hands CAP_SYSLOG to the daemon as an ambient capability, which every program that a thread starts
would keep. It is therefore taken out at the start, and put back for the moment in which one thread starts the reader:
ambient sets belong to threads (capabilities(7)).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

CAP_SYSLOG = 34
"""Number of the capability (linux/capability.h)."""
_PR_CAP_AMBIENT = 47
_RAISE, _LOWER, _CLEAR_ALL = 2, 3, 4
"""Numbers of prctl(2) and of what it does with an ambient set (linux/prctl.h)."""
_STATUS = Path("/proc/thread-self/status")


def withdraw() -> None:
    """Empty the ambient set of this thread, and of every thread and program that it starts from now on."""
    if _held("CapAmb"):
        _ambient(_CLEAR_ALL, 0)


@contextlib.contextmanager
def reading_kernel_log() -> Iterator[None]:
    """Let what this thread starts meanwhile keep CAP_SYSLOG, where this process was given it; others see no change."""
    mine = 1 << CAP_SYSLOG
    lendable = bool(_held("CapPrm") & _held("CapInh") & mine) and not _held("CapAmb") & mine
    if lendable:
        _ambient(_RAISE, CAP_SYSLOG)
    try:
        yield
    finally:
        if lendable:
            _ambient(_LOWER, CAP_SYSLOG)


def _held(name: str) -> int:
    """Return one of this thread's sets as bits; none where the system has no capabilities."""
    try:
        found = re.search(rf"^{name}:\s*([0-9a-f]+)$", _STATUS.read_text(encoding="ascii"), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1], 16) if found else 0


def _ambient(operation: int, capability: int) -> None:
    """Change the ambient set of this thread. Raises `OSError` where the kernel refuses."""
    import ctypes  # noqa: PLC0415  only a daemon that was given a capability needs it

    library = ctypes.CDLL(None, use_errno=True)
    zero = ctypes.c_ulong(0)
    if library.prctl(_PR_CAP_AMBIENT, ctypes.c_ulong(operation), ctypes.c_ulong(capability), zero, zero) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"the ambient capabilities cannot be changed (prctl, operation {operation})")
