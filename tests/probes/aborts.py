"""Calls abort(), as C++ libraries do."""

import os

from canaryd.probe import ProbeSpec

SPEC = ProbeSpec(name="aborts", summary="SIGABRT", numeric=False)


def run(ctx):
    os.write(2, b"terminate called after throwing an instance of 'std::bad_day'\n")
    os.abort()
    yield
