"""Calls sys.exit in its run."""

import sys

from canaryd.probe import ProbeSpec

SPEC = ProbeSpec(name="exits", summary="SystemExit", numeric=False)


def run(ctx):
    sys.exit(0)
    yield
