"""Finds no time for any of its parts."""

from canaryd.facts import TRIALS
from canaryd.probe import ProbeSpec, Reading

SPEC = ProbeSpec(name="runs_late", summary="Too late for every part", numeric=False)


def run(ctx):
    yield ctx.late("only")
    yield Reading(name=TRIALS, value=0, unit="1")
