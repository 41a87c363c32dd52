"""Measures something that nothing judges, and compares nothing."""

from canaryd.probe import ProbeSpec, Reading

SPEC = ProbeSpec(name="measures", summary="Measures, compares nothing", numeric=False)


def run(ctx):
    yield Reading(name="switches", value="none")
