"""Does everything right: two facts, one absence, one skipped part."""

from canaryd.probe import Absent, Comparison, Exactness, ProbeSpec, Reading, Skipped

SPEC = ProbeSpec(name="passes", summary="A well-behaved probe", numeric=False)


def run(ctx):
    ctx.progress(0.5, "half way")
    yield Reading(name="answer_seconds", value=0.25, unit="seconds")
    yield Comparison(case="only", shape="N=1", seed=ctx.seed, exactness=Exactness.UNIVERSAL, trials=3)
    yield Skipped(case="other", reason="not on this device")
    yield Absent(name="temperature_celsius", reason="no sensor")
