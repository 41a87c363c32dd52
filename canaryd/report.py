"""What people and machines read of a check: text for a terminal, and one JSON object."""

from __future__ import annotations

import textwrap
from collections import Counter
from typing import Any

from canaryd import judge
from canaryd.check import Result
from canaryd.model import Device, Outcome, Run, Verdict

SCHEMA = "canaryd.check/1"
WIDTH = 110


def as_json(result: Result) -> dict[str, Any]:
    """Return the object that `check --json` prints (docs/check-json.md, docs/check.schema.json)."""
    return {
        "schema": SCHEMA,
        "state": result.state.value,
        "exit_code": judge.exit_code(result.state),
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
        "findings": [
            {
                "rule": f.rule,
                "probe": f.probe,
                "cause": f.cause.value,
                "severity": f.state.value,
                "message": f.message,
                "repro": f.repro,
                "runs": list(f.runs),
            }
            for f in verdict.findings
        ],
        "runs": [_run(run) for run in result.runs.get(device.uuid, [])],
        "skipped": [
            {"probe": probe, "case": skipped.case, "reason": skipped.reason}
            for probe, skipped in result.skipped.get(device.uuid, [])
        ],
        "rules_out": result.rules_out.get(device.uuid, {}),
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
        "confirms": run.confirms,
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
    lines += [line for problem in result.problems for line in _wrapped("problem: ", problem)]
    lines += [line for text in result.not_checked for line in _wrapped("not checked: ", text)]
    state = result.state
    word = "drill verdict" if result.drill else "verdict"
    lines.append(f"{word}: {state.value.upper()}  (exit {judge.exit_code(state)}, {result.seconds:.1f} s)")
    return "\n".join(lines)


def _text_of(result: Result, device: Device) -> list[str]:
    verdict = result.verdicts[device.uuid]
    lines = [f"{device.name}  {device.model}  {device.uuid}", f"  {_headline(verdict)}"]
    for finding in verdict.findings:
        where = f"{finding.probe}: " if finding.probe else ""
        lines += _wrapped(f"  - {finding.state.value}/{finding.cause.value}  ", f"{where}{finding.message}")
        if finding.repro:
            lines.append(f"    repeat: {finding.repro}")
    totals: dict[tuple[str, str], Counter[str]] = {}
    for run in result.runs.get(device.uuid, []):
        count = totals.setdefault((run.probe, run.instruction_set), Counter())
        count["runs"] += 1
        count["trials"] += run.trials
        count["wrong"] += sum(c.wrong_trials for c in run.comparisons)
        count["goldens"] += len(run.comparisons)
        count["failed"] += run.outcome is not Outcome.COMPLETED
    for (probe, instructions), count in totals.items():
        name = f"{probe} [{instructions}]" if instructions else probe
        failed = f", {count['failed']} of {count['runs']} runs did not complete" if count["failed"] else ""
        results = f"{count['trials']:>9,} results in {count['goldens']:,} comparisons"
        lines.append(f"  {name:<28} {results}, {count['wrong']} wrong{failed}")
    for probe, bound in result.rules_out.get(device.uuid, {}).items():
        lines.append(f"  {probe}: a fault that fires in more than 1 of {1 / bound:,.0f} results is ruled out (95 %)")
    reasons: dict[tuple[str, str], list[str]] = {}
    for probe, skipped in result.skipped.get(device.uuid, []):
        reasons.setdefault((probe, skipped.reason), []).append(skipped.case)
    for (probe, reason), cases in reasons.items():
        what = "" if cases == ["*"] else f" {', '.join(cases)}" if len(cases) < 7 else f" {len(cases)} cases"
        lines += _wrapped("  skipped ", f"{probe}{what}: {reason}")
    return lines


def _headline(verdict: Verdict) -> str:
    cause = "" if verdict.cause.value == "none" else f", cause: {verdict.cause.value}"
    drill = "DRILL, not the device: " if verdict.drill else ""
    return f"{drill}{verdict.state.value.upper()}{cause}"


def _wrapped(lead: str, text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=lead, subsequent_indent=" " * len(lead), break_on_hyphens=False)
