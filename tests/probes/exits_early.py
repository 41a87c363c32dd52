"""Leaves with status 0 without an answer."""

import os

from canaryd.probe import ProbeSpec

SPEC = ProbeSpec(name="exits_early", summary="Exits without an answer", numeric=False)


def run(ctx):
    os._exit(0)
    yield
