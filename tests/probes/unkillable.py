"""Survives SIGKILL for a while: a process of another session traces it and holds it at the door of its exit.

The nearest thing to uninterruptible sleep that needs no broken driver. The tracer lets go when the file named by the
setting "release" appears, and after 30 seconds in any case.
"""

import ctypes
import os
import time

from canaryd.probe import ProbeSpec, Reading, Skip

SPEC = ProbeSpec(name="unkillable", summary="Cannot be killed", numeric=False)
PTRACE_SEIZE, PTRACE_O_TRACEEXIT, PR_SET_PTRACER, PR_SET_PTRACER_ANY = 0x4206, 1 << 6, 0x59616D61, -1


def trace(pid, release, ready):
    os.setsid()
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    traced = libc.ptrace(PTRACE_SEIZE, pid, None, PTRACE_O_TRACEEXIT) == 0
    os.write(ready, b"y" if traced else b"n")
    end = time.monotonic() + 30.0
    while traced and time.monotonic() < end and not os.path.exists(release):
        time.sleep(0.05)
    os._exit(0)  # the tracee is let go with its tracer


def run(ctx):
    ctypes.CDLL(None).prctl(PR_SET_PTRACER, ctypes.c_ulong(PR_SET_PTRACER_ANY), 0, 0, 0)
    ours, theirs = os.pipe()
    worker = os.getpid()
    if os.fork() == 0:
        trace(worker, ctx.settings["release"], theirs)
    if os.read(ours, 1) != b"y":
        raise Skip("ptrace is not permitted here")
    yield Reading(name="pid", value=worker)
    time.sleep(600)
