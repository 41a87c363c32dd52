"""Sleeps in C without letting go of the interpreter lock, as a hung driver call may."""

import ctypes
import os

from canaryd.probe import ProbeSpec, Reading

SPEC = ProbeSpec(name="hangs_holding_gil", summary="Never ends and lets no other thread run", numeric=False)


def run(ctx):
    yield Reading(name="pid", value=os.getpid())
    ctypes.PyDLL(None).sleep(600)
