"""Slow, and says so, far too often."""

import time

from canaryd.probe import ProbeSpec, Reading

SPEC = ProbeSpec(name="reports_progress", summary="Slow with progress", numeric=False)


def run(ctx):
    calls = 0
    begun = time.monotonic()
    while time.monotonic() - begun < 0.6:
        ctx.progress((time.monotonic() - begun) / 0.6, "working")
        calls += 1
    time.sleep(0.2)  # longer than the worker holds reports back: this one is sent
    ctx.progress(7.0, "beyond the end")
    yield Reading(name="speed_calls", value=calls, unit="1")
