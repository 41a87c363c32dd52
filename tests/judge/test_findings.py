"""What people read in findings of the judge."""

import dataclasses

import pytest

from canaryd.facts import Skipped
from canaryd.judge.phrases import PROVIDER
from canaryd.model import Outcome
from tests.judge.made import (
    DAY,
    GPU,
    HOUR,
    NOW,
    TWIN,
    UNREACHED,
    ask,
    comparator,
    evidence,
    finding,
    fresh,
    host,
    message,
    mismatches,
    right,
    run,
    wrong,
)
from tests.places import place


def test_a_suspicion_names_what_where_how_many_and_what_next():
    """What was seen and what to do; case, seed, place, count and pattern, and when it clears, stand behind it."""
    seen = dataclasses.replace(evidence(), repeats=3, repeats_wrong=2)
    verdict = ask(run(60, wrong(seed=7, place=place("core 3"), evidence=seen), id="r1"))
    found = finding(verdict, "exact-mismatch")
    assert found.message == "exact_matmul computed 1 of 1 results wrong; 1 run failed"
    assert found.action == "Wait for 3 automatic retests"
    assert found.evidence == (
        "Cause unknown: no identical device here to compare with.",
        "Clears after 30 days with 3 clean uploads and 3 clean results.",
        "Proven exact (bfloat16/wide): it rounds nothing, so it is exact on devices of this kind.",
        (
            "Newest: bfloat16/wide (M=32, seed 7) on core 3: 12 of 4096 elements wrong: 12 elements, row 17; "
            "2 of 3 fresh uploads wrong."
        ),
    )
    repeat = "--device cuda:0 --probe exact_matmul --case bfloat16/wide --seed 0 --level standard --for 12s"
    assert (verdict.findings[0].runs, verdict.findings[0].repro) == (("r1",), f"canaryd check {repeat}")


def test_why_torch_sees_no_gpu_is_told():
    """In torch's words; a fabric that is not ready names what CUDA waits for, and no interpreter."""
    for why, code, action in (
        ("Error 802: system not yet initialized", "802", "Start Fabric Manager"),
        ("Torch not compiled with CUDA enabled", "", "Set worker.python"),
    ):
        told = {"unseen": why, "unseen_code": code}
        found = finding(ask(of=dataclasses.replace(UNREACHED, detail=told)), "unreached")
        assert found.message.endswith(f"nothing was computed on it; torch says: {why}")
        assert found.action.startswith(action)


def test_confirmed_hardware_says_what_to_do():
    """A confirmed hardware fault leads to the dossier, but only where the identity names a part."""
    twin = [(TWIN, [run(HOUR, right(seed=1000), of=TWIN)])]
    runs = (*mismatches(2 * HOUR, HOUR), fresh())
    strong = finding(ask(*runs, peers=twin), "exact-mismatch-confirmed")
    assert strong.message.startswith(
        "Wrong results in exact_matmul, confirmed: 2 runs at least 60 seconds apart failed"
    )
    assert strong.action == "Take it out of service, then open a vendor case: canaryd report cuda:0 -o DIR"
    weak = dataclasses.replace(GPU, weak_identity=True)
    text = finding(ask(*runs, of=weak, peers=twin), "exact-mismatch-confirmed").action
    assert text.startswith(f"Take it out of service, then tell {PROVIDER}: canaryd report cuda:0")


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"outcome": Outcome.CRASHED, "detail": "the worker was killed by SIGSEGV\nlast output:\nnoise"}, "by SIGSEGV"),
        (
            {"outcome": Outcome.ERRORED, "detail": "Traceback (…):\n  File …\nValueError: boom\n"},
            "error: ValueError: boom",
        ),
        ({"outcome": Outcome.SKIPPED, "detail": "torch is missing"}, "exact_matmul was skipped: torch is missing"),
        ({"outcome": Outcome.SKIPPED, "detail": "x" * 301}, f"skipped: {'x' * 300}…"),
        ({"outcome": Outcome.SKIPPED, "skipped": (Skipped(case="a", reason="no such kernel"),)}, "no such kernel"),
        (
            {"outcome": Outcome.UNKILLABLE, "instruction_set": "avx2"},
            "(avx2) left a process that survives",
        ),
    ],
)
def test_an_outcome_says_why(fields, text):
    """A run that did not complete is reported with the one line of its detail that says why."""
    verdict = ask(run(HOUR, right()), run(60, **fields))
    assert text in message(verdict, "not-completed")
    assert "noise" not in message(verdict, "not-completed")


