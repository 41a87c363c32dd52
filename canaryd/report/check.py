"""What people and machines read of a check or a status: text for a terminal, and one JSON object."""

from __future__ import annotations

from collections import Counter
from typing import Any

from canaryd.codec import finding_json, to_json
from canaryd.engine.check import Result
from canaryd.formatting import moment, spoken, wrapped
from canaryd.judge.verdict import exit_code
from canaryd.model import Device, Outcome, Run, State, Verdict, printable
from canaryd.report.status import DeviceStatus, Status, advice, answer, newest_of, told_of_ack, told_of_events

SCHEMA = "canaryd.check/1"
STATUS_SCHEMA = "canaryd.status/1"
RECENT_EVENTS = 10
"""Events of one device that a terminal is shown; JSON has them all."""


def as_json(result: Result) -> dict[str, Any]:
    """Return the object that `check --json` prints (docs/json.md, docs/check.schema.json)."""
    return {
        "schema": SCHEMA,
        "state": result.state.value,
        "exit_code": exit_code(result.state),
        "level": result.level,
        "drill": result.drill,
        "started": result.started,
        "seconds": round(result.seconds, 3),
        "devices": [_device(result, device) for device in result.devices],
        "not_checked": list(result.not_checked),
        "problems": list(result.problems),
    }


def _device(result: Result, device: Device) -> dict[str, Any]:
    verdict = result.verdicts[device.uuid]
    return {
        "device": device.uuid,
        "backend": device.backend,
        "index": device.index,
        "model": device.model,
        "state": verdict.state.value,
        "cause": verdict.cause.value,
        "since": verdict.since,
        "findings": [finding_json(f) for f in verdict.findings],
        "runs": [_run(run) for run in result.runs.get(device.uuid, [])],
        "skipped": [
            {"probe": probe, "case": skipped.case, "reason": skipped.reason}
            for probe, skipped in result.skipped.get(device.uuid, [])
        ],
        "rules_out": result.rules_out.get(device.uuid, {}),
        "telemetry": {
            probe: {
                "completed": poll.completed is not None,
                "readings": [
                    {"name": r.name, "labels": dict(r.labels), "value": r.value}
                    for r in (poll.completed.readings if poll.completed else ())
                ],
                "absent": dict(poll.completed.absent) if poll.completed else {},
            }
            for probe, poll in result.polls.get(device.uuid, {}).items()
        },
        "events": [to_json(event) for event in result.events.get(device.uuid, ())],
    }


def _run(run: Run) -> dict[str, Any]:
    return {
        "id": run.id,
        "probe": run.probe,
        "outcome": run.outcome.value,
        "level": run.level,
        "instruction_set": run.instruction_set,
        "seed": run.seed,
        "started": run.started,
        "seconds": round(run.seconds, 3),
        "trials": run.trials,
        "wrong_trials": sum(c.wrong_trials for c in run.comparisons),
        "recordings": len(run.recordings),
        "unknown": list(run.unknown),
        "confirms": run.confirms,
        "intensity": run.intensity,
        "stack": run.stack_id,
        "detail": run.detail,
        "repro": run.repro,
    }


def as_text(result: Result) -> str:
    """Return the report of a check for a terminal: the verdict first, then why, then what was left out."""
    lines: list[str] = []
    for device in result.devices:
        lines += [*_text_of(result, device), ""]
    if not result.devices:
        lines += ["no device was examined", ""]
    lines += [line for problem in result.problems for line in wrapped("problem: ", problem)]
    lines += [line for text in result.not_checked for line in wrapped("not checked: ", text)]
    state = result.state
    word = "drill verdict" if result.drill else "verdict"
    lines.append(f"{word}: {state.value.upper()}  (exit {exit_code(state)}, {result.seconds:.1f} s)")
    return "\n".join(map(printable, lines))


