"""What people read in findings of the judge."""

import dataclasses

import pytest

from canaryd.facts import Skipped
from canaryd.judge import findings
from canaryd.judge.phrases import PROVIDER
from canaryd.model import Outcome
from tests.judge.made import (
    DAY,
    FAULTY,
    GPU,
    HOUR,
    SUSPECT,
    TWIN,
    UNKNOWN,
    UNREACHED,
    E,
    H,
    ask,
    comparator,
    confirmations,
    evidence,
    finding,
    fresh,
    message,
    mismatches,
    right,
    run,
    wrong,
)
from tests.judge.scenarios import SCENARIOS
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
    assert (verdict.findings[0].runs, verdict.findings[0].repro) == (("r1",), "canaryd check --repeat r1")


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


def test_clean_confirmations_do_not_acquit():
    """After three clean confirmation runs the device is suspect still, and the finding says why."""
    verdict = ask(*confirmations(0, clean=3), fresh())
    assert verdict.state is SUSPECT
    found = finding(verdict, "exact-mismatch")
    assert "3 of 3 retests passed, which does not clear the device." in found.evidence
    assert found.action == (
        "To find the cause, repeat the test on another node (not here) with the same model and software"
    )
    assert found.repro == f"canaryd check --repeat {found.runs[-1]}"


def test_three_confirmations_outlast_any_number_of_clean_ones():
    """Clean runs after a confirmed mismatch do not outvote it."""
    assert ask(*confirmations(3, clean=5), fresh()).state is FAULTY


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


def test_confirmed_software_says_no_rma():
    """Every device of the model wrong alike: faulty numbers, but no part to send back."""
    verdict = SCENARIOS["sibling wrong in the same bits"]()[0]
    assert "Do not send it back" in finding(verdict, "exact-mismatch-confirmed").action


def test_the_accused_host_is_named():
    """An accelerator that shares a bad hour with its host points at the host's CPU by name."""
    verdict = SCENARIOS["the host's CPU was wrong within 24 h"]()[0]
    found = finding(verdict, "host-in-doubt")
    assert "CPU: cpu:0 (Xeon)." in found.evidence
    assert found.cause is H


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


def test_a_comparison_that_failed_its_retests_too_did_not_happen_once():
    """Within a minute two of them count as one, and the words say so; the test may be repeated at once."""
    told = ask(run(HOUR, comparator()), run(HOUR + 59, comparator()), fresh()).findings[0]
    assert told.evidence[0] == "It did not happen twice at least 60 seconds apart, so either side may be wrong."
    assert told.action == "Wait for the next run, or run it now: canaryd check"


def test_a_finding_lists_a_bounded_number_of_runs():
    """A device that fails for months does not drag every run id into each verdict."""
    found = ask(*mismatches(*(600.0 * i for i in range(1, 100)))).findings[0]
    assert len(found.runs) == findings.RUNS_NAMED


def test_worst_first():
    """Findings are sorted by state, then by probe."""
    verdict = ask(
        *mismatches(2 * HOUR, HOUR),
        run(60, outcome=Outcome.CRASHED),
        wanted={"zeta": 60, "exact_matmul": 60, "beta": 60},
    )
    assert [(f.state, f.probe) for f in verdict.findings] == [
        (FAULTY, "exact_matmul"), (SUSPECT, "exact_matmul"),
        (UNKNOWN, "beta"), (UNKNOWN, "exact_matmul"), (UNKNOWN, "zeta"),
    ]  # fmt: skip


def test_ties_name_the_costlier_cause():
    """Of two unknown findings, the environment names the verdict before the harness."""
    wanted = {"a": 900, "b": 900}
    runs = [run(60, probe="a", outcome=Outcome.GARBLED), run(60, probe="b", outcome=Outcome.OUT_OF_MEMORY)]
    completed = [run(HOUR, right(), probe=p) for p in wanted]
    assert ask(*runs, *completed, wanted=wanted).cause is E
