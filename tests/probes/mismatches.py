"""Reports a wrong bit."""

from canaryd.probe import Comparison, Evidence, Exactness, ProbeSpec, Span

SPEC = ProbeSpec(name="mismatches", summary="Finds a wrong result", version=3, numeric=False)
EVIDENCE = Evidence(
    wrong=1,
    total=4,
    first=(((0, 1), "3f800000", "00000000"),),
    bits={"23": 1},
    zeroed=1,
    nonfinite=0,
    lines={"row": Span(first=0, last=0, distinct=1)},
    pattern="one element zeroed",
)


def run(ctx):
    yield Comparison(
        case="only",
        shape="M=2 N=2",
        seed=ctx.seed,
        exactness=Exactness.UNIVERSAL,
        trials=2,
        wrong_trials=1,
        evidence=EVIDENCE,
    )
