"""Leaves a child behind that holds every pipe open."""

import os
import time

from canaryd.probe import ProbeSpec, Reading

SPEC = ProbeSpec(name="forks_a_grandchild", summary="Leaves a child behind", numeric=False)


def run(ctx):
    child = os.fork()
    if child == 0:
        if ctx.settings.get("escape"):
            os.setsid()
        time.sleep(ctx.settings.get("seconds", 600))
        os._exit(0)
    yield Reading(name="child", value=child)
    if ctx.settings.get("crash"):
        os.abort()
