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
    TWIN,
    UNREACHED,
    ask,
    evidence,
    finding,
    fresh,
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
    assert (verdict.findings[0].runs, verdict.findings[0].repro) == (("r1",), "canaryd check …")


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
