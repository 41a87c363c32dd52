"""Depends on the numeric stack, so that its runs record it."""

from canaryd.probe import ProbeSpec, Reading

SPEC = ProbeSpec(name="surroundings", summary="A numeric probe that measures nothing")


def run(ctx):
    yield Reading(name="one", value=1, unit="1")
