"""Prints lines to standard error until it is killed."""

import os

from canaryd.probe import ProbeSpec

SPEC = ProbeSpec(name="floods_stderr", summary="Floods standard error for ever", numeric=False)


def run(ctx):
    while True:
        os.write(2, b"warning: everything is on fire\n" * 1000)
    yield
