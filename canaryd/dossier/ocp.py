"""The dossier as OCP Test & Validation output, version 2.0: one JSON object per line.

Follows the specification and schemas of opencomputeproject/ocp-diag-core, json_spec. Each probe is a test step, its
rates and failing cases are measurements, and each finding is a diagnosis in the step of its probe.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from typing import Any

from canaryd.judge.phrases import count
from canaryd.model import KERNEL_DRIVER
from canaryd.report.incidents import sentence

VERSION = {"major": 2, "minor": 0}
PART = "0"
"""Id of the device under test."""
FIRMWARE = ("vbios", "inforom", "gsp_firmware", "microcode", "firmware")
SYSTEM = ("driver", "kernel", KERNEL_DRIVER, "cuda")
RESULTS = {"healthy": "PASS", "unknown": "NOT_APPLICABLE"}
"""State → result of the test run; any other state is FAIL."""
TYPES = {"healthy": "UNKNOWN", "degraded": "FAIL", "suspect": "FAIL", "faulty": "FAIL", "unknown": "UNKNOWN"}
"""State of a finding → type of its OCP diagnosis. A healthy finding is only a note ("not checked yet"), not a pass."""

Document = Mapping[str, Any]


def lines(document: Document) -> str:
    """Return the output as text; `document` is the JSON of a dossier (docs/dossier.schema.json)."""
    at = datetime.fromtimestamp(document["generated"], tz=timezone.utc).isoformat(timespec="milliseconds")
    artifacts = enumerate(_artifacts(document))
    stamp = {"timestamp": at.replace("+00:00", "Z")}
    return "".join(json.dumps({**a, "sequenceNumber": n, **stamp}, allow_nan=False) + "\n" for n, a in artifacts)


def _artifacts(document: Document) -> Iterator[dict[str, Any]]:
    yield {"schemaVersion": VERSION}
    yield {"testRunArtifact": {"testRunStart": _start(document)}}
    for problem in document["problems"]:
        yield {"testRunArtifact": {"error": {"symptom": "store-problem", "message": problem}}}
    probes = [p["probe"] for p in document["probes"]]
    steps = dict.fromkeys([*probes, *(f["probe"] or "device" for f in document["verdict"]["findings"])])
    for number, probe in enumerate(steps):
        for content in _step(document, probe):
            yield {"testStepArtifact": {"testStepId": str(number), **content}}
    state = document["verdict"]["state"]
    result = "NOT_APPLICABLE" if document["drill"] else RESULTS.get(state, "FAIL")
    yield {"testRunArtifact": {"testRunEnd": {"status": "COMPLETE", "result": result}}}


def _start(document: Document) -> dict[str, Any]:
    identity = document["identity"]
    known = {**identity["stack"], **identity["detail"]}
    software = [
        {
            "name": name,
            "version": str(version),
            "softwareInfoId": name,
            "softwareType": "FIRMWARE" if name in FIRMWARE else "SYSTEM" if name in SYSTEM else "APPLICATION",
        }
        for name, version in sorted(known.items())
        if name in (*FIRMWARE, *SYSTEM) or name in ("torch", "cudnn", "mkl", "onednn", "blas")
    ]
    part = {
        "hardwareInfoId": PART,
        "name": identity["model"],
        "partType": {"cpu": "CPU", "endpoint": "server"}.get(identity["backend"], "accelerator"),
        "location": identity["detail"].get("bus_id", identity["name"]),
    }
    part |= {"serialNumber": identity["serial"]} if identity["serial"] else {}
    number = identity["detail"].get("board_part_number")
    part |= {"partNumber": number} if number else {}
    metadata = {"uuid": identity["uuid"], "weakIdentity": identity["weak"], "title": document["title"]}
    return {
        "name": "canaryd" if not document["drill"] else "canaryd DRILL",
        "version": document["canaryd"],
        "commandLine": f"canaryd report {identity['name']}" + (" --drill" if document["drill"] else ""),
        "parameters": {"drill": document["drill"], "redacted": document["redacted"]},
        "dutInfo": {
            "dutInfoId": identity["host"] or "host",
            "name": identity["host"],
            "platformInfos": [
                {"info": text}
                for text in (f"{identity['backend']} {identity['model']}", identity["server"].get("product"))
                if text
            ],
            "softwareInfos": software,
            "hardwareInfos": [part],
        },
        "metadata": metadata,
    }


def _step(document: Document, probe: str) -> Iterator[dict[str, Any]]:
    yield {"testStepStart": {"name": probe}}
    numbers = next((p for p in document["probes"] if p["probe"] == probe), None)
    failures = [f for f in document["failures"] if f["probe"] == probe]
    if numbers is not None:
        no_wrong_result = [{"name": "no wrong result", "type": "LESS_THAN_OR_EQUAL", "value": 0}]
        yield _measured("results compared", numbers["results"]["total"])
        yield _measured("wrong results", numbers["results"]["wrong"], validators=no_wrong_result)
        if numbers["rules_out"] is not None:
            yield _measured("fault rate ruled out at 95 %", numbers["rules_out"], unit="1")
        if numbers["not_completed"]:
            text = f"{numbers['not_completed']} of {count(numbers['runs'], 'run')} did not complete"
            yield {"error": {"symptom": "run-not-completed", "message": text}}
    for failure in failures:
        yield _measured(
            f"wrong results of {failure['case']}",
            failure["results"]["wrong"],
            metadata={
                **{key: failure[key] for key in ("shape", "seed", "subject", "format", "bits", "pattern", "lines")},
                "results": failure["results"]["total"],
                "uploads": failure["uploads"]["total"],
                "wrongUploads": failure["uploads"]["wrong"],
                "uploadRateLow": failure["uploads"]["low"],
                "uploadRateHigh": failure["uploads"]["high"],
            },
            **_where(failure),
        )
        if failure["exhibit"]:
            yield {
                "file": {
                    "displayName": f"evidence of {failure['case']}",
                    "uri": f"file:{failure['exhibit']}/wrong.csv",
                    "description": "wrong elements; operands and script are in the same directory",
                    "isSnapshot": True,
                    "contentType": "text/csv",
                }
            }
    drill = "drill-" if document["drill"] else ""
    findings = [f for f in document["verdict"]["findings"] if (f["probe"] or "device") == probe]
    for finding in findings:
        yield {
            "diagnosis": {
                "verdict": f"{drill}{finding['rule']}",
                "type": "UNKNOWN" if drill else TYPES[finding["state"]],
                "message": f"{sentence(finding['message'])} {sentence(finding['action'])}".strip(),
                "hardwareInfoId": PART,
                **_where(failures[0] if failures else {}),
            }
        }
    if not findings and numbers is not None and numbers["results"]["total"] and not numbers["results"]["wrong"]:
        verdict = f"{drill}{probe.replace('_', '-')}-clean"
        yield {"diagnosis": {"verdict": verdict, "type": "PASS", "hardwareInfoId": PART}}
    nothing = numbers is not None and numbers["runs"] == numbers["not_completed"]
    yield {"testStepEnd": {"status": "SKIP" if nothing else "COMPLETE"}}


def _measured(name: str, value: float, **more: Any) -> dict[str, Any]:
    return {"measurement": {"name": name, "value": value, "hardwareInfoId": PART, **more}}


def _where(failure: Document) -> dict[str, Any]:
    """Return the failing core or SM as an OCP subcomponent, or {} if the failure has none or several."""
    places = [p for p in failure.get("places", ()) if p["results"]["wrong"]]
    if len(places) != 1 or places[0]["unit"] not in ("core", "sm") or len(places[0]["numbers"]) != 1:
        return {}
    return {"subcomponent": {"type": "ASIC-SUBSYSTEM", "name": places[0]["place"]}}
