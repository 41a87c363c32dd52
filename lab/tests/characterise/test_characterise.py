"""`canaryd characterise`: parts on disk, controls that must fail, resuming, slices, and the page."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
from canaryd_lab.characterise.acceptance import records
from canaryd_lab.characterise.document import document, verdict
from canaryd_lab.characterise.page import page
from canaryd_lab.characterise.results import Directory, NotOurs, Part, Result, Status, file_name, sliced
from canaryd_lab.observation import Claim, Observation, Seen

from canaryd.codec import from_json, to_json
from canaryd.model import Device, Outcome
from tests.command import Answer, Process, canaryd, configure, eventually, in_turn, running

CPU = Device(uuid="CPU-1", backend="cpu", index=0, model="a <processor>")
RIGHT = Observation(name="float32/dense/nt/tile", claim=Claim.STRICT, seen=Seen.RIGHT)
FAILED = Observation(name="a wrong golden", claim=Claim.CONTROL, seen=Seen.WRONG)


def result(*seen: Observation, name: str = "part", outcome: Outcome = Outcome.COMPLETED) -> Result:
    return Result(
        name=name, title=name, rank=1, started=0.0, seconds=1.0, outcome=outcome, observations=seen, facts={"a": [1]}
    )


def observation(claim: Claim, seen: Seen, error: str = "") -> Observation:
    return Observation(name="x", claim=claim, seen=seen, error=error)


# --- What parts come to ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("claim", "seen", "error", "status"),
    [
        (Claim.STRICT, Seen.RIGHT, "", Status.RIGHT),
        (Claim.STRICT, Seen.WRONG, "", Status.WRONG),
        (Claim.OPEN, Seen.WRONG, "", Status.MEASURED),
        (Claim.CONTROL, Seen.WRONG, "", Status.RIGHT),
        (Claim.CONTROL, Seen.RIGHT, "", Status.INVALID),
        (Claim.CONTROL, Seen.RAISED, "device", Status.INVALID),
        (Claim.STRICT, Seen.RAISED, "other", Status.UNCLASSIFIED),
        (Claim.OPEN, Seen.RAISED, "other", Status.UNCLASSIFIED),
        (Claim.STRICT, Seen.RAISED, "harness", Status.UNCLASSIFIED),
        (Claim.STRICT, Seen.RAISED, "device", Status.FAILED),
        (Claim.STRICT, Seen.REFUSED, "", Status.NOT_TRIED),
        (Claim.OPEN, Seen.NOT_OFFERED, "", Status.NOT_TRIED),
        (Claim.STRICT, Seen.NOT_REACHED, "", Status.NOT_TRIED),
        (Claim.STRICT, Seen.LEFT_OUT, "", Status.NOT_TRIED),
    ],
)
def test_a_part_comes_to_the_worst_of_what_was_seen(claim, seen, error, status):
    """Only a strict mismatch, an error, or a control that does not fail is bad."""
    assert result(observation(claim, seen, error)).status is status


@pytest.mark.parametrize(
    ("outcome", "status"),
    [
        (Outcome.CRASHED, Status.FAILED),
        (Outcome.TIMED_OUT, Status.FAILED),
        (Outcome.ERRORED, Status.UNCLASSIFIED),
        (Outcome.SKIPPED, Status.NOT_TRIED),
    ],
)
def test_a_worker_that_is_lost_is_a_result(outcome, status):
    """A crash and a hang are failures; an exception that nobody foresaw has no class."""
    assert result(outcome=outcome).status is status


def test_a_characterisation_without_controls_is_not_right():
    """Right results mean something only beside a control that failed."""
    assert verdict([result(RIGHT)], []) == "incomplete"
    assert verdict([result(RIGHT), result(FAILED)], []) == "right"
    assert verdict([result(RIGHT), result(FAILED)], [Part(name="b", title="b", rank=1, seconds=1.0)]) == "incomplete"
    assert verdict([result(RIGHT), result(observation(Claim.CONTROL, Seen.RIGHT))], []) == "invalid"


def test_slices_cover_all_parts_once():
    """Each slice has parts of every rank, and none is in two."""
    parts = [Part(name=f"p{i:02d}", title="", rank=i, seconds=1.0) for i in range(11)]
    slices = [sliced(parts, number, 4) for number in (1, 2, 3, 4)]
    assert sorted(p.name for one in slices for p in one) == [p.name for p in parts]
    assert [p.rank for p in slices[0]] == [0, 4, 8]


# --- On disk ---------------------------------------------------------------------------------------------------------


def test_results_are_whole_on_the_disk_or_not_there(tmp_path):
    """A file that is cut off, as by a power failure, is no result; everything else comes back as it was."""
    directory = Directory(tmp_path / "new")
    directory.open({"device": "CPU-1"})
    directory.add(result(RIGHT, name="exactness/a>b"))
    (tmp_path / "new/parts/other.json").write_text('{"name": "other", "tit')
    assert directory.results() == [result(RIGHT, name="exactness/a>b")]
    assert file_name("exactness/a>b") == "exactness-a-b"


def test_a_directory_belongs_to_one_device_and_stack(tmp_path):
    """Results of two devices are never mixed."""
    directory = Directory(tmp_path)
    directory.open({"device": "CPU-1", "stack": "a"})
    directory.open({"device": "CPU-1", "stack": "a"})
    with pytest.raises(NotOurs, match="stack 'a', not 'b'"):
        directory.open({"device": "CPU-1", "stack": "b"})


# --- The page --------------------------------------------------------------------------------------------------------


def test_the_page_escapes_what_a_device_calls_itself_and_needs_no_network():
    """Names of devices and texts of drivers are data."""
    wrong = Observation(
        name="float32/dense",
        claim=Claim.STRICT,
        seen=Seen.WRONG,
        detail="<script>",
        values={"raw_flops_per_second": 2e12},
    )
    text = page(document(CPU, [result(wrong, FAILED)], [], drill="flip"))
    assert "&lt;script&gt;" in text
    assert "<script" not in text
    assert "a &lt;processor&gt;" in text
    assert "http" not in text
    assert "DRILL" in text
    assert "WRONG" in text
    assert "2 TFLOP/s" in text


def test_the_page_takes_no_other_control_for_an_injected_fault():
    """A wrong golden, an unforeseen error and an accumulator made in software are controls too."""
    text = page(document(CPU, [result(RIGHT, FAILED)], [], drill=""))
    assert "controls: 1 failed as they must, 0 did not." in text
    assert "injected faults" not in text


# --- On this machine's processor -------------------------------------------------------------------------------------


def characterise(tmp_path: Path, *options: object, parts: tuple[str, ...] = ("controls",)) -> tuple[object, ...]:
    chosen = [word for part in parts for word in ("--part", part)]
    return (
        "characterise", "--device", "cpu:0", "--minutes", "3", "--state-dir", tmp_path / "state",
        "--resume", tmp_path / "out", *chosen, *options,
    )  # fmt: skip


def written(tmp_path: Path) -> dict:
    (path,) = (tmp_path / "out").glob("characterise-*.json")
    return json.loads(path.read_text())


class Made(NamedTuple):
    """A characterisation of this processor that was begun, killed and finished, with --accept each time."""

    directory: Path
    early: Answer
    """In too short a time."""
    killed: Mapping[str, int]
    """File of a part → when it was written, after the kill."""
    answer: Answer
    """At last."""


PARTS = ("controls", "width", "memory", "telemetry", "exactness/tfloat32>float32", "cases/exact_integer")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """One characterisation for all that is asked of a sound one."""
    directory = tmp_path_factory.mktemp("made")
    typed = characterise(directory, "--accept", parts=PARTS)
    early = canaryd(*characterise(directory, "--accept", "--minutes", "0.05", parts=PARTS))
    with running(Process(*typed)) as process:
        eventually((directory / "out/parts/controls.json").exists)
        process.end(signal.SIGKILL)
    return Made(directory, early, dated(directory), canaryd(*typed))


def dated(directory: Path) -> dict[str, int]:
    """Return when each part was written."""
    return {p.name: p.stat().st_mtime_ns for p in (directory / "out/parts").glob("*.json")}


@pytest.mark.slow
@pytest.mark.torch
def test_a_processor_is_characterised(made):
    """JSON and page are there, the controls failed, the accumulators are as wide as the goldens assume."""
    assert made.answer.code == 0, made.answer
    document = written(made.directory)
    assert document["verdict"] == "right"
    assert document["controls"]["did_not_fail"] == 0
    found = {p["name"]: p for p in document["parts"]}
    assert found.keys() == {"environment", *PARTS}
    widths = {o["name"]: o["values"].get("kept_bits") for o in found["width"]["observations"]}
    assert widths["float64"] == 53
    assert widths["float32"] == 24
    assert widths["float16 in software"] == 11
    tf32 = next(o for o in found["width"]["observations"] if o["name"] == "float32/switch tf32")
    assert tf32["seen"] == "not_offered"
    assert "not offered here" in tf32["detail"]
    assert found["exactness/tfloat32>float32"]["status"] == "not_tried"
    assert list((made.directory / "out").glob("characterise-*.html"))
    assert [from_json(Result, json.loads(p.read_text())) for p in (made.directory / "out/parts").glob("*.json")]


@pytest.mark.slow
@pytest.mark.torch
def test_a_control_that_does_not_fail_is_exit_status_1(tmp_path):
    """A comparison that is blind, by the drill of that name, makes the characterisation invalid."""
    answer = canaryd(*characterise(tmp_path, "--drill", "blind"))
    assert answer.code == 1
    assert "INVALID" in answer.out
    assert written(tmp_path)["controls"]["did_not_fail"] > 0


@pytest.mark.torch
def test_an_injected_fault_is_a_strict_mismatch_and_exit_status_1(tmp_path):
    """A bit flipped in every result shows in every strict observation."""
    answer = canaryd(*characterise(tmp_path, "--drill", "consistent", parts=("controls", "memory")))
    assert answer.code == 1
    assert "WRONG" in answer.out
    assert written(tmp_path)["strict"]["wrong"] > 0
    without_torch = configure(tmp_path)  # it is told before a worker with torch is asked
    mixed = canaryd(*characterise(tmp_path, "--config", without_torch))
    assert (mixed.code, mixed.out) == (64, "")
    assert f"--resume {tmp_path}/out: its results are of drill 'consistent', not ''; name another" in mixed.err


@pytest.mark.slow
@pytest.mark.torch
def test_after_a_kill_resume_goes_on_and_repeats_nothing(made):
    """Kill -9 leaves whole parts; the next call carries out the others alone."""
    assert "controls.json" in made.killed
    assert "memory.json" not in made.killed
    after = dated(made.directory)
    assert "memory.json" in after
    assert {name: after[name] for name in made.killed} == made.killed


@pytest.mark.slow
@pytest.mark.torch
def test_what_does_not_fit_is_left_and_said(made):
    """A few seconds are not enough: exit status 3, and the command that goes on."""
    assert made.early.code == 3
    assert "not done yet:" in made.early.err
    assert "--resume" in made.early.err


def test_mistakes_are_usage_errors(tmp_path):
    """A slice beyond its number, no time, a fault that does not exist."""
    mistakes = (("--slice", "5/4"), ("--slice", "x"), ("--minutes", "0"), ("--drill", "nothing"))
    answers = in_turn(*(characterise(tmp_path, *options) for options in mistakes))
    assert [answer.code for answer in answers] == [64] * len(mistakes)


def test_a_part_that_does_not_exist_is_a_usage_error(tmp_path):
    """It is told with those there are, with or without torch, and no directory of results is begun."""
    answer = canaryd(*characterise(tmp_path, "--config", configure(tmp_path), parts=("exactnes",)))
    assert answer.code == 64
    assert "--part exactnes: no such part; choose from environment, controls" in answer.err
    assert 'did you mean "exactness"?' in answer.err
    assert not (tmp_path / "out").exists()


def test_classes_that_were_right_are_accepted_and_no_others():
    """One wrong result takes its class out; parts that are no probe's cases, and bad parts, accept nothing."""
    right = Observation(name="float32/dense/square/nt@48x48x48", claim=Claim.STRICT, seen=Seen.RIGHT)
    late = Observation(name="float32/full/square/nt@48x48x48", claim=Claim.STRICT, seen=Seen.NOT_REACHED)
    facts = {"stack": {"torch": "2.9"}, "probe_version": 2}
    good = replace(result(right, late, name="cases/exact_matmul"), facts=facts)
    other = replace(good, name="exactness/float32")
    bad = replace(good, name="cases/exact_integer", observations=(right, replace(late, seen=Seen.WRONG)))
    (met,) = records(CPU, [good, other, bad])
    assert (met.device, met.kind, met.probe, met.probe_version) == ("CPU-1", CPU.kind, "exact_matmul", 2)
    assert list(met.accepted) == ["float32/dense/square/nt@64x64x64/ragged"]
    assert not met.classes


@pytest.mark.slow
@pytest.mark.torch
def test_accepted_classes_are_stored_and_exported(made, tmp_path):
    """Not without a control, and never by a drill; then the store has them with the stack that they hold for."""
    assert canaryd(*characterise(tmp_path, "--accept", "--drill", "flip")).code == 64
    assert "nothing was accepted, because this characterisation is incomplete" in made.early.err
    assert "classes accepted" in made.answer.err
    exported = canaryd("baseline", "export", "--state-dir", made.directory / "state")
    (met,) = exported.document["met"]
    assert met["probe"] == "exact_integer"
    assert any(name.startswith("int64/gather/fresh@") for name in met["accepted"])
    assert met["stack"]["torch"]


def test_json_of_results_comes_back():
    """What is written is what is read."""
    assert from_json(Result, to_json(result(RIGHT, FAILED))) == result(RIGHT, FAILED)
