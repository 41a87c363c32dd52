"""Give the capability to read the kernel log only to the process that reads it.

A service manager gives CAP_SYSLOG to the daemon as an ambient capability, which every program that the daemon starts
would inherit. The daemon therefore removes it from the ambient set, and adds it only while one thread starts the
reader: each thread has its own ambient set (capabilities(7)).
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
"""Operations of prctl(2) on the ambient set (linux/prctl.h)."""
_STATUS = Path("/proc/thread-self/status")


def withdraw() -> None:
    """Empty the ambient set of this thread, and thus of every thread and program that it starts later."""
    if _held("CapAmb"):
        _ambient(_CLEAR_ALL, 0)


@contextlib.contextmanager
def reading_kernel_log() -> Iterator[None]:
    """While the context lasts, let programs that this thread starts inherit CAP_SYSLOG, if this process has it."""
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
    """Return this thread's capability set `name` (e.g. "CapAmb") as bits, or 0 if the system has no capabilities."""
    try:
        found = re.search(rf"^{name}:\s*([0-9a-f]+)$", _STATUS.read_text(encoding="ascii"), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1], 16) if found else 0


def _ambient(operation: int, capability: int) -> None:
    """Apply `operation` (e.g. `_RAISE`) to `capability` in this thread's ambient set; raise `OSError` if refused."""
    import ctypes  # noqa: PLC0415  only a daemon with a capability needs it

    library = ctypes.CDLL(None, use_errno=True)
    zero = ctypes.c_ulong(0)
    if library.prctl(_PR_CAP_AMBIENT, ctypes.c_ulong(operation), ctypes.c_ulong(capability), zero, zero) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"cannot change the ambient capabilities (prctl, operation {operation})")
