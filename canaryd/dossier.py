"""The dossier of one device: what is known of it, laid out for the person who decides whether the part goes back.

`gather` reads the store into one document (docs/dossier.schema.json), from which everything else is made: the page, the
OCP output, the archive. `write` puts all of it into one directory, with raw evidence, logs and checksums.
"""

from __future__ import annotations

import bisect
import contextlib
import csv
import gzip
import hashlib
import io
import itertools
import json
import math
import os
import platform
import re
import shutil
import signal
import subprocess
import tarfile
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from canaryd import __version__, dossier_page, judge, ocp, xids
from canaryd.chance import interval
from canaryd.check import NEVER_CHECKED
from canaryd.config import Config
from canaryd.engine import Engine
from canaryd.model import Cause, Comparison, Device, Event, Outcome, Run, State, Subject, Verdict, to_json
from canaryd.redact import Redactor, clean, cleaned, without_processes
from canaryd.status import UNTENDED
from canaryd.store import Busy, DeviceRecord, Store
from canaryd.supervise import INSTRUCTION_SETS, SCRUBBED, STRICT
from canaryd.wording import moment, spoken

SCHEMA = "canaryd.dossier/1"
FAILURES = 50
"""Failing cases described; a broken part fails everywhere and fills no more than this."""
EXHIBITS = 3
"""Failing cases whose tensors are laid out."""
TIMELINE = 200
"""Entries of the timeline, the newest."""
POLLS, POINTS, SERIES = 20_000, 400, 8
"""Polls read, points kept of one course, courses kept."""
NEARBY = 120.0
"""Seconds within which a poll tells the conditions of a run (ours: eight default periods)."""
BINS = 32
"""Cells of a map along one axis at most."""
PEER_RUNS = 2000
"""Newest runs of one probe that are read of a peer."""
TOOL_PATIENCE = {"nvidia-smi": 30.0, "nvidia-bug-report.sh": 300.0}
"""Seconds that a vendor's tool may take on a device that may be broken (ours)."""
SHOWN = ("temperature_celsius", "power_watts", "clock_hertz")
"""Readings whose course is shown."""
FIRST_SENSORS = ("core", "memory", "package", "sm", "graphics")
"""Sensors and domains of which courses are kept first."""
MANTISSA = {"float64": 52, "float32": 23, "bfloat16": 7, "float16": 10}
"""Format → bits of its mantissa (IEEE 754-2019 table 3.5; bfloat16: the upper half of float32)."""
WIDTH = {"float64": 64, "float32": 32, "bfloat16": 16, "float16": 16, "int64": 64, "int32": 32}
FINDING = ("rule", "state", "cause", "message", "probe", "repro", "runs")
QUIET_EVENTS = ("counter", "condition", "change", "reset", "boot")
"""Kinds of events that no line of the kernel log stands behind."""

NEXT: Mapping[str, str] = {
    "cuda": "NVIDIA and the makers of its servers decide an RMA by the Field Diagnostic and by the device's own error "
    "counters, not by a third party's test. Open a case with this archive, the serial number and nvidia-bug-report; "
    "offer evidence/*/reproduce.py as the shortest way to the fault, and run dcgmi diag -r 4 or the Field Diagnostic "
    "when they ask for it. A diagnostic that passes does not undo a wrong result that repeats.",
    "rocm": "AMD and the makers of its servers ask for the output of AGFHC (AMD GPU Field Health Check) or of the ROCm "
    "Validation Suite, and for rocm_techsupport.sh. Open a case with this archive and the serial number; "
    "evidence/*/reproduce.py is the shortest way to the fault.",
    "xpu": "Intel and the makers of its servers ask for xpu-smi diag -l 3 and the kernel log. Open a case with this "
    "archive and the serial number; evidence/*/reproduce.py is the shortest way to the fault.",
    "npu": "Huawei and its partners ask for the report of ascend-dmi and for the device's log. Open a case with this "
    "archive and the serial number; evidence/*/reproduce.py is the shortest way to the fault.",
    "mps": "Apple decides by Apple Diagnostics; take this archive and the machine's serial number to service.",
    "cpu": "Test the memory first (memtest86+ or the board's own test): a bad module looks like a bad core. Then the "
    "maker's test: Intel Data Center Diagnostic Tool or OpenDCDiag; for AMD, the server's maker. Take the named core "
    "offline meanwhile.",
}
"""Backend → what to do with a part that is at fault, after what the vendors publish (docs/rma.md)."""
NO_RMA: Mapping[Cause, str] = {
    Cause.SOFTWARE: "No RMA: the stack gives these numbers on other parts too. Report it to the project that the stack "
    "below names, with evidence/*/reproduce.py; the state clears when another stack runs clean.",
    Cause.ENVIRONMENT: "No RMA: the surroundings are at fault. Look at power, cooling, load and the driver first.",
    Cause.HARNESS: "No RMA: canaryd or its reference could not judge. Remove what the findings name, and check again.",
    Cause.UNDETERMINED: "Not an RMA case yet: whose fault it is stays open. Run evidence/*/reproduce.py or the "
    "commands above on another part of the same model, with the same stack; that settles it.",
    Cause.NONE: "Nothing to do.",
}


class DossierError(RuntimeError):
    """The dossier could not be written; the message says where, why and what to do."""


# --- Words --------------------------------------------------------------------------------------------


def rate(wrong: int, total: int) -> dict[str, Any]:
    """Return how many of how many independent trials, with the interval; without a trial there is none."""
    low, high = interval(wrong, total)
    return {"wrong": wrong, "total": total, "low": low if total else None, "high": high if total else None}


def bit_name(form: str, bit: int) -> str:
    """Name what a bit of a format means; "" where that is not known."""
    if form.startswith("int"):
        return "sign" if bit == WIDTH[form] - 1 else "lowest of the integer" if bit == 0 else "integer"
    if form not in MANTISSA:
        return ""
    if bit == WIDTH[form] - 1:
        return "sign"
    if bit >= MANTISSA[form]:
        return "exponent"
    return "lowest of the mantissa" if bit == 0 else "mantissa"


