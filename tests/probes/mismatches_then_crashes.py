"""Reports a wrong bit and then takes the process down: the evidence must survive."""

import os
import signal

from canaryd.probe import Comparison, Evidence, Exactness, ProbeSpec

SPEC = ProbeSpec(name="mismatches_then_crashes", summary="Wrong and dead", numeric=False)


def run(ctx):
    evidence = Evidence(wrong=1, total=1, first=(), bits={}, zeroed=0, nonfinite=0, lines={}, pattern="one element")
    yield Comparison(case="only", shape="N=1", seed=1, exactness=Exactness.UNIVERSAL, wrong_trials=1, evidence=evidence)
    os.kill(os.getpid(), signal.SIGSEGV)
    yield
