"""What to do next, and what was not checked."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from canaryd.dossier.facts import Facts
from canaryd.engine.check import NEVER_CHECKED
from canaryd.judge.telemetry import xids
from canaryd.model import Cause, Outcome, State

EXHIBITS = 3
"""Failing cases whose tensors are laid out."""
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


def commands(facts: Facts, failures: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Return the commands that repeat what was found, the most telling first."""
    told = {f["repro"]: f"{f['probe']} {f['case']}" for f in reversed(failures[:EXHIBITS]) if f["repro"]}
    found = [{"command": command, "what": what} for command, what in reversed(told.items())]
    known = set(told)
    for finding in facts.verdict.findings:
        if finding.repro and finding.repro not in known and finding.state is not State.HEALTHY and not facts.drill:
            known.add(finding.repro)
            found.append({"command": finding.repro, "what": finding.rule})
    return found[: EXHIBITS + 3]


def next_step(facts: Facts, kind: str, failures: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what to do next, one sentence each."""
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
    for code in sorted({e.code for e in facts.events if e.kind == "xid" and e.code is not None}):
        known = xids.XIDS.get(code)
        if known is not None:
            steps.append(f"Xid {code} ({known.title}). NVIDIA's catalogue: {known.advice}.")
    return steps


def not_checked(facts: Facts) -> list[str]:
    """Return what was not checked, one sentence each."""
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
