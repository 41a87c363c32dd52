"""The example of the README is what `check` prints of these facts."""

from __future__ import annotations

from datetime import datetime

from canaryd.engine.check import NO_ENDPOINT, Result, all_gaps, lacking
from canaryd.facts import Place
from canaryd.model import (
    Cause,
    Confirmation,
    Device,
    Elsewhere,
    Finding,
    Ground,
    PlaceTally,
    ProbeTally,
    State,
    Tally,
    Verdict,
    WrongResults,
)
from canaryd.report import check
from tests.command import ROOT

SINCE = datetime(2026, 11, 23, 17, 49).astimezone().timestamp()
CPU = Device(
    uuid="CPU-1",
    backend="cpu",
    index=0,
    model="Intel(R) Xeon(R) Processor",
    weak_identity=True,
    instruction_sets=("native", "avx2"),
)
"""A virtual machine's processor that was given one wrong bit; the figures are those of a real check of it."""

TESTED = ("exact_matmul", "memory_sweep", "exact_units")
"""Probes that it ran; no release had one for links then."""


def faulty() -> Verdict:
    """Return the verdict on it."""
    cores = tuple(PlaceTally(place=Place(unit="core", numbers=(n,)), wrong=100, of=200) for n in (0, 1))
    tallies = {
        "exact_matmul": ProbeTally(wrong=200, of=400, runs=4, retests=Tally(wrong=3, of=3), places=cores, bits=(0,)),
        "recorded_kernels": ProbeTally(wrong=45, of=146, runs=4, retests=Tally(wrong=3, of=3), bits=(0,)),
    }
    finding = Finding(
        rule="exact-mismatch-confirmed",
        state=State.FAULTY,
        cause=Cause.UNDETERMINED,
        message="Wrong results",
        since=SINCE,
        wrong=WrongResults(
            probes=tallies,
            why="Cause unknown: no identical device here to compare with.",
            confirmed=(Confirmation(ground=Ground.RETESTS, why="all retests failed"),),
            elsewhere=Elsewhere(device="cpu", probe="exact_matmul", case="float32/dense", seed=7, level="quick"),
        ),
    )
    now = SINCE + 103.1
    return Verdict(
        device=CPU.uuid, state=State.FAULTY, cause=Cause.UNDETERMINED, findings=(finding,), decided=now, since=SINCE
    )


def example(page: str, first: str) -> str:
    """Return the block of a page that begins with a word."""
    text = (ROOT / page).read_text()
    return text[text.index(f"```text\n{first}") + len("```text\n") :].partition("\n```")[0]


def test_the_check_of_the_readme_is_what_check_prints():
    """Word for word, line for line: nobody edits it by hand."""
    result = Result(level="quick", started=SINCE, seconds=103.1, devices=[CPU], verdicts={CPU.uuid: faulty()})
    result.not_checked = all_gaps("quick", [NO_ENDPOINT, *lacking({CPU.name: TESTED})], [CPU])
    assert example("README.md", "FAULTY") == check.as_text(result)
