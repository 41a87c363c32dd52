"""SPEC cannot be built."""

from canaryd.probe import ProbeSpec

SPEC = ProbeSpec(name="Bad Name", summary="Its name is not snake case")


def run(ctx):
    yield
