"""Recommend the next steps, and list what was not checked."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from canaryd.dossier.document import Facts, Json
from canaryd.engine.check import NEVER_CHECKED, untested
from canaryd.judge import incidents
from canaryd.judge.phrases import PROVIDER, first_of
from canaryd.judge.telemetry import xids
from canaryd.model import Cause, Outcome, State
from canaryd.report.incidents import next_step as after
from canaryd.report.incidents import step as to_do

EXHIBITS = 3
"""Largest number of failing cases whose operands (input data) are written to files."""
VENDOR_STEPS: Mapping[str, tuple[str, ...]] = {
    "cuda": (
        "Open a case with NVIDIA or the server's maker. Give the serial number and attach this archive.",
        "Attach the output of nvidia-bug-report.sh too, if this archive does not contain it.",
        "Run dcgmi diag -r 4 or the Field Diagnostic when they ask: it and the error counters decide an RMA.",
        "If that diagnostic passes: it does not disprove a wrong result that repeats.",
    ),
    "rocm": (
        "Open a case with AMD or the server's maker. Give the serial number and attach this archive.",
        "Attach the output of rocm_techsupport.sh, and of AGFHC (GPU Field Health Check) or the ROCm Validation Suite.",
    ),
    "xpu": (
        "Open a case with Intel or the server's maker. Give the serial number and attach this archive.",
        "Attach the output of xpu-smi diag -l 3 and the kernel log.",
    ),
    "npu": (
        "Open a case with Huawei or its partner. Give the serial number and attach this archive.",
        "Attach the report of ascend-dmi and the device's log.",
    ),
    "mps": ("Take this archive and the machine's serial number to Apple service. Apple decides by Apple Diagnostics.",),
    "cpu": (
        "Test the memory first (memtest86+ or the board's own test): a bad module looks like a bad core.",
        "Then run the maker's test: Intel Data Center Diagnostic Tool or OpenDCDiag; for AMD, ask the server's maker.",
        "Meanwhile take the failing core offline, if “Where” names one.",
    ),
}
"""Backend → what to do with a faulty part, according to the vendor's publications (docs/dossier.md)."""
OTHER_VENDOR = ("Open a case with the vendor. Give the serial number and attach this archive.",)
SHORTEST_WAY = "Point to the commands under “How to reproduce it”: they are the shortest way to see the fault."


def commands(facts: Facts, failures: Sequence[Json]) -> list[Json]:
    """Return entries {"command": a command, "what": the rule or, without an incident, the case that it repeats}."""
    found = [(i.repeat, i.lead.rule) for i in incidents.incidents(facts.verdict)]
    found = found or [(f["repro"], f"{f['probe']} {f['case']}") for f in failures[:1]]
    return [{"command": command, "what": what} for command, what in found if command]


def next_step(facts: Facts, kind: str, failures: Sequence[Json]) -> Iterator[str]:
    """Yield sentences about what to do next, the most urgent first. `kind`: the kind of dossier, such as "rma".

    If the part is not known to be at fault, the steps are the same as in all other reports.
    """
    verdict, device = facts.verdict, facts.device
    if kind == "drill":
        yield "Nothing to do: the drill tested the alarm. Its runs never count against the device."
        return
    if kind == "health":
        yield "Nothing to do."
    elif verdict.cause is Cause.HARDWARE and device.is_hardware:
        if verdict.state is not State.FAULTY:
            yield "Do not return the part yet: the fault is not confirmed. Let canaryd finish its retests."
        if device.weak_identity:
            yield f"Give this archive to {PROVIDER}: canaryd cannot tell which physical part it is."
        yield from VENDOR_STEPS.get(device.backend, OTHER_VENDOR)
        if failures:
            yield SHORTEST_WAY
    else:
        yield "No RMA: the part is not known to be at fault."
        found = incidents.incidents(verdict)
        yield from filter(None, (str(step) for i in found for step in (to_do(i, device), after(i, device))))
        if not facts.runs:
            yield f"No test has run on this device: run canaryd check --device {device.name} first."
    for code in sorted({e.code for e in facts.events if e.kind == "xid" and e.code is not None}):
        known = xids.catalogue().get(code)
        if known and known.advice != xids.advice_of("IGNORE"):
            yield f"Xid {code} ({known.title}). NVIDIA's catalogue: {known.advice}."


def not_checked(facts: Facts) -> list[str]:
    """Return sentences about what was not checked, with the reasons."""
    gaps = list(map(str, (*NEVER_CHECKED, *untested({facts.device.name: facts.runs}))))
    run_probes = {r.probe for r in facts.runs}
    off = sorted(n for n, p in facts.config.probes.each.items() if p.enabled is False and n not in run_probes)
    if off:
        gaps.append(f"{', '.join(off)}: disabled in the configuration")
    newest = {(r.probe, r.instruction_set): r for r in facts.runs if r.whole}
    reasons: dict[str, list[str]] = defaultdict(list)
    for run in newest.values():
        if run.outcome is Outcome.SKIPPED:
            reasons[run.detail.partition("\n")[0] or "no reason given"].append(run.probe)
        for part in run.skipped:
            reasons[part.reason].append(f"{run.probe} {part.case}")
    for reason, parts in sorted(reasons.items()):
        gaps.append(f"{first_of(sorted(set(parts)), 5)}: {reason}")
    if not facts.polls:
        gaps.append("temperature, power and error counters: no telemetry of this device is on record")
    if not facts.runs:
        gaps.append("computation: no run of this device is on record")
    return gaps