@pytest.mark.parametrize(("ago", "text"), [(7201, "2 hours"), (5 * HOUR + 9, "5 hours"), (3 * DAY, "3 days")])
def test_stale_evidence_says_its_age(ago, text):
    """The age stands in the finding in whole units."""
    found = message(ask(run(ago, right())), "stale-evidence")
    assert found == f"The last result of exact_matmul is {text} old; its interval is 15 minutes"


# --- One fault: one count, one command -------------------------------------------------------------------------------


def test_each_finding_of_a_fault_gives_the_same_counts():
    """A wrong result, a wrong golden and a wrong comparison are one result each, whatever rule names them."""
    cpu = dataclasses.replace(GPU, uuid="CPU-1", backend="cpu", instruction_sets=("native",))
    both = run(HOUR, wrong(trials=3, wrong_trials=2), host(), comparator(), of=cpu)
    clean = run(60, right(trials=4), of=cpu, probe="exact_matmul", instruction_set="native")
    verdict = ask(run(2 * HOUR, right(trials=9), of=cpu), both, clean, of=cpu)
    tallies = [f.wrong.probes["exact_matmul"] for f in verdict.findings if f.wrong]
    assert {f.rule for f in verdict.findings if f.wrong} >= {"exact-mismatch", "golden-disagreement"}
    # Not the 9 that were right before it failed; the 4 that are right since.
    assert {(t.wrong, t.of) for t in tallies} == {(4, 3 + 1 + 1 + 4)}


TYPES = [
    ("exact_matmul", "bfloat16/wide", "3f80", "bfloat16"),
    ("exact_matmul", "bfloat16>float32/wide", "3f800000", "float32"),
    ("exact_matmul", "tfloat32/dense/square/nt@8x8x8", "3f800000", "float32"),
    ("exact_integer", "int64/embedding/one", "0000007f", "int32"),
    ("recorded_kernels", "sdpa/math/float16/wide@1x2x3", "3c00", "float16"),
    ("memory_sweep", "checkerboard@64", "5555555555555555", "64 bits"),
    ("exact_units", "bfloat16/words", "3f800000", "32 bits"),
    ("another", "case", "", "not known"),
]
"""Probe, case and a wrong word of a result in hexadecimal digits → the type of its numbers."""


@pytest.mark.parametrize(("probe", "name", "word", "kind"), TYPES)
def test_flipped_bits_are_those_of_a_number_type(probe, name, word, kind):
    """The case names it, unless the words compared have another width; else the width is told."""
    first = (((3, 17), f"0x{word}", f"0x{word}"),) if word else ()
    verdict = ask(run(60, wrong(case=name, first=first), probe=probe))
    (found,) = (f.wrong.probes[probe] for f in verdict.findings if f.wrong)
    assert (found.bits, found.bits_by_type) == ((3, 7), {kind: (3, 7)})


def repeated(verdict):
    """Return the case and the seed of the command that repeats the fault, of all its findings."""
    ((case, seed),) = {(w.case, w.seed) for f in verdict.findings if f.wrong and (w := f.wrong.elsewhere)}
    assert all(f"--case {case} --seed {seed} " in f.repro for f in verdict.findings if f.wrong)
    return case, seed


def test_the_command_repeats_the_case_that_fails_most_then_the_cheapest():
    """More runs before more results, and fewer elements to compute where both are equal."""
    large, small = evidence(), evidence(total=64)
    first = run(HOUR, wrong(case="a", trials=9, wrong_trials=9), wrong(case="b"), seed=7)
    again = run(HOUR - 9, wrong(case="b"), seed=7, confirms=first.id)
    assert repeated(ask(first)) == ("a", 7)
    assert repeated(ask(first, again)) == ("b", 7)
    assert repeated(ask(run(HOUR, wrong(case="c", evidence=large), wrong(case="d", evidence=small)))) == ("d", 0)


def test_the_command_stays_the_same_while_the_fault_lasts():
    """However often other cases fail later, and after a repair the fault is another one."""
    first, later = run(9 * HOUR, wrong(case="a"), seed=7), [run(n * HOUR, wrong(case="b"), seed=8) for n in (5, 4, 3)]
    before = ask(first, now=NOW - 8 * HOUR)
    assert repeated(ask(first, *later)) == ("b", 8)
    assert repeated(ask(first, *later, previous=before)) == ("a", 7)
    assert repeated(ask(*later, previous=before)) == ("b", 8)
