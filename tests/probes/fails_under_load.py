"""Wrong only where the device is hot: while it serves (a setting says so here), or in a retest under load."""

from canaryd.probe import Comparison, Evidence, Exactness, ProbeSpec, Span

SPEC = ProbeSpec(
    name="fails_under_load",
    summary="Finds a wrong result under load alone",
    budget={"quick": 0.2, "standard": 0.5, "deep": 1.0},
)
EVIDENCE = Evidence(
    wrong=1,
    total=4,
    first=(((0, 1), "3f800000", "3f800001"),),
    bits={"0": 1},
    zeroed=0,
    nonfinite=0,
    lines={"row": Span(first=0, last=0, distinct=1)},
    pattern="one bit",
)


def run(ctx):
    trials = 0
    while trials < 2 or (ctx.intensity and ctx.left > 0.0):
        ctx.pace()
        trials += 1
    hot = ctx.intensity in ("steady", "pulsed") or ctx.settings.get("serving", False)
    yield Comparison(
        case="only",
        shape="M=2 N=2",
        seed=ctx.seed,
        exactness=Exactness.UNIVERSAL,
        trials=trials,
        wrong_trials=int(hot),
        evidence=EVIDENCE if hot else None,
    )
