"""Show the result of `canaryd capture --exact` (docs/lab.md) in at most six lines: verdict, place, next step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from canaryd.codec import from_json
from canaryd.facts import printable
from canaryd.formatting import columns, wrapped
from canaryd.model import Device

OPERATORS = {
    "attention_norm": "norm before attention",
    **{name: f"{name} projection" for name in ("query", "key", "value", "output", "gate", "up", "down")},
    "rotated_query": "rotated queries",
    "rotated_key": "rotated keys",
    "keys": "keys in the cache",
    "values": "values in the cache",
    "mixed": "mixture of values",
    "middle": "residual stream after attention",
    "inner_norm": "norm before the MLP",
    "active": "SiLU of the gate times up",
    "share": "share that the router gives it",
    "out": "residual stream after the MLP",
    "norm": "last norm",
    "word": "choice of the word",
}
"""Operator → readable name, for operators whose own name is unclear to readers."""
KERNELS = {"flash_attention": "flash", "efficient_attention": "memory-efficient", "cudnn_attention": "cuDNN"}
KERNELS |= {"eager-experts": "eager with experts"}
"""Way to compute attention → its name for people, where its own is not one."""
PATHS = {"forced": "in one pass", "decode": "word by word"}
AGAIN = {
    "same": "A second run gave the same fault.",
    "other": "A second run gave another fault.",
    "right": "A second run was right: the fault is transient.",
}
INPUTS = "all its inputs are right"
SOME_BITS = 2
"""Maximum number of differing bits that are listed; if more differ, only their number is shown."""

Facts = Mapping[str, Any]


def text(answer: Facts, width: int | None = None) -> str:
    """Return the verdict and its reason as text of `width` columns (None: as wide as this terminal)."""
    room = columns() if width is None else width
    first = next((ran for ran in answer["ran"] if ran["fault"]), None)
    lines = _right(answer, room) if first is None else _wrong(answer, first, room)
    return "\n".join(printable(line) for line in lines)


def _right(answer: Facts, room: int) -> list[str]:
    ran = answer["ran"]
    values = sum(r["values"] for r in ran)
    lead = f"NO FAULT: {device(answer)}, all {values:,} values of {len(ran)} inferences are right."
    formats, kernels = (dict.fromkeys(r[name] for r in ran) for name in ("dtype", "kernel"))
    what = f"{', '.join(formats)}; attention: {', '.join(KERNELS.get(kernel, kernel) for kernel in kernels)}."
    lines = [*wrapped("", lead, room), *wrapped("  ", what, room)]
    refused = _refused(answer)
    return lines + (wrapped("  ", f"Kernels that this device does not take: {refused}.", room) if refused else [])


def _refused(answer: Facts) -> str:
    """Return a text that lists the kernels that did not run, with their formats if they ran in others."""
    formats = {ran["dtype"] for ran in answer["ran"]}
    refused: dict[str, list[str]] = {}
    for item in answer["refused"]:
        refused.setdefault(KERNELS.get(item["kernel"], item["kernel"]), []).append(item["dtype"])
    return ", ".join(k if set(some) >= formats else f"{k} ({', '.join(some)})" for k, some in refused.items())


def _wrong(answer: Facts, first: Facts, room: int) -> list[str]:
    fault, drill = first["fault"], answer["drill"]
    found, place = fault["evidence"], fault["place"]
    number, _, expert = place["layer"].partition(".")
    layer = f"layer {number}, " if number.isdigit() else ""
    layer += f"{expert.replace('expert', 'expert ')}, " if expert else ""
    operator = OPERATORS.get(place["operator"], place["operator"])
    at = ", ".join(f"{name} {index}" for name, index in fault["where"].items())
    wrong = sum(bool(ran["fault"]) for ran in answer["ran"])
    lines = [
        *wrapped("FAULT: ", f"{device(answer)}, {layer}{operator}.", room),
        *wrapped("  ", f"{at}, {_bits(fault['bits'])}: {_difference(fault)}", room),
        *wrapped("  ", _weights(first) or f"{found['wrong']:,} of {found['total']:,} values wrong; {INPUTS}.", room),
        *wrapped("  ", AGAIN[first["again"]], room),
        *wrapped("  ", f"{wrong} of {len(answer['ran'])} inferences wrong; first: {_inference(first)}.", room),
    ]
    if drill:
        return [*lines, *wrapped("", f"DRILL: one value was changed on purpose at {drill}.", room)]
    return [*lines, f"Do now: canaryd check --device {device(answer)} --level deep"]


def device(answer: Facts) -> str:
    """Return the device's name, such as "cuda:3"."""
    return from_json(Device, answer["device"]).name


def _inference(ran: Facts) -> str:
    return f"{ran['dtype']}, {PATHS[ran['path']]}, {KERNELS.get(ran['kernel'], ran['kernel'])}"


def _bits(bits: list[int]) -> str:
    if len(bits) > SOME_BITS:
        return f"{len(bits)} bits"
    return f"bit {bits[0]}" if len(bits) == 1 else f"bits {', '.join(map(str, bits))}"


def _difference(fault: Facts) -> str:
    """Return the right and the wrong value as text, with as few digits as show that they differ."""
    wanted, got = (f"{float(fault[name]):.6g}" for name in ("wanted", "got"))
    if wanted == got:
        wanted, got = fault["wanted"], fault["got"]
    return f"wanted {wanted}, got {got}"


def _weights(ran: Facts) -> str:
    """Return a sentence about the first weight that was wrong when it was read back from the device, or ""."""
    if not ran["weights"]:
        return ""
    name, found = ran["weights"][0]
    return f"Wrong in the device's memory: {name}{found['first'][0][0]}"
