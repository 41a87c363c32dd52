"""Everything that the store holds about one device as one JSON document (docs/dossier.schema.json).

The page, the OCP output and the archive are all made from this document.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from canaryd import __version__
from canaryd.codec import to_json
from canaryd.config.settings import Config
from canaryd.dossier.advice import commands, next_step, not_checked
from canaryd.dossier.facts import Facts, selftests
from canaryd.dossier.failures import bit_totals, find_failures, peer_results, placed, probe_totals
from canaryd.dossier.text import ranges, wrong_places
from canaryd.dossier.timeline import POLLS, series, timeline
from canaryd.engine.engine import Engine
from canaryd.facts import Subject
from canaryd.formatting import format_duration, format_utc
from canaryd.judge import acks
from canaryd.judge.case import Case
from canaryd.judge.characterised import Claims
from canaryd.judge.findings import ACKNOWLEDGED
from canaryd.judge.node import DRILL_EXPIRY, node
from canaryd.judge.phrases import count
from canaryd.judge.verdict import decide
from canaryd.model import Cause, Device, Run, State, Verdict
from canaryd.report.incidents import incidents_json
from canaryd.report.status import UNTENDED
from canaryd.report.terminal import state_note, verdict_note
from canaryd.store.devices import DeviceRecord
from canaryd.store.store import Store

SCHEMA = "canaryd.dossier/1"
SERVER = ("product", "product_serial", "board", "board_serial", "bios")
"""Details of the machine that a vendor asks for."""
FINDING = ("rule", "state", "cause", "message", "action", "evidence", "probe", "repro", "runs")


class DossierError(RuntimeError):
    """The dossier cannot be written. The message says what is wrong and what to do."""


class OutputError(DossierError):
    """The directory that was named for it cannot be used."""


def gather(
    store: Store, config: Config, device: Device, *, now: float, drill: bool = False, engine: Engine | None = None
) -> dict[str, Any]:
    """Return the document of one device from what the store holds; touch no device.

    An engine judges the device again. Without one the document has the stored verdict, or "unknown" where newer
    failures contradict it. Raises `DossierError` where a drill is wanted and none is on record.
    """
    records = {r.device.uuid: r for r in store.devices()}
    facts = _gather_facts(store, config, device, records.get(device.uuid), now=now, drill=drill, engine=engine)
    peers = [r.device for r in records.values() if r.device.uuid != device.uuid and _alike(r.device, device)]
    failures, omitted = find_failures(facts, peers)
    entries, entries_omitted = timeline(facts)
    kind, why_not = _kind(facts)
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "canaryd": __version__,
        "generated": now,
        "timezone": "UTC",
        "kind": kind,
        "why_not_rma": why_not,
        "drill": ", ".join(sorted({r.drill for r in facts.runs if r.drill})),
        "redacted": False,
        "verdict": _verdict(facts),
        "identity": {**_identity(facts), "server": _server(facts, records.values())},
        "failures": failures,
        "failures_omitted": omitted,
        "bits": bit_totals(failures),
        "places": placed(c for r in facts.runs for c in r.comparisons if c.subject is Subject.DEVICE),
        "probes": probe_totals(facts),
        "peers": peer_results(facts, peers, failures),
        "timeline": entries,
        "timeline_omitted": entries_omitted,
        "series": series(facts),
        "selftests": selftests(facts.runs),
        "acks": [{"kind": a.kind, "at": a.at, "until": a.until, "reason": a.reason} for a in store.acks(device.uuid)],
        "reproduce": commands(facts, failures),
        "next_step": next_step(facts, kind, failures),
        "not_checked": not_checked(facts),
        "problems": [*store.problems, *([store.problem] if store.problem else [])],
        "contents": [],
        "absent": [],
    }
    return {**document, "title": _title(document), "summary": _summary(document)}


def _gather_facts(
    store: Store,
    config: Config,
    device: Device,
    record: DeviceRecord | None,
    *,
    now: float,
    drill: bool,
    engine: Engine | None,
) -> Facts:
    before = 0.0 if drill else acks.cut(device, acks.heeded(store.acks(device.uuid), now))
    runs = sorted(
        (r for r in store.runs(device.uuid, drill=drill) if r.started > before), key=lambda r: (r.started, r.id)
    )
    if drill and not runs:
        raise DossierError(f"{device.name}: no drill is on record; run canaryd drill --device {device.name} first")
    if drill:
        runs = [r for r in runs if r.started >= runs[-1].started - DRILL_EXPIRY]  # those that its verdict counts
        verdict, note = _drilled(device, runs, config, now, Claims(store.met())), ""
    else:
        verdict, note = _judged(store, engine, device, runs, now)
        older = (
            f"Results before its repair or replacement, recorded {format_utc(before)}, do not count and are left out."
        )
        note = f"{note} {older}".strip() if before else note
    return Facts(
        store=store,
        config=config,
        device=device,
        record=record,
        runs=runs,
        polls=store.polls(device.uuid, completed=True, limit=POLLS),
        events=store.events(device=device.uuid),
        verdict=verdict,
        note=note,
        drill=drill,
    )


def _alike(other: Device, device: Device) -> bool:
    return (other.kind, bool(other.parent)) == (device.kind, bool(device.parent))


def _judged(
    store: Store, engine: Engine | None, device: Device, runs: Sequence[Run], now: float
) -> tuple[Verdict, str]:
    """Return the verdict that holds now, and a note on it. An engine judges the device again."""
    stored = store.verdict(device.uuid)
    if engine is not None and device.uuid in engine.devices:
        engine.recall_telemetry(device.uuid)  # this process has polled nothing
        current = engine.verdict(device.uuid)
        if stored is None or (stored.state, stored.cause) == (current.state, current.cause):
            return current, ""
        before = f"The stored verdict of {format_utc(stored.decided)} was {verdict_note(stored)}."
        return current, f"Judged again for this dossier. {before}"
    command = f"Start the daemon, or run canaryd check --device {device.name}."
    unjudged = Verdict(
        device=device.uuid, state=State.UNKNOWN, cause=Cause.UNDETERMINED, findings=(), decided=now, since=now
    )
    if stored is None:
        return unjudged, f"There is no verdict yet. {command}"
    newer = [r for r in runs if (r.wrong or r.unknown) and r.started + r.seconds > stored.decided]
    if stored.state is State.HEALTHY and newer:
        failed = f"{count(len(newer), 'run')} failed after the last verdict (healthy, {format_utc(stored.decided)})"
        return replace(unjudged, since=newer[0].started), f"Not judged yet: {failed}. {command}"
    age = now - stored.decided
    return stored, f"This verdict is {format_duration(age)} old; nothing newer is judged." if age > UNTENDED else ""


def _drilled(device: Device, runs: Sequence[Run], config: Config, now: float, claims: Claims) -> Verdict:
    """Judge drills as of the last one: their verdict is never stored, and they expire after an hour."""
    last = min(now, runs[-1].started + runs[-1].seconds)
    wanted = dict.fromkeys((r.probe for r in runs), DRILL_EXPIRY)
    among = node({device.uuid: device}, {device.uuid: runs}, last, drill=True, claims=claims)
    return decide(Case(device=device, node=among, wanted=wanted, policy=config.judge, now=last, drill=True))


def _kind(facts: Facts) -> tuple[str, str]:
    """Return "rma", "evidence", "health" or "drill", and why this is not an RMA dossier ("" for "rma")."""
    verdict, device = facts.verdict, facts.device
    if facts.drill:
        return "drill", "this is a drill: canaryd changed results in software, and the part is not at fault"
    if verdict.state is State.HEALTHY:
        return "health", "the device is healthy"
    if device.backend == "endpoint":
        return "evidence", "this is a model server, not a hardware part"
    if device.weak_identity:
        return "evidence", (
            "its identity is weak: the uuid identifies an installation, not the physical part (for example on a "
            "virtual machine), so nobody can prove that the returned part is the failed part"
        )
    if verdict.cause is not Cause.HARDWARE or verdict.state is not State.FAULTY:
        return "evidence", f"the verdict is {verdict_note(verdict)}; an RMA needs faulty (hardware)"
    return "rma", ""


def _title(document: Mapping[str, Any]) -> str:
    identity = document["identity"]
    name, number = identity["name"], f"serial {identity['serial']}" if identity["serial"] else identity["uuid"]
    return {
        "rma": f"RMA dossier of {identity['model']}, {number}",
        "evidence": f"{name}: evidence, not an RMA dossier",
        "health": f"{name}: health report",
        "drill": f"DRILL of {name}: the device is not at fault",
    }[document["kind"]]


def _summary(document: Mapping[str, Any]) -> str:
    """Return the verdict in one sentence, then each incident, as every other report tells it."""
    verdict, identity = document["verdict"], document["identity"]
    serial = f", serial {identity['serial']}" if identity["serial"] else ""
    text = (
        f"{identity['name']} ({identity['model']}{serial}) is {state_note(verdict['state'].upper(), verdict['cause'])}"
    )
    incidents = verdict["incidents"]
    text += f" since {format_utc(incidents[0]['since'] if incidents else verdict['since'])}."
    if document["kind"] == "drill":
        text = f"canaryd injected the fault “{document['drill']}”. Judged by this drill alone, {text}"
    text = " ".join([text, *(incident["text"] for incident in incidents)])
    if any(incident["wrong"] for incident in incidents):
        return text
    return text + (_worst_failure(document) if document["failures"] else f" {_no_failure(document)}")


def _worst_failure(document: Mapping[str, Any]) -> str:
    """Return what the worst failing case was, for a verdict that does not tell of it: it is cleared, or not judged."""
    worst = document["failures"][0]
    uploads, results = worst["uploads"], worst["results"]
    bits = ranges([int(b) for b in worst["bits"]])
    places = ", ".join(p["place"] for p in wrong_places(worst) if p["unit"] != "device")
    text = " Earlier failures are resolved (see the timeline):" if document["verdict"]["state"] == "healthy" else ""
    text += f" {worst['probe']} computed wrong results in {uploads['wrong']:,} of {count(uploads['total'], 'upload')}"
    text += f" ({results['wrong']:,} of {count(results['total'], 'result')})"
    text += f" on {places}" if places else ""
    text += f"; flipped {'bit' if len(worst['bits']) == 1 else 'bits'}: {bits}" if bits else ""
    text += f". Case: {worst['case']}."
    others = len(document["failures"]) - 1 + document["failures_omitted"]
    return text + (f" {count(others, 'other case')} failed too." if others else "")


def _no_failure(document: Mapping[str, Any]) -> str:
    compared = sum(p["results"]["total"] for p in document["probes"])
    unknown = sum(p["unknown"] for p in document["probes"])
    text = f"{count(compared, 'result')} compared, 0 wrong." if compared else "No result was compared."
    return text + (f" {count(unknown, 'recording')} outside the baseline." if unknown else "")


def _verdict(facts: Facts) -> dict[str, Any]:
    verdict = facts.verdict
    return {
        "state": verdict.state.value,
        "cause": verdict.cause.value,
        "since": verdict.since,
        "decided": verdict.decided,
        "note": facts.note,
        "incidents": incidents_json(verdict, facts.device),
        "findings": [
            {name: to_json(getattr(f, name)) for name in FINDING}
            | {"rivals": [{"cause": r.cause.value, "why": r.why, "rejected": r.rejected} for r in f.rivals]}
            | {"characterised": [{"name": c.name, "by": c.by} for c in f.characterised]}  # no uuids of other parts
            for f in verdict.findings
            if f.rule != ACKNOWLEDGED  # it names a person; "acks" has the rest
        ],
    }


def _identity(facts: Facts) -> dict[str, Any]:
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
        "torch_name": torch_name(device),
        "detail": dict(device.detail),
        "stack": dict(newest.stack) if newest else {},
    }


def _server(facts: Facts, records: Iterable[DeviceRecord]) -> dict[str, str]:
    """Return what the firmware calls the machine, which the inventory keeps with the processor.

    Most parts go back to its maker. Of an endpoint nothing is told: it may be elsewhere.
    """
    hosts = [r for r in records if r.device.unit == "cpu" and r.device.is_whole]
    detail: Mapping[str, str] = {}
    if facts.device.unit == "cpu":
        detail = facts.device.detail
    elif hosts and not facts.device.is_endpoint:  # a machine of before may be on record
        detail = max(hosts, key=lambda r: (r.present, r.last_seen)).device.detail
    return {key: detail[key] for key in SERVER if detail.get(key)}


def torch_name(device: Device) -> str:
    """Return the name that torch uses for a device: "cuda:3", also on ROCm."""
    kind = "cuda" if device.backend == "rocm" else device.backend
    index = device.index if device.torch_index is None else device.torch_index
    return kind if kind in ("cpu", "mps") else f"{kind}:{index}"
