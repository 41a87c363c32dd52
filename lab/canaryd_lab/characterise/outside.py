"""Parts (groups of tests) that compare a device with the exact canary's proved results, or with the vendor's tool."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from canaryd.codec import to_json
from canaryd.model import TORCH, Outcome
from canaryd_lab.characterise.conversation import MODULE, Conversation, result
from canaryd_lab.characterise.host_parts import CarryOut
from canaryd_lab.characterise.results import Part, Result
from canaryd_lab.observation import Claim, Observation, Seen

CAPTURES = ("float32", "bfloat16")
"""Formats in which the exact canary's intermediate results are captured."""
TELEMETRY: Mapping[str, str] = {
    "cuda": "nvidia_telemetry", "rocm": "amd_telemetry", "mps": "apple_telemetry", "npu": "ascend_telemetry",
    "xpu": "intel_telemetry", "cpu": "host_telemetry",
}  # fmt: skip


def parts(conversation: Conversation) -> dict[str, tuple[Part, CarryOut]]:
    """Return name → (part, function that carries it out), for the parts of this module."""
    if conversation.device.runtime != TORCH:  # captures call torch; telemetry is that of the card
        return {}
    found: list[tuple[Part, CarryOut]] = [
        (Part(name="capture", title="Every operator compared with the truth", rank=77, seconds=16, workers=1), capture),
        (Part(name="telemetry", title="Telemetry against the vendor's tool", rank=80, seconds=5, workers=1), telemetry),
    ]
    return {part.name: (part, carry_out) for part, carry_out in found}


def capture(part: Part, conversation: Conversation) -> Result:
    """Run the exact canary on the device and compare every operator's result with the proved one."""
    seen: list[Observation] = []
    series = conversation.start()
    try:
        for dtype in CAPTURES:
            arguments = {"device": to_json(conversation.device), "out": "", "dtype": dtype, "seed": 0, "drill": ""}
            outcome, answer, detail = series.answer("exact_capture", arguments, conversation.within(120.0))
            if outcome is not Outcome.COMPLETED:
                return result(part, outcome, detail, tuple(seen))
            values: dict[str, float | int | str] = {
                "inferences": len(answer["ran"]),
                **{name: sum(int(ran[name]) for ran in answer["ran"]) for name in ("values", "wrong", "faults")},
            }
            state = Seen.RIGHT if answer["verdict"] == "right" else Seen.WRONG
            seen.append(Observation(name=dtype, claim=Claim.STRICT, seen=state, values=values))
    finally:
        conversation.engine.workers.end(series)
    return result(part, Outcome.COMPLETED, "", tuple(seen))


def telemetry(part: Part, conversation: Conversation) -> Result:
    """Read the device's telemetry, then the vendor's tool, and compare both field by field."""
    device, engine = conversation.device, conversation.engine
    name = TELEMETRY.get(device.backend, "")
    if name not in engine.entries:
        text = f"not offered here: no telemetry probe for {device.backend} is enabled"
        return result(part, Outcome.SKIPPED, text)
    series = conversation.start(numeric=False)
    try:
        run = conversation.run_probe(engine.entries[name], 1.0, series=series)
        tool = "nvidia-smi" if device.backend == "cuda" else ""
        arguments = {"part": "vendor tool", "device": to_json(device), "seconds": 10.0, "drill": ""}
        outcome, value, detail = (
            series.answer(MODULE, arguments, conversation.within(20.0)) if tool else (Outcome.SKIPPED, {}, "")
        )
    finally:
        engine.workers.end(series)
    readings = {r.key: r.value for r in run.readings}
    counts: dict[str, float | int | str] = {"readings": len(run.readings), "absent": len(run.absent)}
    seen = [*_compared(readings, value.get("facts", {}).get("fields", {}))]
    seen.append(Observation(name="readings of canaryd", claim=Claim.OPEN, seen=Seen.MEASURED, values=counts))
    if not tool:
        text = f"not offered here: canaryd knows no tool of the vendor for {device.backend}"
        seen.append(Observation(name="vendor's tool", claim=Claim.STRICT, seen=Seen.NOT_OFFERED, detail=text))
    elif outcome is not Outcome.COMPLETED:
        text = f"not offered here: {tool}: {detail}"[:400]
        seen.append(Observation(name=tool, claim=Claim.STRICT, seen=Seen.NOT_OFFERED, detail=text))
    facts = {"readings": readings, "absent": dict(run.absent)}
    return result(part, run.outcome, run.detail, tuple(seen), facts)


def _compared(readings: Mapping[str, Any], fields: Mapping[str, Any]) -> list[Observation]:
    """Return one observation per field of the tool; `fields`: name of a reading → the tool's value and tolerance."""
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
