"""`canaryd check --boundary`: which job a device went wrong in, and of which nobody can tell."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import tarfile
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest

from canaryd.model import Cause, Finding, State, Tally, Verdict
from canaryd.report import boundary
from canaryd.report.boundary import DeviceChange, Mark, Marks
from tests.command import ROOT, canaryd, configure

VALIDATOR = jsonschema.Draft202012Validator(json.loads((ROOT / "docs/check.schema.json").read_text()))
TOLD = """
import os
from pathlib import Path
from canaryd.probe import Comparison, Evidence, Exactness, ProbeSpec, Skip, Span

SPEC = ProbeSpec(name="told", summary="Right or wrong as a file says", numeric=False)
EVIDENCE = Evidence(wrong=1, total=4, first=(((0, 1), "3f800000", "3f800001"),), bits={"0": 1}, zeroed=0, nonfinite=0,
    lines={"row": Span(first=0, last=0, distinct=1)}, pattern="one bit")

def run(ctx):
    told = Path(__file__).with_suffix(".told").read_text()
    if told == "crash":
        os.abort()
    wrong = told == "wrong"
    yield Comparison(case="only", shape="M=2 N=2", seed=ctx.seed, exactness=Exactness.UNIVERSAL, trials=4,
        wrong_trials=int(wrong), evidence=EVIDENCE if wrong else None)