def result_format(probe: str, case: str, digits: int) -> str:
    """Return the format of a case's result; where the name does not tell, its width in bits."""
    label = case.partition("/")[0]
    form = label.partition(">")[2] or label
    form = {"tfloat32": "float32"}.get(form, form)
    if probe == "exact_integer" and case.startswith("int64/embedding/"):
        form = "int32"
    return form if form in WIDTH else f"{digits * 4} bits" if digits else "not known"


# --- Facts -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Facts:
    """What is read of the store, once."""

    store: Store
    config: Config
    device: Device
    record: DeviceRecord | None
    runs: Sequence[Run]
    """Of this device, of one world, in the order of their start."""
    polls: Sequence[Run]
    events: Sequence[Event]
    verdict: Verdict
    note: str
    """What is to be said of the verdict beside what it says."""
    drill: bool
    now: float

    @cached_property
    def telling(self) -> list[Run]:
        """The polls that tell temperature, power or clocks, oldest first."""
        return sorted((p for p in self.polls if any(r.name in SHOWN for r in p.readings)), key=lambda p: p.started)


def gather(
    store: Store, config: Config, device: Device, *, now: float, drill: bool = False, engine: Engine | None = None
) -> dict[str, Any]:
    """Return the document of one device from what the store knows; touches no device.

    An engine judges the device anew; without one the stored verdict is told, unless newer failures stand against it.
    Raises `DossierError` where a drill is asked for and none is on record.
    """
    records = {r.device.uuid: r for r in store.devices()}
    runs = sorted(store.runs(device.uuid, drill=drill), key=lambda r: (r.started, r.id))
    if drill and not runs:
        raise DossierError(
            f"{device.name}: no drill of it is on record, so there is nothing to report; "
            f"run canaryd drill --device {device.name} first"
        )
    if drill:
        verdict, note = _drilled(device, runs, config, now), ""
    else:
        verdict, note = _judged(store, engine, device, runs, now)
    facts = _Facts(
        store=store,
        config=config,
        device=device,
        record=records.get(device.uuid),
        runs=runs,
        polls=store.polls(device.uuid, completed=True, limit=POLLS),
        events=store.events(device=device.uuid),
        verdict=verdict,
        note=note,
        drill=drill,
        now=now,
    )
    peers = [r.device for r in records.values() if r.device.uuid != device.uuid and _alike(r.device, device)]
    failures, omitted = _failures(facts, peers)
    probes = _probes(facts)
    kind, why_not = _kind(facts)
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "canaryd": __version__,
        "generated": now,
        "timezone": time.strftime("%Z (UTC%z)", time.localtime(now)),
        "kind": kind,
        "why_not_rma": why_not,
        "drill": ", ".join(sorted({r.drill for r in runs if r.drill})),
        "redacted": False,
        "verdict": _verdict(facts),
        "identity": _identity(facts),
        "failures": failures,
        "failures_omitted": omitted,
        "bits": _bits(failures),
        "places": _placed(c for r in runs for c in r.comparisons if c.subject is Subject.DEVICE),
        "probes": probes,
        "peers": _peers(facts, peers, failures),
        "timeline": [],
        "timeline_omitted": 0,
        "series": _series(facts),
        "acks": [{"kind": a.kind, "at": a.at, "until": a.until, "reason": a.reason} for a in store.acks(device.uuid)],
        "reproduce": _commands(facts, failures),
        "next_step": _next_step(facts, kind, failures),
        "not_checked": _not_checked(facts),
        "problems": [*store.problems, *([store.problem] if store.problem else [])],
        "contents": [],
        "absent": [],
    }
    document["timeline"], document["timeline_omitted"] = _timeline(facts)
    document["title"] = _title(document)
    document["summary"] = _summary(document)
    return document


def _alike(other: Device, device: Device) -> bool:
    return (other.kind, bool(other.parent)) == (device.kind, bool(device.parent))


def _judged(
    store: Store, engine: Engine | None, device: Device, runs: Sequence[Run], now: float
) -> tuple[Verdict, str]:
    """Return the verdict that holds now, and what is to be said of it: judged anew where an engine is at hand."""
    kept = store.verdict(device.uuid)
    if engine is not None and device.uuid in engine.devices:
        fresh = engine.verdict(device.uuid)
        if kept is None or (kept.state, kept.cause) == (fresh.state, fresh.cause):
            return fresh, ""
        before = kept.state.value + ("" if kept.cause is Cause.NONE else f", cause {kept.cause.value}")
        return fresh, f"judged anew for this dossier; the stored verdict of {moment(kept.decided)} was {before}"
    unjudged = Verdict(
        device=device.uuid, state=State.UNKNOWN, cause=Cause.UNDETERMINED, findings=(), decided=now, since=now
    )
    if kept is None:
        return unjudged, "it has not been judged yet: start the daemon, or run canaryd check"
    newer = [r for r in runs if (r.wrong or r.unknown) and r.started + r.seconds > kept.decided]
    if kept.state is State.HEALTHY and newer:
        runs_are = "1 run is" if len(newer) == 1 else f"{len(newer)} runs are"
        return replace(unjudged, since=newer[0].started), (
            f"it was judged healthy at {moment(kept.decided)}; {runs_are} wrong since and not judged yet: "
            "start the daemon, or run canaryd check"
        )
    age = now - kept.decided
    late = age > UNTENDED
    return kept, f"nobody has judged it for {spoken(age)}: what follows is what was known then" if late else ""


def _drilled(device: Device, runs: Sequence[Run], config: Config, now: float) -> Verdict:
    """Judge drills as of the last one: their verdict is never stored, and they are forgotten after an hour."""
    last = min(now, runs[-1].started + runs[-1].seconds)
    wanted = dict.fromkeys((r.probe for r in runs), judge.DRILL_EXPIRY)
    return judge.decide(
        device,
        judge.node({device.uuid: device}, {device.uuid: runs}, last, drill=True),
        wanted=wanted,
        policy=config.judge,
        now=last,
        previous=None,
        drill=True,
    )


