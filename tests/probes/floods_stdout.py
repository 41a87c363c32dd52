"""Prints 64 MiB without a newline and then answers."""

import os

from canaryd.probe import ProbeSpec, Reading

SPEC = ProbeSpec(name="floods_stdout", summary="Floods standard output", numeric=False)


def run(ctx):
    block = b"x" * (1 << 20)
    for _ in range(64):
        left = memoryview(block)
        while left:
            left = left[os.write(1, left) :]
    yield Reading(name="one", value=1, unit="1")