"""


class Node:
    """A canaryd with one probe that computes as it is told."""

    def __init__(self, directory: Path) -> None:
        self.state, self.probe = directory / "state", directory / "probes.d/told.py"
        self.common = ("--config", configure(directory), "--state-dir", self.state)
        self.probe.write_text(TOLD)

    def check(self, told: str, *words: object, code: int | None = None):
        self.probe.with_suffix(".told").write_text(told)
        answer = canaryd("check", *(words or ("--level", "quick")), *self.common)
        assert code is None or answer.code == code, answer
        return answer

    def begin(self, told: str, *words: object, **kept):
        return self.check(told, "--boundary", "begin", "--label", "4711", *words, **kept)

    def end(self, told: str, *words: object, **kept):
        """The answer as text, and what the document says of the processor."""
        report = self.state.parent / "report.json"
        answer = self.check(told, "--boundary", "end", "--label", "4711", "--report", report, *words, **kept)
        document = json.loads(report.read_text())
        VALIDATOR.validate(document)
        (device,) = document["boundary"]["devices"]
        return answer, document["boundary"], device


@pytest.fixture
def node(tmp_path):
    return Node(tmp_path)


def test_a_device_that_goes_wrong_between_is_named_with_its_dossier(node, tmp_path):
    """Counts before and since; the archive has the digest that the line has, and what is in it is as it was summed."""
    begun = node.begin("right", code=0)
    assert "job 4711: its begin is on record" in begun.out
    answer, said, device = node.end("wrong", code=2)
    assert (device["name"], device["change"]) == ("cpu:0", "went wrong")
    assert device["before"] == {"wrong": 0, "of": 4}
    since = device["since"]
    assert 0 < since["wrong"] < since["of"], "the check and its retests"
    counts = f"0 of 4 results wrong before, {since['wrong']} of {since['of']} since; now "
    (line,) = (line for line in answer.out.splitlines() if line.startswith("cpu:0 went wrong during job 4711 ("))
    assert re.search(rf"\(\d{{4}}-\d\d-\d\d \d\d:\d\d to \S+( \S+)? UTC\): {counts}(suspect|faulty) \(", line), line
    assert line.endswith(f"; dossier {device['dossier']}, SHA-256 {device['sha256']}")
    assert "does not make job 4711 the cause" in said["note"]
    assert said["note"] in answer.out
    archive = Path(device["dossier"])
    assert archive.parent == node.state / "boundaries"
    assert hashlib.sha256(archive.read_bytes()).hexdigest() == device["sha256"]
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path / "out", filter="data")
    (made,) = (tmp_path / "out").iterdir()
    assert subprocess.run(["sha256sum", "--quiet", "-c", "SHA256SUMS"], cwd=made, check=False).returncode == 0
    told = json.loads((made / "dossier.json").read_text())
    assert (told["verdict"]["state"] in ("suspect", "faulty"), told["failures"][0]["probe"]) == (True, "told")


def test_a_fault_of_before_is_not_the_jobs(node):
    """Also where more wrong results come during the job; no dossier is written for it."""
    node.begin("wrong", code=2)
    answer, said, device = node.end("wrong", code=2)
    assert (device["change"], device["dossier"], said["note"]) == ("already wrong", "", "")
    assert device["since"]["wrong"] > 0
    assert re.search(
        r"^cpu:0: already wrong before job 4711 \((suspect|faulty) \(.*\) at its begin\)$", answer.out, re.MULTILINE
    )
    assert not list((node.state / "boundaries").glob("*.tar.gz"))


def test_a_sound_device_is_sound_before_and_after(node):
    """And a document without a boundary has none."""
    node.begin("right", code=0)
    node.check("right", code=0)
    answer, said, device = node.end("right", code=0)
    assert (device["change"], device["why"], said["note"]) == ("sound", "", "")
    assert (device["before"], device["since"]) == ({"wrong": 0, "of": 4}, {"wrong": 0, "of": 8})
    assert "cpu:0: sound before and after job 4711\n" in answer.out
    assert node.check("right", "--json").document["boundary"] is None


@pytest.mark.parametrize(
    ("begin", "end", "why"),
    [
        (("crash",), ("wrong",), "unknown at its begin"),
        (("crash",), ("right",), "unknown at its begin"),
        (("right",), ("crash",), "unknown at its end"),
        (("right", "--level", "quick"), ("wrong",), "at its begin another check was made: canaryd check --level quick"),
        (None, ("wrong",), "no begin of it is on record"),
        (None, ("right",), "no begin of it is on record"),
    ],
)
def test_what_nobody_can_tell_names_no_job(node, begin, end, why):
    """Nothing is sound and no job is named where either check proves nothing."""
    if begin:
        node.begin(*begin)
    answer, said, device = node.end(*end)
    assert device["change"] == "unknown"
    assert (device["before"], device["since"], device["dossier"], said["note"]) == (None, None, "", "")
    assert re.sub(" --(state-dir|config) \\S+", "", answer.out).count(f"during job 4711: {why}"), answer.out
    assert "sound before" not in answer.out


@pytest.mark.torch
def test_a_drill_between_is_not_counted(tmp_path):
    """It was caught, and the device is as sound as before."""
    (tmp_path / "empty.yaml").touch()
    common = ("--config", tmp_path / "empty.yaml", "--state-dir", tmp_path / "state", "--device", "cpu")
    words = ("--probe", "exact_integer", "--level", "quick", "--label", "4711", *common)
    assert canaryd("check", "--boundary", "begin", *words).code == 0
    assert canaryd("drill", "--probe", "exact_integer", *common).code == 2
    answer = canaryd("check", "--boundary", "end", "--json", *words)
    (device,) = answer.document["boundary"]["devices"]
    assert (answer.code, device["change"], device["since"]["wrong"]) == (0, "sound", 0)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--boundary", "begin"), "type canaryd check --boundary begin --label JOB"),
        (("--label", "4711"), "type canaryd check --boundary begin --label JOB"),
        (("--boundary", "end", "--label", "../x"), "'../x' is no label; write a letter or digit"),
        (("--boundary", "end", "--label", ""), "'' is no label"),
        (("--boundary", "end", "--label", "x" * 65), "is no label"),
        (("--boundary", "end", "--label", "4711\n"), "is no label"),
        (("--boundary", "middle", "--label", "4711"), "--boundary"),
    ],
)
def test_a_wrong_label_is_a_usage_error(node, words, said):
    """With what to type; nothing is tested or written."""
    answer = node.check("right", *words, code=64)
    assert (answer.out, said in re.sub(" --(state-dir|config) \\S+", "", answer.err)) == ("", True), answer
    assert not node.state.exists()


def test_a_begin_that_cannot_be_kept_is_a_problem(node):
    """The exit status stays the check's; the end has no begin."""
    node.state.mkdir()
    (node.state / "boundaries").touch()
    answer = node.begin("right", code=0)
    assert "job 4711: its begin is not on record" in answer.out
    assert "problem: the begin of job 4711 is not kept" in answer.out
    _, _, device = node.end("right", code=0)
    assert device["why"] == "no begin of it is on record"


def test_old_files_make_room(tmp_path, monkeypatch):
    """The newest stay, begins and dossiers counted apart."""
    monkeypatch.setattr(boundary, "KEPT", {".json": 3, ".tar.gz": 2})
    archive = tmp_path / "a.tar.gz"
    archive.write_bytes(b"evidence")
    for job in range(6):
        assert boundary.keep(replace(BEGIN, label=f"job-{job}"), tmp_path)
        boundary.keep_dossier(archive, f"job-{job}", tmp_path)
    there = {path.name for path in (tmp_path / "boundaries").iterdir()}
    assert there == {"job-3.json", "job-4.json", "job-5.json", "job-4-a.tar.gz", "job-5-a.tar.gz"}
    assert boundary.recall("job-5", tmp_path) == replace(BEGIN, label="job-5")
    (tmp_path / "boundaries/job-5.json").write_text('{"label": 5}')
    assert boundary.recall("job-5", tmp_path) is None