def _text_of(result: Result, device: Device) -> list[str]:
    verdict = result.verdicts[device.uuid]
    lines = [f"{device.name}  {device.model}  {device.uuid}", f"  {_headline(verdict)}", *_text_of_findings(verdict)]
    totals: dict[tuple[str, str], Counter[str]] = {}
    for run in result.runs.get(device.uuid, []):
        count = totals.setdefault((run.probe, run.instruction_set), Counter())
        count["runs"] += 1
        count["trials"] += run.trials
        count["wrong"] += sum(c.wrong_trials for c in run.comparisons)
        count["goldens"] += len(run.comparisons)
        count["recordings"] += len(run.recordings)
        count["unknown"] += len(run.unknown)
        count["failed"] += run.outcome is not Outcome.COMPLETED
    for (probe, instructions), count in totals.items():
        name = f"{probe} [{instructions}]" if instructions else probe
        failed = f", {count['failed']} of {count['runs']} runs did not complete" if count["failed"] else ""
        if count["goldens"] or not count["recordings"]:
            results = f"{count['trials']:>9,} results in {count['goldens']:,} comparisons, {count['wrong']} wrong"
            lines.append(f"  {name:<28} {results}{failed}")
            failed = ""
        if count["recordings"]:
            recorded = f"{count['recordings']:>9,} recordings, {count['unknown']} cases beyond what is known"
            lines.append(f"  {name:<28} {recorded}{failed}")
    for probe, poll in result.polls.get(device.uuid, {}).items():
        if poll.completed is not None:
            absent = f", {len(poll.completed.absent)} not given here" if poll.completed.absent else ""
            lines.append(f"  {probe:<28} {len(poll.completed.readings):>9,} readings{absent}")
    for probe, bound in result.rules_out.get(device.uuid, {}).items():
        lines.append(f"  {probe}: a fault that fires in more than 1 of {1 / bound:,.0f} results is ruled out (95 %)")
    reasons: dict[tuple[str, str], list[str]] = {}
    for probe, skipped in result.skipped.get(device.uuid, []):
        reasons.setdefault((probe, skipped.reason), []).append(skipped.case)
    for (probe, reason), cases in reasons.items():
        what = "" if cases == ["*"] else f" {', '.join(cases)}" if len(cases) < 7 else f" {len(cases)} cases"
        lines += wrapped("  skipped ", f"{probe}{what}: {reason}")
    return lines


def _text_of_findings(verdict: Verdict) -> list[str]:
    lines = []
    for finding in verdict.findings:
        where = f"{finding.probe}: " if finding.probe and not finding.message.startswith(finding.probe) else ""
        kind = "note" if finding.state is State.HEALTHY else f"{finding.state.value}/{finding.cause.value}"
        lines += wrapped(f"  - {kind}  ", f"{where}{finding.message}")
        for rival in finding.rivals:
            lines += wrapped(f"    {'not' if rival.rejected else 'or'} {rival.cause.value}: ", rival.why)
        if finding.repro:
            lines.append(f"    repeat: {finding.repro}")
    return lines


def status_json(status: Status) -> dict[str, Any]:
    """Return the object that `status --json` prints: the schema's name, the worst state, and each device."""
    return {
        "schema": STATUS_SCHEMA,
        "state": status.state.value,
        "exit_code": exit_code(status.state),
        "answer": answer(status),
        "advice": advice(status),
        "now": status.now,
        "daemon_running": status.daemon,
        "released_until": status.released_until or None,
        "devices": [
            {
                "device": d.device.uuid,
                "backend": d.device.backend,
                "index": d.device.index,
                "name": d.device.name,
                "model": d.device.model,
                "present": d.present,
                "state": d.verdict.state.value,
                "cause": d.verdict.cause.value,
                "since": d.verdict.since,
                "decided": d.verdict.decided,
                "findings": [finding_json(f) for f in d.verdict.findings],
                "acks": [
                    {"kind": a.kind, "at": a.at, "until": a.until or None, "reason": a.reason, "by": a.by}
                    for a in d.acks
                ],
                "evidence": dict(d.evidence),
                "events": [to_json(event) for event in d.events],
            }
            for d in status.devices
        ],
        "problems": list(status.problems),
    }


