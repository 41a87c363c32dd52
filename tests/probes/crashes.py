"""Follows a null pointer: SIGSEGV."""

import ctypes

from canaryd.probe import ProbeSpec

SPEC = ProbeSpec(name="crashes", summary="Segmentation fault", numeric=False)


def run(ctx):
    ctypes.string_at(0)
    yield
