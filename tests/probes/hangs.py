"""Sleeps past every deadline."""

import os
import time

from canaryd.probe import ProbeSpec, Reading

SPEC = ProbeSpec(name="hangs", summary="Never ends", numeric=False)


def run(ctx):
    yield Reading(name="pid", value=os.getpid())
    ctx.progress(0.1, "asleep")
    time.sleep(600)
