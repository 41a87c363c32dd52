"""The output for OCP Test & Validation."""

from __future__ import annotations

import json
import re

from canaryd.dossier import ocp
from canaryd.model import Cause, Finding, State
from tests.dossier.made import SERIAL, verdict, written


def test_the_ocp_output_follows_the_specification(store, tmp_path):
    """Version first, one run, steps that begin and end, sequence numbers without a gap, references that exist."""
    made, document, _ = written(store, tmp_path)
    lines = [json.loads(line) for line in (made / "ocp.jsonl").read_text().splitlines()]
    assert lines[0]["schemaVersion"] == {"major": 2, "minor": 0}
    assert [line["sequenceNumber"] for line in lines] == list(range(len(lines)))
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["timestamp"]) for line in lines)
    assert all(len(line.keys() & {"schemaVersion", "testRunArtifact", "testStepArtifact"}) == 1 for line in lines)
    start = lines[1]["testRunArtifact"]["testRunStart"]
    assert {"name", "version", "commandLine", "parameters", "dutInfo"} <= start.keys()
    (part,) = start["dutInfo"]["hardwareInfos"]
    assert (part["serialNumber"], part["name"]) == (SERIAL, "NVIDIA H200")
    assert lines[-1]["testRunArtifact"] == {"testRunEnd": {"status": "COMPLETE", "result": "FAIL"}}
    open_steps: set[str] = set()
    for entry in lines:
        if step := entry.get("testStepArtifact"):
            if "testStepStart" in step:
                assert step["testStepId"] not in open_steps
                open_steps.add(step["testStepId"])
            assert step["testStepId"] in open_steps
            for kind in ("measurement", "diagnosis"):
                assert step.get(kind, {"hardwareInfoId": part["hardwareInfoId"]})["hardwareInfoId"] == "0"
            if "file" in step:
                assert (made / step["file"]["uri"].removeprefix("file:")).exists()
            if "testStepEnd" in step:
                open_steps.remove(step["testStepId"])
    assert open_steps == set()
    verdicts = [
        entry["testStepArtifact"]["diagnosis"] for entry in lines if "diagnosis" in entry.get("testStepArtifact", {})
    ]
    assert [(v["verdict"], v["type"]) for v in verdicts] == [("exact-mismatch-confirmed", "FAIL")]
    assert ocp.lines(document) == (made / "ocp.jsonl").read_text()


def test_a_note_is_no_passed_test(store, tmp_path):
    """What says "not checked yet" makes no device faulty, and a reader who counts passes must not count it."""
    given = {"rule": "baseline-learning", "state": State.HEALTHY, "cause": Cause.NONE}
    note = Finding(**given, message="Not checked yet", action="Wait for it")
    store.set_verdict(verdict(findings=(*verdict().findings, note)))
    made, _, _ = written(store, tmp_path)
    lines = [json.loads(line) for line in (made / "ocp.jsonl").read_text().splitlines()]
    told = [entry.get("testStepArtifact", {}).get("diagnosis", {}) for entry in lines]
    assert [d["type"] for d in told if d.get("verdict") == "baseline-learning"] == ["UNKNOWN"]
    assert [d["message"] for d in told if d.get("verdict") == "baseline-learning"] == ["Not checked yet. Wait for it."]
