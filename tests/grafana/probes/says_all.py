"""Gives on each GPU what a file says: matches, mismatches, fingerprints, recordings and readings of every kind."""

import json
from pathlib import Path

from canaryd.probe import Comparison, Evidence, Exactness, ProbeSpec, Reading, Recording

SPEC = ProbeSpec(
    name="says_all",
    summary="Gives what a file says",
    backends=("cuda",),
    period=10.0,
    budget={"quick": 0.1, "standard": 0.1, "deep": 0.1},
)
EVIDENCE = Evidence(wrong=1, total=4, first=(), bits={}, zeroed=1, nonfinite=0, lines={}, pattern="one element zeroed")


def run(ctx):
    said = json.loads(Path(ctx.settings["file"]).read_text())
    mine = said["all"] | said.get(ctx.device.uuid, {})
    if mine["fails"]:
        raise RuntimeError("the file says so")
    wrong = mine["wrong"] or bool(ctx.drill)
    yield Comparison(
        case="only",
        shape="N=4",
        seed=ctx.seed,
        exactness=Exactness.UNIVERSAL,
        trials=2,
        wrong_trials=int(wrong),
        evidence=EVIDENCE if wrong else None,
    )
    yield Reading(name="golden_fingerprint", value=mine["fingerprint"])
    for name, value, labels in mine["readings"]:
        yield Reading(name=name, value=value, labels=labels)
    for _ in range(30 if ctx.baselining else 1):
        yield Recording(case="reef", digest=mine["digest"], tokens=tuple("abcdefgh"), values=(mine["logit"],) * 8)
