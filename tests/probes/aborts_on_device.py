"""Ends as ROCm's runtime ends a process whose device failed: it prints why, and aborts."""

import os
import sys

from canaryd.probe import ProbeSpec

SPEC = ProbeSpec(name="aborts_on_device", summary="The device fails, and the runtime aborts", numeric=False)


def run(ctx):
    sys.stderr.write("Memory access fault by GPU node-1 (Agent handle: 0x5581) on address 0x7f00. Reason: Unknown.\n")
    sys.stderr.flush()
    os.abort()
    yield
