"""Has two cases, and runs those that are asked for; a copy under another name has another case."""

from canaryd.probe import Comparison, Exactness, NoCase, ProbeSpec

SPEC = ProbeSpec(name="picks", summary="Runs the cases that are asked for", numeric=False)
NAMES = ("int64/sum", "int64/xor") if SPEC.name == "picks" else ("float64/sum",)


def run(ctx):
    if not (asked := [name for name in NAMES if not ctx.cases or name in ctx.cases]):
        raise NoCase(ctx.cases, NAMES)
    for name in asked:
        yield Comparison(case=name, shape="N=1", seed=ctx.seed, exactness=Exactness.UNIVERSAL, trials=3)
