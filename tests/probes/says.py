"""Telemetry that says what a file says: readings, or that it hangs, crashes or cannot be had."""

import json
import os
import time
from pathlib import Path

from canaryd.probe import Absent, ProbeSpec, Reading, Skip

SPEC = ProbeSpec(
    name="says",
    summary="Telemetry out of a file",
    period=1.0,
    budget={"quick": 0.5, "standard": 0.5, "deep": 0.5},
    timeout=0.5,
    numeric=False,
    telemetry=True,
)


def run(ctx):
    said = json.loads(Path(ctx.settings["file"]).read_text())
    with open(ctx.settings["file"] + ".pids", "a") as pids:
        pids.write(f"{os.getpid()}\n")
    if said.get("hangs"):
        time.sleep(600)
    if said.get("crashes"):
        os.abort()
    if said.get("skips"):
        raise Skip(said["skips"])
    for name, value, labels in said.get("readings", []):
        yield Reading(name=name, value=value, labels=labels)
    for name, reason in said.get("absent", {}).items():
        yield Absent(name=name, reason=reason, code=said.get("code", 0))
