"""Writes down when it runs, takes its time, and is wrong as often as its settings say."""

import os
import signal
import time

from canaryd.probe import Comparison, Evidence, Exactness, ProbeSpec, Reading

SPEC = ProbeSpec(
    name="records",
    summary="Writes down when it runs",
    numeric=False,
    period=1.0,
    budget={"quick": 0.1, "standard": 0.1, "deep": 0.1},
)
EVIDENCE = Evidence(wrong=1, total=4, first=(), bits={}, zeroed=1, nonfinite=0, lines={}, pattern="one element zeroed")


def run(ctx):
    if ctx.settings.get("stubborn"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    before = write(ctx, "begin")
    ctx.progress(0.5, "half way")
    time.sleep(ctx.settings.get("seconds", 0))
    while "until" in ctx.settings and not os.path.exists(ctx.settings["until"]):
        time.sleep(0.05)
    if "fingerprint" in ctx.settings:
        yield Reading(name="golden_fingerprint", value=ctx.settings["fingerprint"])
    wrong = bool(ctx.drill) or before < ctx.settings.get("wrong", 0)
    yield Comparison(
        case="only",
        shape="N=4",
        seed=ctx.seed,
        exactness=Exactness.UNIVERSAL,
        trials=2,
        wrong_trials=int(wrong),
        evidence=EVIDENCE if wrong else None,
    )
    write(ctx, "end")


def write(ctx, word):
    """Append a line to the log that the settings name; return how many lines of this kind it had."""
    if "log" not in ctx.settings:
        return 0
    with open(ctx.settings["log"], "a+") as log:
        log.seek(0)
        count = log.read().count(word)
        log.write(f"{word} {os.getpid()} {time.time()}\n")
    return count
