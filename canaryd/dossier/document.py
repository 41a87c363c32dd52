"""The dossier of one device: what is known of it, laid out for the person who decides whether the part goes back.

`gather` reads the store into one document (docs/dossier.schema.json), from which everything else is made: the page, the
OCP output, the archive. `write` puts all of it into one directory, with raw evidence, logs and checksums.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from canaryd import __version__
from canaryd.codec import to_json
from canaryd.config.settings import Config
from canaryd.dossier import page
from canaryd.dossier.advice import commands, next_step, not_checked
from canaryd.dossier.facts import Facts
from canaryd.dossier.failures import bit_totals, find_failures, peer_results, placed, probe_totals
from canaryd.dossier.timeline import POLLS, series, timeline
from canaryd.engine.engine import Engine
from canaryd.formatting import moment, spoken
from canaryd.judge.case import DRILL_EXPIRY, Case, node
from canaryd.judge.verdict import decide
from canaryd.model import Cause, Device, Run, State, Subject, Verdict
from canaryd.report.status import UNTENDED
from canaryd.store.store import Store

SCHEMA = "canaryd.dossier/1"
FINDING = ("rule", "state", "cause", "message", "action", "evidence", "probe", "repro", "runs")


class DossierError(RuntimeError):
    """The dossier could not be written; the message says where, why and what to do."""


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
    facts = Facts(
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
    failures, omitted = find_failures(facts, peers)
    probes = probe_totals(facts)
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
        "bits": bit_totals(failures),
        "places": placed(c for r in runs for c in r.comparisons if c.subject is Subject.DEVICE),
        "probes": probes,
        "peers": peer_results(facts, peers, failures),
        "timeline": [],
        "timeline_omitted": 0,
        "series": series(facts),
        "acks": [{"kind": a.kind, "at": a.at, "until": a.until, "reason": a.reason} for a in store.acks(device.uuid)],
        "reproduce": commands(facts, failures),
        "next_step": next_step(facts, kind, failures),
        "not_checked": not_checked(facts),
        "problems": [*store.problems, *([store.problem] if store.problem else [])],
        "contents": [],
        "absent": [],
    }
    document["timeline"], document["timeline_omitted"] = timeline(facts)
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
    wanted = dict.fromkeys((r.probe for r in runs), DRILL_EXPIRY)
    among = node({device.uuid: device}, {device.uuid: runs}, last, drill=True)
    return decide(Case(device=device, node=among, wanted=wanted, policy=config.judge, now=last, drill=True))


def _kind(facts: Facts) -> tuple[str, str]:
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
        bits = page.ranges([int(b) for b in first["bits"]])
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


def _verdict(facts: Facts) -> dict[str, Any]:
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


def torch_name(device: Device) -> str:
    """Return how torch calls a device: "cuda:3" on ROCm too."""
    kind = "cuda" if device.backend == "rocm" else device.backend
    index = device.index if device.torch_index is None else device.torch_index
    return kind if kind in ("cpu", "mps") else f"{kind}:{index}"