def _kind(facts: _Facts) -> tuple[str, str]:
    """Return "rma", "evidence", "health" or "drill", and why it is no RMA dossier."""
    verdict, device = facts.verdict, facts.device
    if facts.drill:
        return "drill", "a drill: canaryd itself spoilt these results in software, and the part is not at fault"
    if verdict.state is State.HEALTHY:
        return "health", "the device is healthy as far as it was looked at"
    if device.backend == "endpoint":
        return "evidence", "this is a server that answers for devices, and no part"
    if device.weak_identity:
        return "evidence", (
            "its identity is weak: the uuid names an installation and not the physical part (as on a virtual "
            "machine), so nobody could tell whether the part that goes back is the part that failed"
        )
    if verdict.cause is not Cause.HARDWARE or verdict.state is not State.FAULTY:
        return "evidence", f"the verdict is {verdict.state.value}, cause {verdict.cause.value}; wanted faulty, hardware"
    return "rma", ""


def _title(document: Mapping[str, Any]) -> str:
    name = document["identity"]["name"]
    return {
        "rma": f"RMA dossier of {name}",
        "evidence": f"{name}: evidence, not an RMA dossier",
        "health": f"{name}: health report",
        "drill": f"DRILL of {name}, not the device's own fault",
    }[document["kind"]]


def _summary(document: Mapping[str, Any]) -> str:
    """Return the verdict in one sentence, and the strongest failure in a second one."""
    verdict, identity = document["verdict"], document["identity"]
    serial = f", serial {identity['serial']}" if identity["serial"] else ""
    text = f"{identity['name']} ({identity['model']}{serial}) is {verdict['state'].upper()}"
    if verdict["state"] == "healthy":
        text += f" since {moment(verdict['since'])}"
    else:
        text += f", cause {verdict['cause']}, since {moment(verdict['since'])}"
    if document["kind"] == "drill":
        text = f"In this drill canaryd injected {document['drill'] or 'nothing'}; judged by it alone, {text}"
    text += "."
    if document["failures"]:
        first = document["failures"][0]
        done, uploads = first["results"], first["uploads"]
        bits = dossier_page.ranges([int(b) for b in first["bits"]])
        place = ", ".join(p["place"] for p in first["places"] if p["results"]["wrong"] and p["place"] != "device")
        answered = verdict["state"] == "healthy"
        text += " What was wrong before is answered (see the timeline):" if answered else ""
        text += f" {first['probe']} {first['case']}: {uploads['wrong']:,} of {uploads['total']:,} uploads wrong"
        text += f", with {done['wrong']:,} of {done['total']:,} results"
        text += f" on {place}" if place else ""
        text += f", {'bit' if len(first['bits']) == 1 else 'bits'} {bits} flipped." if bits else "."
    else:
        results = sum(p["results"]["total"] for p in document["probes"])
        text += f" {results:,} results were compared, none is wrong." if results else " No result was compared."
        unknown = sum(p["unknown"] for p in document["probes"])
        text += f" {unknown:,} recordings were beyond what is known of it." if unknown else ""
    return text


def _verdict(facts: _Facts) -> dict[str, Any]:
    verdict = facts.verdict
    return {
        "state": verdict.state.value,
        "cause": verdict.cause.value,
        "since": verdict.since,
        "decided": verdict.decided,
        "note": facts.note,
        "findings": [
            {name: to_json(getattr(f, name)) for name in FINDING}
            | {"rivals": [{"cause": r.cause.value, "why": r.why, "rejected": r.rejected} for r in f.rivals]}
            for f in verdict.findings
        ],
    }


def _identity(facts: _Facts) -> dict[str, Any]:
    device, record = facts.device, facts.record
    newest = next((r for r in reversed(facts.runs) if r.stack), None)
    host = next((h for r in reversed((*facts.polls, *facts.runs)) if (h := r.environment.get("hostname", ""))), "")
    return {
        "name": device.name,
        "uuid": device.uuid,
        "serial": device.detail.get("serial", ""),
        "weak": device.weak_identity,
        "backend": device.backend,
        "model": device.model,
        "host": host or platform.node(),
        "first_seen": record.first_seen if record else None,
        "last_seen": record.last_seen if record else None,
        "present": bool(record and record.present),
        "parent": device.parent,
        "torch_name": _torch_name(device),
        "detail": dict(device.detail),
        "stack": dict(newest.stack) if newest else {},
    }


Key = tuple[str, int, str, str, str, int, str]
"""Probe, its version, instruction set, case, shape, seed, subject: equal ones have bit-for-bit equal operands."""


def _key(run: Run, c: Comparison) -> Key:
    return run.probe, run.probe_version, run.instruction_set, c.case, c.shape, c.seed, c.subject.value


def _failures(facts: _Facts, peers: Sequence[Device]) -> tuple[list[dict[str, Any]], int]:
    """Return the failing cases, the most often wrong first, and how many more there are."""
    every = list(facts.runs)
    if facts.device.backend == "cpu" and not facts.drill:  # its goldens were missed in runs of other devices too
        others = (r.device.uuid for r in facts.store.devices() if r.device.uuid != facts.device.uuid)
        for run in (r for uuid in others for r in facts.store.runs(uuid, failed=True)):
            blamed = tuple(c for c in run.comparisons if c.subject is Subject.HOST)
            every += [replace(run, comparisons=blamed)] if any(c.wrong for c in blamed) else []
    found: dict[Key, list[tuple[Run, Comparison]]] = defaultdict(list)
    for run in every:
        for c in run.comparisons:
            found[_key(run, c)].append((run, c))
    failing = {k: v for k, v in found.items() if any(c.wrong for _, c in v)}

    def weigh(key: Key) -> Any:
        wrong = [(r, c) for r, c in failing[key] if c.wrong]
        size = next((c.evidence.total for _, c in wrong if c.evidence), 0)
        return (
            key[6] != Subject.DEVICE.value,
            -len({r.id for r, _ in wrong}),
            -sum(c.wrong_trials for _, c in wrong),
            size,
            key,
        )

    ordered = sorted(failing, key=weigh)
    records = _records(facts.store, peers, {k[0] for k in ordered}, drill=facts.drill)
    return [_failure(k, failing[k], records) for k in ordered[:FAILURES]], max(0, len(ordered) - FAILURES)