# --- Without a machine -----------------------------------------------------------------------------------------------

SOUND = Mark(
    name="cuda:3",
    state=State.HEALTHY,
    cause=Cause.NONE,
    tested={"p": 9, "q": 0},
    record={"p": Tally(of=9), "q": Tally(of=5)},
)
WRONG = replace(
    SOUND,
    state=State.SUSPECT,
    cause=Cause.HARDWARE,
    tested={"p": 9},
    record={"p": Tally(wrong=2, of=18), "q": Tally(of=5)},
)
BEGIN = Marks(label="4711", at=100.0, boot="one", tests="canaryd check", devices={"GPU-3": SOUND})
END = replace(BEGIN, at=200.0, devices={"GPU-3": WRONG})


def compared(begin=BEGIN, end=END, since=150.0):
    finding = Finding(rule="r", state=State.SUSPECT, cause=Cause.HARDWARE, message="It is so.", since=since)
    given = {"device": "GPU-3", "state": State.SUSPECT, "cause": Cause.HARDWARE, "decided": 200.0, "since": since}
    found = boundary.compare(begin, end, {"GPU-3": Verdict(findings=(finding,), **given)})
    (device,) = found.devices
    return device.change, device.why, device.since


def with_mark(marks, **changed):
    return replace(marks, devices={"GPU-3": replace(marks.devices["GPU-3"], **changed)})


def test_wrong_results_count_by_the_probes_that_the_begin_tested():
    """What only another probe sees may be older than the job."""
    assert compared()[::2] == (DeviceChange.WENT_WRONG, Tally(wrong=2, of=9))
    change, why, _ = compared(end=with_mark(END, record={"p": Tally(of=18), "q": Tally(wrong=1, of=8)}))
    assert (change, "was not tested then" in why) == (DeviceChange.UNKNOWN, True)


def test_trouble_without_a_wrong_result_counts_by_its_time():
    """An Xid during the job, and one of before of which only the end knew."""
    right = with_mark(END, record={"p": Tally(of=18)})
    change, why, _ = compared(end=right)
    assert (change, why.startswith("0 of 9 results wrong before, 0 of 9 since; now suspect (hardware): ")) == (
        DeviceChange.WENT_WRONG,
        True,
    )
    assert compared(end=right, since=50.0)[0] is DeviceChange.UNKNOWN


@pytest.mark.parametrize(
    ("begin", "end", "why"),
    [
        (BEGIN, replace(END, boot="two"), "the host was restarted since its begin"),
        (replace(BEGIN, devices={}), END, "no begin of it is on record"),
        (BEGIN, replace(END, devices={}), "not tested at its end"),
        (with_mark(BEGIN, tested={"p": 0}), END, "without a result at its begin"),
        (BEGIN, with_mark(END, state=State.HEALTHY, cause=Cause.NONE, tested={}), "without a result at its end"),
        (BEGIN, with_mark(END, state=State.HEALTHY, cause=Cause.NONE), "healthy now, though results since were wrong"),
    ],
)
def test_no_job_is_named_where_the_two_cannot_be_compared(begin, end, why):
    """A device that is new or gone, another boot, nothing tested, a state that an operator has cleared."""
    assert compared(begin, end) == (DeviceChange.UNKNOWN, why, None)


def test_devices_of_which_the_same_is_said_share_a_line():
    """Those that went wrong come first."""
    both = {"GPU-3": WRONG, "GPU-4": replace(SOUND, name="cuda:4"), "GPU-5": replace(SOUND, name="cuda:5")}
    begin = replace(BEGIN, devices={uuid: replace(SOUND, name=mark.name) for uuid, mark in both.items()})
    finding = Finding(rule="r", state=State.SUSPECT, cause=Cause.HARDWARE, message="It is so.", since=150.0)
    made = {"state": State.SUSPECT, "cause": Cause.HARDWARE, "findings": (finding,), "decided": 200.0, "since": 150.0}
    found = boundary.compare(begin, replace(END, devices=both), {u: Verdict(device=u, **made) for u in both})
    first, second, note = found.lines()
    assert first.startswith("cuda:3 went wrong during job 4711 (1970-01-01 00:01 to 00:03 UTC): 0 of 9 results wrong")
    assert second == "cuda:4, cuda:5: sound before and after job 4711"
    assert note == found.note
