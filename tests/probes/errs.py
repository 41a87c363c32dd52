"""Gives the comparisons that its settings list for each of its runs; the last list holds for all further runs."""

import pathlib

from canaryd.probe import Comparison, Doubt, Evidence, Exactness, ProbeSpec, Subject

SPEC = ProbeSpec(name="errs", summary="Is wrong as its settings say", numeric=False)


def run(ctx):
    log = pathlib.Path(ctx.settings["log"])
    done = len(log.read_text()) if log.exists() else 0
    log.write_text("." * (done + 1))
    lists = ctx.settings["runs"]
    for case, subject, trials, wrong in lists[min(done, len(lists) - 1)]:
        if ctx.cases and case not in ctx.cases:
            continue
        found = Evidence(
            wrong=1,
            total=4,
            first=(((0,), "0x3f80", "0x3f88"),),
            bits={"3": 1},
            zeroed=0,
            nonfinite=0,
            lines={},
            pattern="one bit",
        )
        yield Comparison(
            case=case,
            shape="N=4",
            seed=ctx.seed,
            exactness=Exactness.UNIVERSAL,
            subject=Subject(subject),
            doubt={"host": Doubt.ARITHMETIC, "comparator": Doubt.COMPARATOR}.get(subject, Doubt.NONE),
            trials=trials,
            wrong_trials=wrong,
            evidence=found if wrong else None,
        )
