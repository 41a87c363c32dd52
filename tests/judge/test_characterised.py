"""What counts as met, from which runs it is learnt, and for which devices and software it holds."""

from __future__ import annotations

import pytest

from canaryd.facts import Comparison, Evidence, Exactness, Subject
from canaryd.judge.characterised import By, Claims, Met, Proof, class_of, met_in
from canaryd.model import Outcome, Run

KIND, STACK = ("cuda", "Newcomer 1"), {"torch": "2.13", "driver": "580"}
EVIDENCE = Evidence(wrong=1, total=4, first=(), bits={}, zeroed=0, nonfinite=0, lines={}, pattern="one")


def compared(case, wrong=0, **fields):
    """Return a comparison of a case."""
    common = {"shape": "M=8", "seed": 1, "exactness": Exactness.UNIVERSAL, "wrong_trials": wrong}
    return Comparison(case=case, **{**common, "evidence": EVIDENCE if wrong else None, **fields})


def run(*comparisons, **fields):
    """Return a run of these comparisons."""
    common = {"id": "r", "device": "GPU-a", "probe": "exact_matmul", "probe_version": 1, "started": 1.0, "seconds": 1.0}
    common |= {"outcome": Outcome.COMPLETED, "stack": STACK, "comparisons": comparisons}
    return Run(**{**common, **fields})


def met(device="GPU-a", *classes, **fields):
    """Return a record of classes that a device met."""
    common = {"kind": KIND, "probe": "exact_matmul", "probe_version": 1, "stack": STACK}
    return Met(device=device, classes=dict.fromkeys(classes, 1.0), **{**common, **fields})


def test_a_class_is_met_by_agreement_alone():
    """Not by a run with a mismatch in the same class, by a golden or comparator in doubt, or no software."""
    right, other = compared("bfloat16/full/square/nt@64x64x64"), compared("float16/full/square/nt@8x8x8")
    met_right, met_other = "bfloat16/full/square/nt@64x64x64/aligned", "float16/full/square/nt@8x8x8/ragged"
    assert met_in(run(right, other)) == {met_right, met_other}
    assert met_in(run(right, compared("bfloat16/full/square/nt@64x64x64#3", wrong=1), other)) == {met_other}
    assert met_in(run(right, compared(right.case, wrong=1, subject=Subject.HOST))) == set()
    assert met_in(run(right, compared(right.case, wrong=1, subject=Subject.COMPARATOR))) == set()
    assert met_in(run(compared("bfloat16/full/square/nt", subject=Subject.HOST))) == set()
    assert met_in(run(right, stack={})) == set()
    assert met_in(run(compared("*"))) == set(), "clean comparisons summed into one"
    assert met_in(run(right, outcome=Outcome.CRASHED)) == {met_right}, "a fact stays one after a crash"


def test_a_kernel_for_other_sizes_vouches_for_nothing():
    """A healthy lone device that is exact at small sizes, and whose library splits large sums, is not accused."""
    small = met("GPU-a", "bfloat16/dense/square/nt@512x512x512/ragged")
    case = "bfloat16/dense/square/nt"
    assert Claims([small]).proof(KIND, run(), f"{case}@497x497x497") == Proof(By.ITSELF, ("GPU-a",))
    assert Claims([small]).proof(KIND, run(), f"{case}@2048x2048x2048") is None


@pytest.mark.parametrize(
    ("case", "of"),
    [
        ("f/dense/square/nn@512x512x512", "f/dense/square/nn@512x512x512/aligned"),
        ("f/dense/square/nn@500x512x512", "f/dense/square/nn@512x512x512/aligned"),  # M is no stride
        ("f/dense/square/tn@500x512x512", "f/dense/square/tn@512x512x512/ragged"),
        ("f/dense/square/nt@512x512x500#7", "f/dense/square/nt@512x512x512/ragged"),
        ("f/dense/batched/nn@4x512x512x512#7g", "f/dense/batched/nn@4x512x512x512/aligned/graph"),
        ("bfloat16/onehot/causal@1x8x2x500x500x64", "bfloat16/onehot/causal@1x8x2x512x512x64"),
    ],
)
def test_strides_and_graphs_are_part_of_a_products_class(case, of):
    """Libraries choose kernels by them. A class on record from before has no such mark, and proves nothing now."""
    assert class_of(case) == of
    assert met_in(run(compared(case))) == {of}
    before = met("GPU-a", "f/dense/square/nn@512x512x512", "bfloat16/onehot/causal@1x8x2x512x512x64")
    proof = Claims([before]).proof(KIND, run(), case)
    assert (proof is not None) is (case.partition("/")[0] == "bfloat16")


@pytest.mark.parametrize(
    ("records", "proof"),
    [
        ([], None),
        ([met("GPU-a", "x")], Proof(By.ITSELF, ("GPU-a",))),
        ([met("GPU-c", "x"), met("GPU-b", "x"), met("GPU-d", "y")], Proof(By.SIBLING, ("GPU-b", "GPU-c"))),
        ([met("GPU-z", "x", imported=True)], Proof(By.WITNESS, ("GPU-z",))),
        ([met("GPU-z", "x", imported=True), met("GPU-b", "x")], Proof(By.SIBLING, ("GPU-b",))),
        ([met("GPU-b", accepted={"x": "shown"}), met("GPU-a", "x")], Proof(By.ACCEPTED, ("GPU-b",))),
        ([met("GPU-a", "x", stack={**STACK, "driver": "590"})], None),
        ([met("GPU-b", "x", kind=("cuda", "Newcomer 2"))], None),
        ([met("GPU-a", "x", probe_version=2)], None),
        ([met("GPU-a", "y")], None),
    ],
)
def test_the_first_proof_that_holds_is_named(records, proof):
    """Backend, model, probe, its version, the class and the whole stack must be equal."""
    assert Claims(records).proof(KIND, run(), "x@home") == proof
