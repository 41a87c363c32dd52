"""Leaves a thread behind that reports progress into later runs."""

import threading
import time

from canaryd.probe import ProbeSpec, Reading

SPEC = ProbeSpec(name="late_thread", summary="Reports progress after its end", numeric=False)


def run(ctx):
    def babble():
        while True:
            time.sleep(0.02)
            ctx.progress(0.9, "late")

    threading.Thread(target=babble, daemon=True).start()
    yield Reading(name="one", value=1, unit="1")
