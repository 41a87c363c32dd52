"""Ignores SIGTERM, and so does its child."""

import os
import signal
import time

from canaryd.probe import ProbeSpec, Reading

SPEC = ProbeSpec(name="hangs_ignoring_sigterm", summary="Never ends, not even when asked to", numeric=False)


def run(ctx):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = os.fork()
    if child == 0:
        time.sleep(600)
        os._exit(0)
    yield Reading(name="child", value=child)
    time.sleep(600)
