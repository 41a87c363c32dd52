"""Parts that hold the device against something else: the CPU's capture, and the vendor's own tool."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from canaryd.codec import to_json
from canaryd.facts import Claim, Observation, Seen
from canaryd.model import TORCH, Device, Outcome, Run
from canaryd_lab.characterise.conversation import MODULE, Conversation, result
from canaryd_lab.characterise.host_parts import CarryOut
from canaryd_lab.characterise.results import Part, Result

CAPTURES = ("float32", "bfloat16")
"""Formats in which the built-in model is captured."""
TOOLS: Mapping[str, str] = {"cuda": "nvidia-smi"}
"""Backend → the vendor's tool that telemetry is compared with."""
TELEMETRY: Mapping[str, str] = {
    "cuda": "nvidia_telemetry", "rocm": "amd_telemetry", "mps": "apple_telemetry", "npu": "ascend_telemetry",
    "xpu": "intel_telemetry", "cpu": "host_telemetry",
}  # fmt: skip


def parts(conversation: Conversation) -> dict[str, tuple[Part, CarryOut]]:
    """Return these parts by name."""
    if conversation.device.runtime != TORCH:  # captures call torch; telemetry is that of the card
        return {}
    found: list[tuple[Part, CarryOut]] = [
        (Part(name="capture", title="Capture compared with the CPU's", rank=77, seconds=16, workers=4), capture),
        (Part(name="telemetry", title="Telemetry against the vendor's tool", rank=80, seconds=5, workers=1), telemetry),
    ]
    return {part.name: (part, carry_out) for part, carry_out in found}


def capture(part: Part, conversation: Conversation) -> Result:
    """Capture the built-in model on the device and on the CPU, layer by layer, and compare the two.

    A CPU is compared with its own plainest instruction set.
    """
    conversation.close()  # the device may admit one process alone
    seen: list[Observation] = []
    worst, detail = Outcome.COMPLETED, ""
    cpu = next((d for d in conversation.engine.devices.values() if d.backend == "cpu"), None)
    if cpu is None:
        return result(part, Outcome.SKIPPED, "not offered here: canaryd finds no CPU to compare with")
    with tempfile.TemporaryDirectory(prefix="canaryd-") as directory:
        for dtype in CAPTURES:
            outcome, why, found = _captured(conversation, cpu, dtype, Path(directory))
            seen += found
            if outcome is not Outcome.COMPLETED:
                worst, detail = outcome, why
    return result(part, worst, detail, tuple(seen))


def _captured(
    conversation: Conversation, cpu: Device, dtype: str, directory: Path
) -> tuple[Outcome, str, list[Observation]]:
    """Return what became of two captures in one format and their comparison."""
    sides = {"device": (conversation.device, ""), "cpu": (cpu, "baseline")}
    for name, (device, instruction_set) in sides.items():
        own = replace(conversation, device=device)
        series = own.start(instruction_set if device.backend == "cpu" else "")
        arguments = {
            "device": to_json(device), "out": str(directory / f"{dtype}-{name}"), "model": "", "dtype": dtype,
            "prompts": [], "operators": False, "forced": True, "drill": "",
        }  # fmt: skip
        try:
            outcome, _, detail = series.answer("capture", arguments, conversation.within(120.0))
            if outcome is Outcome.COMPLETED and name == "cpu":
                paths = {"a": str(directory / f"{dtype}-cpu"), "b": str(directory / f"{dtype}-device")}
                outcome, answer, detail = series.answer("compare", paths, conversation.within(120.0))
        finally:
            conversation.engine.workers.end(series)
        if outcome is not Outcome.COMPLETED:
            return outcome, detail, []
    kind = str(answer["verdict"]["kind"])
    rows = answer["rows"]
    excess = max((float(r["excess"]) for r in rows if r.get("excess") is not None), default=0.0)
    values: dict[str, float | int | str] = {
        "tensors": len(rows), "equal": sum(bool(r["equal"]) for r in rows), "largest_excess": excess, "verdict": kind,
    }  # fmt: skip
    state = {"equal": Seen.RIGHT, "rounding": Seen.RIGHT, "fault": Seen.WRONG}.get(kind, Seen.MEASURED)
    text = str(answer["verdict"].get("why", ""))
    return outcome, "", [Observation(name=dtype, claim=Claim.STRICT, seen=state, detail=text, values=values)]


def telemetry(part: Part, conversation: Conversation) -> Result:
    """Read the device's telemetry, ask the vendor's tool at once, and compare field by field."""
    device, engine = conversation.device, conversation.engine
    name = TELEMETRY.get(device.backend, "")
    if name not in engine.entries:
        text = f"not offered here: no telemetry probe for {device.backend} is enabled"
        return result(part, Outcome.SKIPPED, text)
    series = conversation.start(numeric=False)
    try:
        run = conversation.run_probe(engine.entries[name], 1.0, series=series)
        tool = TOOLS.get(device.backend, "")
        arguments = {"part": "vendor tool", "device": to_json(device), "seconds": 10.0, "drill": "", "tool": tool}
        outcome, value, detail = (
            series.answer(MODULE, arguments, conversation.within(20.0)) if tool else (Outcome.SKIPPED, {}, "")
        )
    finally:
        engine.workers.end(series)
    readings = {r.key: r.value for r in run.readings}
    seen = [*_compared(readings, value.get("facts", {}).get("fields", {})), _availability(run)]
    if not tool:
        text = f"not offered here: canaryd knows no tool of the vendor for {device.backend}"
        seen.append(Observation(name="vendor's tool", claim=Claim.STRICT, seen=Seen.NOT_OFFERED, detail=text))
    elif outcome is not Outcome.COMPLETED:
        text = f"not offered here: {tool}: {detail}"[:400]
        seen.append(Observation(name=tool, claim=Claim.STRICT, seen=Seen.NOT_OFFERED, detail=text))
    facts = {"readings": readings, "absent": dict(run.absent)}
    return result(part, run.outcome, run.detail, tuple(seen), facts)


def _availability(run: Run) -> Observation:
    values: dict[str, float | int | str] = {"readings": len(run.readings), "absent": len(run.absent)}
    return Observation(name="readings of canaryd", claim=Claim.OPEN, seen=Seen.MEASURED, values=values)


def _compared(readings: Mapping[str, Any], fields: Mapping[str, Any]) -> list[Observation]:
    """Compare what canaryd read with what the tool says; `fields`: reading → its value and the tool's tolerance."""
    seen = []
    for key, field in fields.items():
        theirs, tolerance = field["value"], float(field["tolerance"])
        if key not in readings:
            text = "canaryd has no such reading, and the tool has"
            seen.append(Observation(name=key, claim=Claim.OPEN, seen=Seen.MEASURED, detail=text))
            continue
        ours = readings[key]
        values: dict[str, float | int | str] = {"canaryd": ours, "tool": theirs}
        numeric = isinstance(ours, (int, float)) and isinstance(theirs, (int, float))
        same = abs(float(ours) - float(theirs)) <= tolerance if numeric else str(ours) == str(theirs)
        kind = Seen.RIGHT if same else Seen.WRONG
        seen.append(Observation(name=key, claim=Claim.STRICT, seen=kind, detail=str(field["field"]), values=values))
    return seen