def _records(store: Store, peers: Sequence[Device], probes: Iterable[str], *, drill: bool) -> dict[str, Any]:
    wanted = sorted(probes)
    found = {}
    for device in peers:
        runs = [r for p in wanted for r in store.runs(device.uuid, p, drill=drill, limit=PEER_RUNS)]
        found[device.uuid] = {"name": device.name, "runs": runs}
    return found


def _failure(key: Key, hits: Sequence[tuple[Run, Comparison]], records: Mapping[str, Any]) -> dict[str, Any]:
    probe, version, instruction_set, case, shape, seed, subject = key
    wrong = [(r, c) for r, c in hits if c.wrong]
    evidence = [c.evidence for _, c in wrong if c.evidence]
    shown = max(evidence, key=lambda e: (bool(e.reproduced), e.wrong), default=None)
    elements = [(r.id, *element) for r, c in wrong if c.evidence for element in c.evidence.first]
    digits = len(elements[0][2].removeprefix("0x")) if elements else 0
    form = result_format(probe, case, digits)
    bits: Counter[int] = Counter()
    for e in evidence:
        bits.update({int(bit): n for bit, n in e.bits.items()})
    runs, bad = {r.id: r for r, _ in hits}, {r.id for r, _ in wrong}
    return {
        "probe": probe,
        "version": version,
        "instruction_set": instruction_set,
        "case": case,
        "shape": shape,
        "seed": seed,
        "subject": subject,
        "exactness": wrong[0][1].exactness.value,
        "characterised": all(c.characterised for _, c in wrong),
        "first": min(r.started for r, _ in wrong),
        "last": max(r.started for r, _ in wrong),
        "runs": rate(len(bad), len(runs)),
        **_counted([c for _, c in hits]),
        "run_ids": sorted(bad)[-judge.RUNS_NAMED :],
        "places": _placed([c for _, c in hits]),
        "pattern": shown.pattern if shown else "",
        "reproduced": shown.reproduced if shown else "",
        "lines": dict(shown.lines) if shown else {},
        "zeroed": sum(e.zeroed for e in evidence),
        "nonfinite": sum(e.nonfinite for e in evidence),
        "wrong_elements": sum(e.wrong for e in evidence),
        "elements_of_result": shown.total if shown else 0,
        "elements": [{"run": r, "index": list(i), "expected": want, "observed": have} for r, i, want, have in elements],
        "format": form,
        "bits": {str(bit): bits[bit] for bit in sorted(bits)},
        "map": _map([tuple(i) for _, i, _, _ in elements], shape, shown.total if shown else 0),
        "peers": _same_bytes(key, records),
        "repro": max((r for r, _ in wrong), key=lambda r: (bool(r.cases), r.started)).repro,
        "exhibit": "",
        "exhibit_absent": "",
    }


