"""Compares as many results as its time allows; with the setting `seconds` it takes that long, as on a busy machine."""

import time

from canaryd.probe import Comparison, Exactness, ProbeSpec

SPEC = ProbeSpec(
    name="counts",
    summary="As many results as time",
    numeric=False,
    budget=dict.fromkeys(("quick", "standard", "deep"), 0.01),
)


def run(ctx):
    time.sleep(ctx.settings.get("seconds", 0.0))
    trials = round(ctx.settings["per_budget"] * ctx.budget / 0.01)
    yield Comparison(case="only", shape="N=1", seed=ctx.seed, exactness=Exactness.UNIVERSAL, trials=trials)
