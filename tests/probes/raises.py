"""Raises in the middle, after one fact."""

from canaryd.probe import ProbeSpec, Reading

SPEC = ProbeSpec(name="raises", summary="Raises", numeric=False)


def run(ctx):
    yield Reading(name="before", value=1, unit="1")
    raise ZeroDivisionError("the moon is in the wrong phase")
