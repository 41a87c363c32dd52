"""Closes the protocol and stays."""

import os
import time

from canaryd.probe import ProbeSpec

SPEC = ProbeSpec(name="closes_descriptors_and_hangs", summary="Can never answer", numeric=False)


def run(ctx):
    os.closerange(3, 256)
    time.sleep(600)
    yield
