"""Counts more results than a number of 64 bits holds."""

from canaryd.probe import Comparison, Exactness, ProbeSpec

SPEC = ProbeSpec(name="counts_too_far", summary="Counts too far", numeric=False)


def run(ctx):
    yield Comparison(case="only", shape="N=1", seed=ctx.seed, exactness=Exactness.UNIVERSAL, trials=2**64)
