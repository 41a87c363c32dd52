"""Collect everything in the store about one device into one document."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from canaryd import __version__
from canaryd.codec import to_json
from canaryd.config.settings import Config
from canaryd.dossier.advice import commands, next_step, not_checked
from canaryd.dossier.document import SCHEMA, DossierError, Facts, Json
from canaryd.dossier.failures import bit_totals, counted_runs, find_failures, peer_results, placed, probe_totals
from canaryd.dossier.timeline import timeline
from canaryd.facts import SELF_TEST
from canaryd.formatting import format_utc
from canaryd.judge import acks, selftest
from canaryd.judge.case import Case
from canaryd.judge.characterised import Claims
from canaryd.judge.findings import ACKNOWLEDGED
from canaryd.judge.node import node
from canaryd.judge.phrases import count
from canaryd.judge.verdict import decide
from canaryd.model import Cause, Device, Run, State, Verdict
from canaryd.report import status
from canaryd.report.incidents import incidents_json
from canaryd.report.terminal import state_note, verdict_note
from canaryd.store.devices import DeviceRecord
from canaryd.store.store import DRILL_EXPIRY, Store

POLLS = 20_000
"""Number of newest polls that are read."""
SERVER = ("product", "product_serial", "board", "board_serial", "bios")
"""Keys in `Device.detail` of a processor that identify the machine; a vendor asks for them."""
FINDING = ("rule", "state", "cause", "message", "action", "evidence", "probe", "repro", "runs")


def gather(store: Store, config: Config, device: Device, *, now: float, drill: bool = False) -> Json:
    """Return the document of one device from the store, without access to the device.

    The verdict is the stored one, or "unknown" if newer failures contradict it. Raises `DossierError` if `drill` asks
    for drills and none is stored.
    """
    records = {r.device.uuid: r for r in store.devices()}
    facts = _gather_facts(store, config, device, records.get(device.uuid), now=now, drill=drill)
    peers = [r.device for r in records.values() if r.device.uuid != device.uuid and _alike(r.device, device)]
    found = replace(facts, runs=counted_runs(facts.verdict, facts.runs))
    places, probes = placed(found), probe_totals(found)
    failures, omitted = find_failures(found, places, probes)
    entries, entries_omitted = timeline(facts)
    kind, why_not = _kind(facts)
    identity, verdict = _identity(facts, records.values()), _verdict(facts)
    summary = _summary(identity, verdict, facts.drill)
    if not any(incident["wrong"] for incident in verdict["incidents"]):
        resolved = " Earlier failures are resolved (see the timeline):" * (facts.verdict.state is State.HEALTHY)
        cases = count(len(failures) + omitted, "case")
        summary += f"{resolved} {cases} failed (see below)." if failures else _no_failure(probes)
    return {
        "schema": SCHEMA,
        "canaryd": __version__,
        "generated": now,
        "timezone": "UTC",
        "kind": kind,
        "title": _title(kind, identity),
        "summary": summary,
        "why_not_rma": why_not,
        "drill": facts.drill,
        "verdict": verdict,
        "identity": identity,
        "failures": failures,
        "failures_omitted": omitted,
        "bits": bit_totals(failures),
        "places": places,
        "probes": probes,
        "peers": peer_results(facts, peers, failures),
        "timeline": entries,
        "timeline_omitted": entries_omitted,
        "selftests": _selftests(facts.runs),
        "acks": [{"kind": a.kind, "at": a.at, "until": a.until, "reason": a.reason} for a in store.acks(device.uuid)],
        "reproduce": commands(facts, failures),
        "next_step": list(next_step(facts, kind, failures)),
        "not_checked": not_checked(facts),
        "problems": [*store.problems, *([store.problem] if store.problem else [])],
    }


def _gather_facts(
    store: Store, config: Config, device: Device, record: DeviceRecord | None, *, now: float, drill: bool
) -> Facts:
    results, claims = store.drills if drill else store, Claims(store.met())
    before = acks.cut(device, acks.heeded(results.acks(device.uuid), now))
    runs = sorted((r for r in results.runs(device.uuid) if r.started > before), key=lambda r: (r.started, r.id))
    if drill and not runs:
        raise DossierError(f"{device.name}: no drill is on record; run canaryd drill --device {device.name} first")
    note = f"Results before its repair or replacement, recorded {format_utc(before)}, do not count and are left out."
    if drill:
        runs = [r for r in runs if r.started >= runs[-1].started - DRILL_EXPIRY]  # those that its verdict counts
        verdict = _drilled(device, runs, config, now, claims)
    else:
        verdict = _judged(store, config, device, now)
    return Facts(
        store=results,
        config=config,
        device=device,
        record=record,
        runs=runs,
        polls=store.polls(device.uuid, completed=True, limit=POLLS),
        events=store.events(device=device.uuid),
        verdict=verdict,
        note=note if before else "",
        drill=", ".join(sorted({r.drill for r in runs if drill})),
        claims=claims,
    )


def _alike(other: Device, device: Device) -> bool:
    return (other.kind, bool(other.parent)) == (device.kind, bool(device.parent))


def _judged(store: Store, config: Config, device: Device, now: float) -> Verdict:
    """Return the verdict that `canaryd status` shows, the stored one of a replaced device, or unknown without any."""
    shown = (d.verdict for d in status.gather(store, config, now, evidence={}).devices if d.device.uuid == device.uuid)
    unjudged = Verdict(
        device=device.uuid, state=State.UNKNOWN, cause=Cause.UNDETERMINED, findings=(), decided=now, since=now
    )
    return next(shown, None) or store.verdict(device.uuid) or unjudged


def _drilled(device: Device, runs: Sequence[Run], config: Config, now: float, claims: Claims) -> Verdict:
    """Return the verdict from the drill runs alone, as it was after the last of them: drills expire after an hour."""
    last = min(now, runs[-1].started + runs[-1].seconds)
    wanted = dict.fromkeys((r.probe for r in runs), DRILL_EXPIRY)
    among = replace(node({device.uuid: device}, {device.uuid: runs}, last), claims=claims)
    return decide(Case(device=device, node=among, wanted=wanted, policy=config.judge, now=last))


def _kind(facts: Facts) -> tuple[str, str]:
    """Return "rma", "evidence", "health" or "drill", and the reason why this is not an RMA dossier ("" for "rma")."""
    verdict, device = facts.verdict, facts.device
    if facts.drill:
        return "drill", "this is a drill: canaryd changed results in software, and the part is not at fault"
    if verdict.state is State.HEALTHY:
        return "health", "the device is healthy"
    if not device.is_hardware:
        return "evidence", "this is a model server, not a hardware part"
    if device.weak_identity:
        return "evidence", (
            "its identity is weak: the uuid identifies an installation, not the physical part (for example on a "
            "virtual machine), so nobody can prove that the returned part is the failed part"
        )
    if verdict.cause is not Cause.HARDWARE or verdict.state is not State.FAULTY:
        return "evidence", f"the verdict is {verdict_note(verdict)}; an RMA needs faulty (hardware)"
    return "rma", ""


def _title(kind: str, identity: Json) -> str:
    number = f"serial {identity['serial']}" if identity["serial"] else identity["uuid"]
    name = identity["name"]
    return {
        "rma": f"RMA dossier of {identity['model']}, {number}",
        "evidence": f"{name}: evidence, not an RMA dossier",
        "health": f"{name}: health report",
        "drill": f"DRILL of {name}: the device is not at fault",
    }[kind]


def _summary(identity: Json, verdict: Json, drill: str) -> str:
    """Return the verdict in one sentence, then sentences about its incidents. `drill`: the injected fault, or ""."""
    incidents = verdict["incidents"]
    since = incidents[0]["since"] if incidents else verdict["since"]
    serial = f", serial {identity['serial']}" if identity["serial"] else ""
    state = state_note(verdict["state"].upper(), verdict["cause"])
    text = f"{identity['name']} ({identity['model']}{serial}) is {state} since {format_utc(since)}."
    if drill:
        text = f"canaryd injected the fault “{drill}”. Judged by this drill alone, {text}"
    return " ".join([text, *(incident["text"] for incident in incidents)])


def _no_failure(probes: Sequence[Json]) -> str:
    compared, unknown = sum(p["results"]["total"] for p in probes), sum(p["unknown"] for p in probes)
    text = f" {count(compared, 'result')} compared, 0 wrong." if compared else " No result was compared."
    return text + (f" {count(unknown, 'recording')} outside the baseline." if unknown else "")


def ranges(numbers: Sequence[int]) -> str:
    """Return ascending numbers as a short text: "0 to 14, 17"."""
    stretches: list[list[int]] = []
    for n in numbers:
        if stretches and n == stretches[-1][-1] + 1:
            stretches[-1].append(n)
        else:
            stretches.append([n])
    return ", ".join(", ".join(map(str, s)) if len(s) < 3 else f"{s[0]} to {s[-1]}" for s in stretches)


def _verdict(facts: Facts) -> Json:
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


def _identity(facts: Facts, records: Iterable[DeviceRecord]) -> Json:
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
        "server": _server(facts, records),
        "first_seen": record.first_seen if record else None,
        "last_seen": record.last_seen if record else None,
        "present": bool(record and record.present),
        "parent": device.parent,
        "torch_name": torch_name(device),
        "detail": dict(device.detail),
        "stack": dict(newest.stack) if newest else {},
    }


def _server(facts: Facts, records: Iterable[DeviceRecord]) -> dict[str, str]:
    """Return the names and serial numbers of the machine, from its firmware; they are stored with the processor.

    Most parts are returned to the maker of the machine. An endpoint gets none: it can be on another machine.
    """
    hosts = [r for r in records if r.device.unit == "cpu" and r.device.is_whole]
    detail: Mapping[str, str] = {}
    if facts.device.unit == "cpu":
        detail = facts.device.detail
    elif hosts and facts.device.is_hardware:  # a machine of before may be on record
        detail = max(hosts, key=lambda r: (r.present, r.last_seen)).device.detail
    return {key: detail[key] for key in SERVER if detail.get(key)}


def torch_name(device: Device) -> str:
    """Return the name that torch uses for a device: "cuda:3", also on ROCm."""
    kind, index = device.torch_place
    return kind if kind in ("cpu", "mps") else f"{kind}:{index}"


def _selftests(runs: Sequence[Run]) -> list[Json]:
    """Return the results of each test of the vendor's self-test, from the newest run that has any."""
    said = [r for r in runs if r.probe == selftest.PROBE and any(each.name == SELF_TEST for each in r.readings)]
    newest = said[-1].readings if said else ()
    messages = {each.labels.get("test"): str(each.value) for each in newest if each.name == selftest.MESSAGE}
    return [
        {name: each.labels.get(name, "") for name in ("tool", "suite", "test")}
        | {"result": str(each.value), "message": messages.get(each.labels.get("test"), ""), "at": said[-1].started}
        for each in newest
        if each.name == SELF_TEST
    ]
