"""Forgot to yield."""

from canaryd.probe import ProbeSpec

SPEC = ProbeSpec(name="returns_nothing", summary="run is not a generator", numeric=False)


def run(ctx):
    return None
