"""Reads a data file that lies beside it."""

from pathlib import Path

from canaryd.probe import ProbeSpec, Reading

SPEC = ProbeSpec(name="reads_data", summary="Has a golden as data", numeric=False)


def run(ctx):
    yield Reading(name="golden", value=(Path(__file__).parent / "data" / "golden.txt").read_text().strip())