def _counted(comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """Return how many uploads were wrong, with the interval, and how many results, without one.

    Results of one upload are not independent: what the upload put into memory spoils all of them alike.
    """
    wrong, total = _uploads(comparisons)
    results = {"wrong": sum(c.wrong_trials for c in comparisons), "total": sum(c.trials for c in comparisons)}
    return {"uploads": rate(wrong, total), "results": results}


def _uploads(comparisons: Sequence[Comparison]) -> tuple[int, int]:
    """Return (wrong, all) uploads. Clean repetitions are no comparisons of their own: the evidence counts them."""
    clean_ones = 0
    for c in comparisons:
        told = re.match(r"(\d+) of (\d+) fresh uploads wrong", c.evidence.reproduced) if c.evidence else None
        clean_ones += int(told[2]) - int(told[1]) if told else 0
    return sum(c.wrong for c in comparisons), sum(c.uploads for c in comparisons) + clean_ones


def _placed(comparisons: Iterable[Comparison]) -> list[dict[str, Any]]:
    """Return where results were computed, with how many were wrong there, in the order of the places' numbers."""
    at: dict[str, list[Comparison]] = defaultdict(list)
    for c in comparisons:
        at[c.place].append(c)
    natural: Callable[[str], Any] = lambda p: [int(x) if x.isdigit() else x for x in re.split(r"(\d+)", p)]  # noqa: E731
    return [{"place": p, **_counted(at[p])} for p in sorted(at, key=natural) if p]


def _map(indices: Sequence[tuple[int, ...]], shape: str, total: int) -> dict[str, Any] | None:
    """Return how the wrong elements lie in the result, in at most 32 x 32 cells; None where no element is known."""
    if not indices:
        return None
    sizes = {name: int(n) for name, n in re.findall(r"\b([A-Z])=(\d+)", shape)}
    width = len(indices[0])
    if width == 1:
        # A long row is folded like text: row and column are the quotient and the remainder.
        columns = 2 ** max(0, math.ceil(math.log2(max(1, total)) / 2))
        rows = max(1, -(-total // columns))
        cells = [(i[0] // columns, i[0] % columns) for i in indices]
        axes = (f"element // {columns}", f"element % {columns}")
    else:
        named = ("M", "N") if {"M", "N"} <= sizes.keys() else ("L", "D")
        rows = max(sizes.get(named[0], 0), 1 + max(i[-2] for i in indices))
        columns = max(sizes.get(named[1], 0), 1 + max(i[-1] for i in indices))
        cells, axes = [(i[-2], i[-1]) for i in indices], ("row", "column")
    high, wide = min(BINS, rows), min(BINS, columns)
    counts = Counter((r * high // rows, c * wide // columns) for r, c in cells)
    return {
        "rows": rows,
        "columns": columns,
        "row_bins": high,
        "column_bins": wide,
        "axes": list(axes),
        "counts": [[r, c, n] for (r, c), n in sorted(counts.items())],
        "elements": len(indices),
    }


def _same_bytes(key: Key, records: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the peers that computed the very same bytes, with what came of it."""
    found = []
    for uuid, record in records.items():
        pairs = [c for r in record["runs"] for c in r.comparisons if _key(r, c) == key]
        if pairs:
            counts = {"results": sum(c.trials for c in pairs), "wrong": sum(c.wrong_trials for c in pairs)}
            found.append({"uuid": uuid, "name": record["name"], **counts})
    return found


def _bits(failures: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the flipped bits of all failing cases, by format of the result."""
    sums: dict[str, Counter[int]] = defaultdict(Counter)
    for failure in failures:
        sums[failure["format"]].update({int(b): n for b, n in failure["bits"].items()})
    return [
        {
            "format": form,
            "width": WIDTH.get(form, max(counts) + 1),
            "bits": [{"bit": b, "name": bit_name(form, b), "count": counts[b]} for b in sorted(counts)],
        }
        for form, counts in sorted(sums.items())
        if counts
    ]


def _probes(facts: _Facts) -> list[dict[str, Any]]:
    bounds = judge.fault_rate_bound(facts.runs, drill=facts.drill)
    found = []
    for probe in sorted({r.probe for r in facts.runs}):
        runs = [r for r in facts.runs if r.probe == probe]
        done = [r for r in runs if r.outcome is Outcome.COMPLETED]
        of_device = [c for r in runs for c in r.comparisons if c.subject is Subject.DEVICE]
        found.append(
            {
                "probe": probe,
                "runs": len(runs),
                "not_completed": len(runs) - len(done),
                **_counted(of_device),
                "rules_out": bounds.get(probe),
                "recordings": sum(len(r.recordings) for r in runs),
                "unknown": sum(len(r.unknown) for r in runs),
                "first": runs[0].started,
                "last": runs[-1].started,
            }
        )
    return found


def _peers(facts: _Facts, peers: Sequence[Device], failures: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    verdicts = {} if facts.drill else facts.store.verdicts()
    probes = sorted({f["probe"] for f in failures} or {r.probe for r in facts.runs})
    found = []
    for peer in sorted(peers, key=lambda d: d.name):
        runs = [r for p in probes for r in facts.store.runs(peer.uuid, p, drill=facts.drill, limit=PEER_RUNS)]
        mine = facts.runs[-1].stack_id if facts.runs else ""
        results = [c for r in runs for c in r.comparisons if c.subject is Subject.DEVICE]
        found.append(
            {
                "uuid": peer.uuid,
                "name": peer.name,
                "state": verdicts[peer.uuid].state.value if peer.uuid in verdicts else "unknown",
                "results": sum(c.trials for c in results),
                "wrong": sum(c.wrong_trials for c in results),
                "same_stack": any(r.stack_id == mine for r in runs if r.stack),
                "same_bytes": sum(p["results"] for f in failures for p in f["peers"] if p["uuid"] == peer.uuid),
                "same_bytes_wrong": sum(p["wrong"] for f in failures for p in f["peers"] if p["uuid"] == peer.uuid),
            }
        )
    return found


# --- Time ------------------------------------------------------------------------------------------------------------


def _timeline(facts: _Facts) -> tuple[list[dict[str, Any]], int]:
    """Return what happened, oldest first: wrong runs with their conditions, verdicts, events, stacks, acks."""
    entries = [*_wrong_runs(facts), *_stack_changes(facts)]
    if not facts.drill:
        entries += _told_verdicts(facts)
        entries += [
            {"at": e.last, "kind": e.kind, "text": _event(e), "conditions": {}}
            for e in facts.events
            if e.kind not in ("counter", "condition") or e.count
        ]
        for ack in facts.store.acks(facts.device.uuid):
            until = f", until {moment(ack.until)}" if ack.until else ""
            entries.append({"at": ack.at, "kind": "ack", "text": f"{ack.kind}{until}: {ack.reason}", "conditions": {}})
    entries.sort(key=lambda e: (e["at"], e["kind"], e["text"]))
    return entries[-TIMELINE:], max(0, len(entries) - TIMELINE)


def _event(event: Event) -> str:
    times = f" ({event.count:g} times since {moment(event.first)})" if event.count > 1 else ""
    return f"{event.detail or f'{event.name}: {event.before} → {event.after}'}{times}"


def _wrong_runs(facts: _Facts) -> Iterator[dict[str, Any]]:
    for run in facts.runs:
        failed = run.outcome not in (Outcome.COMPLETED, Outcome.SKIPPED)
        if not (run.wrong or run.unknown or failed):
            continue
        first = run.wrong[0] if run.wrong else None
        text = f"{run.probe} {run.outcome.value}"
        if first is not None:
            text = f"{run.probe}: {len(run.wrong)} wrong comparison{'s' * (len(run.wrong) > 1)}, {first.case}"
            text += f" on {first.place}" if first.place else ""
            text += f": {first.evidence.pattern}" if first.evidence and first.evidence.pattern else ""
        elif run.unknown:
            text = f"{run.probe}: {len(run.unknown)} recordings beyond what is known, {run.unknown[0]}"
        text += f" (confirms {run.confirms})" if run.confirms else f" (called for by {run.trigger})" * bool(run.trigger)
        kind = "wrong" if run.wrong or run.unknown else "not completed"
        yield {"at": run.started, "kind": kind, "text": text, "conditions": _conditions(facts, run.started)}


def _conditions(facts: _Facts, at: float) -> dict[str, Any]:
    """Return temperature, power and clocks of the poll that is nearest to a time, within two minutes."""
    first = bisect.bisect_left(facts.telling, at - NEARBY, key=lambda p: p.started)
    near = list(itertools.takewhile(lambda p: p.started <= at + NEARBY, itertools.islice(facts.telling, first, None)))
    if not near:
        return {}
    poll = min(near, key=lambda p: abs(p.started - at))
    chosen = sorted((r for r in poll.readings if r.name in SHOWN), key=lambda r: (SHOWN.index(r.name), _rank(r.key)))
    found: dict[str, Any] = {}
    for reading in chosen:
        found.setdefault(reading.name, {"key": reading.key, "value": reading.value, "unit": reading.unit})
    return found


def _rank(key: str) -> tuple[int, str]:
    return next((i for i, sensor in enumerate(FIRST_SENSORS) if f"={sensor}" in key), len(FIRST_SENSORS)), key


def _stack_changes(facts: _Facts) -> list[dict[str, Any]]:
    before: dict[tuple[str, str], Mapping[str, str]] = {}
    latest: dict[str, float] = {}
    found = []
    for run in (r for r in facts.runs if r.stack):
        lane = (run.probe, run.instruction_set)
        old = before.get(lane, run.stack)
        before[lane] = run.stack
        changed = [k for k in sorted({*old, *run.stack}) if old.get(k, "none") != run.stack.get(k, "none")]
        if not changed:
            continue
        text = ", ".join(f"{k}: {old.get(k, 'none')} → {run.stack.get(k, 'none')}" for k in changed)
        if run.started - latest.get(text, -math.inf) > 3600.0:  # every probe meets the same change within a round
            found.append({"at": run.started, "kind": "stack", "text": text, "conditions": {}})
        latest[text] = run.started
    return found


def _told_verdicts(facts: _Facts) -> Iterator[dict[str, Any]]:
    for verdict in facts.store.verdict_history(facts.device.uuid):
        cause = "" if verdict.cause is Cause.NONE else f", cause {verdict.cause.value}"
        why = f": {verdict.findings[0].message}" if verdict.findings and verdict.state is not State.HEALTHY else ""
        yield {"at": verdict.since, "kind": "verdict", "text": f"{verdict.state.value}{cause}{why}", "conditions": {}}


def _series(facts: _Facts) -> list[dict[str, Any]]:
    """Return the courses of temperature, power and clocks, each thinned to its lowest and highest points."""
    courses: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for poll in facts.polls:
        for reading in poll.readings:
            if reading.name in SHOWN and isinstance(reading.value, (int, float)):
                courses[reading.key, reading.unit].append((poll.started, float(reading.value)))
    ordered = sorted(courses, key=lambda k: (_rank(k[0])[0], SHOWN.index(k[0].partition("{")[0]), k[0]))
    return [{"reading": k, "unit": unit, "points": _thinned(sorted(courses[k, unit]))} for k, unit in ordered[:SERIES]]


def _thinned(points: Sequence[tuple[float, float]]) -> list[list[float]]:
    size = max(1, math.ceil(len(points) / (POINTS / 2)))
    kept: list[tuple[float, float]] = []
    for i in range(0, len(points), size):
        part = points[i : i + size]
        kept += sorted({min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])})
    return [list(p) for p in kept]


# --- What to do ------------------------------------------------------------------------------------------------------


def _commands(facts: _Facts, failures: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    told = {f["repro"]: f"{f['probe']} {f['case']}" for f in reversed(failures[:EXHIBITS]) if f["repro"]}
    found = [{"command": command, "what": what} for command, what in reversed(told.items())]
    known = set(told)
    for finding in facts.verdict.findings:
        if finding.repro and finding.repro not in known and finding.state is not State.HEALTHY and not facts.drill:
            known.add(finding.repro)
            found.append({"command": finding.repro, "what": finding.rule})
    return found[: EXHIBITS + 3]


def _next_step(facts: _Facts, kind: str, failures: Sequence[Mapping[str, Any]]) -> list[str]:
    verdict, device = facts.verdict, facts.device
    steps = []
    if kind == "drill":
        return ["Nothing to do: a drill shows that the alarm arrives. Its runs never count against the device."]
    if kind == "health":
        return [NO_RMA[Cause.NONE]]
    if verdict.cause is Cause.HARDWARE and device.backend != "endpoint":
        if device.weak_identity:
            steps.append("Give this to whoever runs the physical machine: only there can the part be named.")
        steps.append(NEXT.get(device.backend, "Open a case with the vendor, with this archive and the serial number."))
        if verdict.state is not State.FAULTY:
            steps.append("It is not confirmed yet: let canaryd finish its confirmations before the part goes back.")
    elif not facts.runs:
        steps.append(f"Nothing has run on it, so nothing is known: run canaryd check --device {device.name} first.")
    elif verdict.cause in (Cause.UNDETERMINED, Cause.NONE) and not failures:
        steps.append(
            "Not an RMA case: no wrong result of it is on record. What is open stands under “Why this verdict”; "
            f"canaryd check --device {device.name} looks again."
        )
    else:
        steps.append(NO_RMA[verdict.cause])
    for code in sorted({int(e.name) for e in facts.events if e.kind == "xid" and re.fullmatch(r"\d{1,4}", e.name)}):
        known = xids.XIDS.get(code)
        if known is not None:
            steps.append(f"Xid {code} ({known.title}). NVIDIA's catalogue: {known.advice}.")
    return steps


def _not_checked(facts: _Facts) -> list[str]:
    said = list(NEVER_CHECKED)
    seen = {r.probe for r in facts.runs}
    off = sorted(n for n, p in facts.config.probes.each.items() if p.enabled is False and n not in seen)
    if off:
        said.append(f"what these probes look at, which are disabled: {', '.join(off)}")
    newest = {(r.probe, r.instruction_set): r for r in facts.runs if r.whole}
    reasons: dict[str, list[str]] = defaultdict(list)
    for run in newest.values():
        if run.outcome is Outcome.SKIPPED:
            reasons[run.detail.partition("\n")[0] or "no reason given"].append(run.probe)
        for part in run.skipped:
            reasons[part.reason].append(f"{run.probe} {part.case}")
    for reason, parts in sorted(reasons.items()):
        names = sorted(set(parts))
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        said.append(f"{', '.join(names[:5])}{more}: {reason}")
    if not facts.polls:
        said.append("what the device says of itself: no telemetry of it is kept")
    if not facts.runs:
        said.append("its numbers: no run of it is kept" + (" as a drill" if facts.drill else ""))
    return said


# --- Redaction -------------------------------------------------------------------------------------------------------

# --- Files -----------------------------------------------------------------------------------------------------------


def write(
    store: Store,
    config: Config,
    engine: Engine | None,
    device: Device,
    out: Path,
    *,
    redact: bool,
    now: float,
    drill: bool = False,
    wait: float = 60.0,
) -> Path:
    """Write the dossier of a device below `out`, as a directory and as one archive beside it; return the directory.

    Without an engine nothing is judged anew and no tensors are laid out; the dossier says so. Raises `DossierError`
    where it cannot be written; nothing half-written stays.
    """
    document = gather(store, config, device, now=now, drill=drill, engine=engine)
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now))
    slug = "endpoint" if redact and device.backend == "endpoint" else re.sub(r"[^A-Za-z0-9.]+", "-", device.name)
    name = f"canaryd-dossier-{slug}-{stamp}"
    target, archive = out / name, out / f"{name}.tar.gz"
    try:
        out.mkdir(parents=True, exist_ok=True)
        for path in (target, archive):
            if path.exists():
                raise DossierError(f"{path}: is there already; a dossier is never overwritten: name another directory")
        with tempfile.TemporaryDirectory(prefix=f".{name}.", dir=out) as part:
            inside = Path(part) / name
            inside.mkdir()
            _fill(inside, document, store, engine, device, redact=redact, wait=wait)
            packed = Path(part) / archive.name
            _pack(inside, packed, int(now))
            inside.rename(target)
            packed.rename(archive)
    except OSError as error:
        raise DossierError(f"{out}: the dossier cannot be written: {error.strerror or error}") from error
    return target


def _fill(
    directory: Path,
    document: dict[str, Any],
    store: Store,
    engine: Engine | None,
    device: Device,
    *,
    redact: bool,
    wait: float,
) -> None:
    contents: list[tuple[str, str]] = [
        ("dossier.html", "the page for people; needs no network"),
        ("dossier.json", f"the same facts for machines ({SCHEMA}; docs/dossier.schema.json of canaryd)"),
        ("ocp.jsonl", "the same as OCP Test & Validation output, version 2.0"),
    ]
    absent: list[tuple[str, str]] = []
    _lay_out(directory, document, engine, device, contents, absent, wait)
    redactor = Redactor(store, document) if redact else None
    fit: Callable[[str], str] = (lambda t: redactor.text(clean(t))) if redactor else clean
    log = _log(store, device) if document["kind"] != "drill" else ""
    if log:
        (directory / "log.txt").write_text(fit(log), encoding="utf-8")
        contents.append(("log.txt", "what the kernel log said of this device, as far as canaryd kept it"))
    else:
        absent.append(("log.txt", "no line of the kernel log about this device is kept"))
    _vendor_tools(directory, device, fit, contents, absent, redact=redact)
    contents.append(("SHA256SUMS", "checksums of all other files: sha256sum -c SHA256SUMS"))
    document["contents"] = [{"file": f, "what": what} for f, what in contents]
    document["absent"] = [{"file": f, "why": why} for f, why in absent]
    document["redacted"] = redact
    fitted = cleaned(document)
    if redactor:
        fitted = redactor.value(fitted)
    text = json.dumps(fitted, indent=1, ensure_ascii=False, allow_nan=False)
    (directory / "dossier.json").write_text(text + "\n", encoding="utf-8")
    (directory / "dossier.html").write_text(dossier_page.page(fitted), encoding="utf-8")
    (directory / "ocp.jsonl").write_text(ocp.lines(fitted), encoding="utf-8")
    _sum_up(directory)


def _lay_out(
    directory: Path,
    document: dict[str, Any],
    engine: Engine | None,
    device: Device,
    contents: list[tuple[str, str]],
    absent: list[tuple[str, str]],
    wait: float,
) -> None:
    """Lay the first failing cases out as tensors and scripts; each that is not says why."""
    laid = 0
    for failure in document["failures"]:
        name = re.sub(r"[^A-Za-z0-9.]+", "-", f"{failure['probe']}-{failure['case']}").strip("-")
        part = f"evidence/{laid + 1}-{name}"
        folder = directory / part
        if laid >= EXHIBITS:
            failure["exhibit_absent"] = f"only the first {EXHIBITS} failing cases are laid out"
            continue
        folder.mkdir(parents=True)
        (folder / "wrong.csv").write_text(_table(failure), encoding="utf-8")
        contents.append((f"{part}/wrong.csv", f"the wrong elements of {failure['case']} that were written down"))
        files, why = _exhibit(folder, failure, engine, device, wait)
        failure["exhibit"] = part
        failure["exhibit_absent"] = why
        whats = {"golden.npy": "the right result", "reproduce.py": "repeats the computation with torch alone"}
        contents += [(f"{part}/{f}", whats.get(f, "operand")) for f in files]
        if why:
            absent.append((f"{part}/reproduce.py", why))
        laid += 1
    if not document["failures"]:
        why = "no exact golden was missed, so there is no failing case to lay out"
        if any(p["unknown"] for p in document["probes"]):
            why += "; what a recorded case was held against is in canaryd baseline show"
        absent.append(("evidence/", why))


def _exhibit(
    folder: Path, failure: Mapping[str, Any], engine: Engine | None, device: Device, wait: float
) -> tuple[list[str], str]:
    """Have operands, golden and script written by a worker; return the files, or why there are none."""
    if failure["subject"] != Subject.DEVICE.value:
        return [], "it is about the golden or the comparison itself, which no script outside of canaryd repeats"
    if engine is None:
        return [], "no worker with torch was at hand when this was written: run canaryd report on the host itself"
    hosts = [d for d in engine.devices.values() if d.backend == "cpu"]
    if not hosts:
        return [], "no worker with torch was at hand on this host"
    core = dossier_page.failing_core(failure)
    arguments = {
        "device": to_json(device),
        "probe": failure["probe"],
        "case": failure["case"],
        "shape": failure["shape"],
        "seed": failure["seed"],
        "expected": [[e["index"], e["expected"]] for e in failure["elements"]],
        "out": str(folder.absolute()),
        "on": _torch_name(device),
        "environment": {
            **{k: v for k, v in STRICT.items() if k.startswith("CU")},
            **INSTRUCTION_SETS.get(failure["instruction_set"], {}),
        },
        "unset": SCRUBBED,
        "runs": 1000,
        "core": core,
    }
    try:
        outcome, answer, detail = engine.answer(hosts[0], "exhibit", arguments, timeout=600.0, wait=wait)
    except Busy as busy:
        return [], f"the host was being tested: {busy}"
    if outcome is not Outcome.COMPLETED:
        for path in folder.glob("*.npy"):
            path.unlink()
        return [], detail.strip().rpartition("\n")[2] or outcome.value
    return list(answer["files"]), ""


def _torch_name(device: Device) -> str:
    """Return how torch calls a device: "cuda:3" on ROCm too."""
    kind = "cuda" if device.backend == "rocm" else device.backend
    index = device.index if device.torch_index is None else device.torch_index
    return kind if kind in ("cpu", "mps") else f"{kind}:{index}"


def _table(failure: Mapping[str, Any]) -> str:
    rows = io.StringIO()
    out = csv.writer(rows, lineterminator="\n")
    out.writerow(("run", "index", "expected", "observed", "flipped_bits"))
    for e in failure["elements"]:
        index, flipped = " ".join(map(str, e["index"])), int(e["expected"], 16) ^ int(e["observed"], 16)
        bits = " ".join(str(b) for b in range(flipped.bit_length()) if flipped >> b & 1)
        out.writerow((e["run"], index, e["expected"], e["observed"], bits))
    return rows.getvalue()


def _log(store: Store, device: Device) -> str:
    events = [e for e in store.events(device=device.uuid) if e.kind not in QUIET_EVENTS]
    lines = []
    for e in events:
        times = f" x{e.count:g}" if e.count > 1 else ""
        lines.append(f"{moment(e.first)} … {moment(e.last)}{times}  {e.kind} {e.name}  {e.detail}".replace("\n", " "))
    return "\n".join(lines) + "\n" if lines else ""


def _vendor_tools(
    directory: Path,
    device: Device,
    fit: Callable[[str], str],
    contents: list[tuple[str, str]],
    absent: list[tuple[str, str]],
    *,
    redact: bool,
) -> None:
    """Ask NVIDIA's tools, where they are; their words are cleaned like everything else."""
    if device.backend != "cuda":
        absent.append(("nvidia-smi-q.txt", "this is no NVIDIA device"))
        return
    uuid = device.part
    tool = shutil.which("nvidia-smi")
    if tool is None:
        absent.append(("nvidia-smi-q.txt", "nvidia-smi is not installed here"))
    else:
        said, why = _run([tool, "-q", "-i", uuid], TOOL_PATIENCE["nvidia-smi"])
        if why:
            absent.append(("nvidia-smi-q.txt", why))
        else:
            (directory / "nvidia-smi-q.txt").write_text(fit(without_processes(said)), encoding="utf-8")
            contents.append(("nvidia-smi-q.txt", "nvidia-smi -q of this device, without its processes"))
    name, tool = "nvidia-bug-report.log.gz", shutil.which("nvidia-bug-report.sh")
    if tool is None or redact or os.geteuid() != 0:
        why = "nvidia-bug-report.sh is not installed here" if tool is None else "nvidia-bug-report.sh asks for root"
        absent.append((name, "it names the whole machine and cannot be redacted" if redact else why))
        return
    with tempfile.TemporaryDirectory() as aside:
        made = Path(aside) / name
        _, why = _run([tool, "--output-file", str(made)], TOOL_PATIENCE["nvidia-bug-report.sh"], cwd=aside)
        try:
            text = gzip.decompress(made.read_bytes()).decode("utf-8", "replace")
        except (OSError, EOFError) as error:
            absent.append((name, why or f"nvidia-bug-report.sh left no report: {error}"))
            return
    # It is the vendor's own form of report; what canaryd knows to be nobody's business is taken out of it.
    data = fit(without_processes(text)).encode()
    (directory / name).write_bytes(gzip.compress(data, mtime=0))
    contents.append((name, "NVIDIA's own report of this host; processes left out, read it before you send it"))


def _run(argv: Sequence[str], patience: float, cwd: str | None = None) -> tuple[str, str]:
    """Return what a tool says, or why it says nothing; a tool that a hung driver holds is abandoned."""
    what = Path(argv[0]).name
    try:
        process = subprocess.Popen(
            argv,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        return "", f"{what} could not be started: {error.strerror}"
    try:
        said, _ = process.communicate(timeout=patience)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=5.0)
        return "", f"{what} did not end within {patience:g} s"
    text = said.decode("utf-8", "replace")
    if process.returncode:
        return "", f"{what} ended with status {process.returncode}: {text.strip().partition(chr(10))[0][:200]}"
    return text, ""


def _sum_up(directory: Path) -> None:
    names = sorted(str(p.relative_to(directory)) for p in directory.rglob("*") if p.is_file())
    sums = [f"{hashlib.sha256((directory / n).read_bytes()).hexdigest()}  {n}\n" for n in names]
    (directory / "SHA256SUMS").write_text("".join(sums), encoding="utf-8")


def _pack(directory: Path, archive: Path, at: int) -> None:
    """Pack a directory so that equal contents give equal bytes: sorted, one time, nobody's files."""
    with (
        archive.open("wb") as raw,
        gzip.GzipFile("", "wb", mtime=at, fileobj=raw) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        for path in sorted((directory, *directory.rglob("*"))):
            info = tarfile.TarInfo(str(path.relative_to(directory.parent)))
            info.mtime = at
            if path.is_dir():
                info.type, info.mode = tarfile.DIRTYPE, 0o755
                tar.addfile(info)
            else:
                info.size, info.mode = path.stat().st_size, 0o644
                with path.open("rb") as file:
                    tar.addfile(info, file)