def status_text(status: Status) -> str:
    """Return the status for a terminal: may the numbers be trusted, what to do now, then each device, worst first."""
    lines = [*wrapped("", answer(status)), *wrapped("Do now: ", advice(status)), ""]
    alike: dict[object, list[DeviceStatus]] = {}
    for d in status.devices:
        if not d.quiet:
            why = (tuple((f.message, f.rivals) for f in d.verdict.findings), tuple(map(told_of_ack, d.untold)))
            said = (d.present, d.verdict.state, d.verdict.cause, why)
            alike.setdefault(d.device.uuid if d.events else said, []).append(d)
    lines += [line for same in alike.values() for line in (*_text_of_status(same, status.now), "")]
    if quiet := [d for d in status.devices if d.quiet]:
        lines += [*_text_of_quiet(quiet, status.now), ""]
    if not status.devices:
        lines += ["no device has been seen yet: start the daemon, or run canaryd check", ""]
    lines += [line for problem in status.problems for line in wrapped("problem: ", problem)]
    if status.released_until:
        lines.append(f"released until {moment(status.released_until)}: no device is touched, and evidence grows old")
    lines.append("daemon: running" if status.daemon else "daemon: not running on this state directory")
    lines.append(f"status: {status.state.value.upper()}  (exit {exit_code(status.state)})")
    return "\n".join(map(printable, lines))


def _text_of_quiet(quiet: list[DeviceStatus], now: float) -> list[str]:
    """Return one line, on a wide terminal, of the devices of which there is nothing to say."""
    models: dict[str, list[str]] = {}
    for d in quiet:
        models.setdefault(d.device.model, []).append(d.device.name)
    names = ", ".join(f"{' '.join(names)} ({model})" for model, names in models.items())
    stalest = min((d.stalest for d in quiet if d.stalest), key=lambda of: of[1] or 0.0, default=None)
    oldest = f"; {stalest[0]} is the longest ago: {_ago(stalest[1], now)}" if stalest else ""
    return wrapped("HEALTHY  ", f"{names}{oldest}")


def _text_of_status(same: list[DeviceStatus], now: float) -> list[str]:
    """Return what is said of devices of which the same is to be said."""
    d = same[0]
    since = f"since {moment(d.verdict.since)} ({_ago(d.verdict.since, now)}), judged {_ago(d.verdict.decided, now)}"
    lines = [f"{e.device.name}  {e.device.model}  {e.device.uuid}{'' if e.present else '  GONE'}" for e in same]
    lines += wrapped("  ", f"{_headline(d.verdict)}  {since}")
    for ack in d.untold:
        lines += wrapped("  ! ", told_of_ack(ack))
    lines += _text_of_findings(d.verdict)
    events = told_of_events(d)
    lines += [line for event in events[-RECENT_EVENTS:] for line in wrapped("  * ", event)]
    more = len(events) - RECENT_EVENTS
    if more > 0:
        lines.append(f"  * and {more} earlier kinds of event in the last day: canaryd status --json")
    evidence = ", ".join(f"{probe} {_ago(at, now)}" for probe, at in newest_of(same).items())
    return [*lines, *(wrapped("  newest evidence: ", evidence) if evidence else [])]


def _ago(at: float | None, now: float) -> str:
    return "none yet" if at is None else f"{spoken(now - at)} ago"


def _headline(verdict: Verdict) -> str:
    cause = "" if verdict.cause.value == "none" else f", cause: {verdict.cause.value}"
    drill = "DRILL, not the device: " if verdict.drill else ""
    return f"{drill}{verdict.state.value.upper()}{cause}"
