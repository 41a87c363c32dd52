"""Prints where it is imported, also without a final newline."""

import os
import sys

from canaryd.probe import ProbeSpec, Reading

print("hello from the import")
sys.stdout.write("no newline")
sys.stdout.flush()
os.write(2, b"\xff\xfe not text")

SPEC = ProbeSpec(name="prints_at_import", summary="Prints", numeric=False)


def run(ctx):
    print("hello from the run")
    yield Reading(name="one", value=1, unit="1")
