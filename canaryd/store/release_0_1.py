"""Runs as release 0.1.0 stored them: facts that stood in sentences there become typed fields here, and nowhere else.

What such a sentence does not tell stays unknown. The words matched here are those of 0.1.0 and never change.
"""

from __future__ import annotations

import re
from typing import Any

from canaryd.facts import Doubt
from canaryd.model import Reason

_PLACES = (
    (r"device", "device"),
    (r"core (\d+)", "core"),
    (r"cores (\d+) and (\d+)", "core"),
    (r"SM (\d+)", "sm"),
    (r"all (\d+) threads", "threads"),
    (r"two threads", "threads"),
    (r"one thread", "thread"),
)
_CLOCK = r"dated by the store: the clock said (\d+)"


def converted(data: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON object of a run in today's shape."""
    run = dict(data)
    environment = dict(run.get("environment", {}))
    if at := re.fullmatch(_CLOCK, environment.get("clock", "")):
        run["clock"] = float(at[1])
        del environment["clock"]
    run["environment"] = environment
    detail = run.get("detail", "")
    if detail.startswith("GPU is lost"):
        run["reason"] = Reason.DEVICE_LOST.value
    elif detail.startswith("stopped: "):
        run["reason"] = Reason.STOPPED.value
    run["comparisons"] = [_comparison(comparison) for comparison in run.get("comparisons", ())]
    return run


def _comparison(data: dict[str, Any]) -> dict[str, Any]:
    comparison = dict(data)
    place, evidence = comparison.get("place", ""), comparison.get("evidence")
    comparison["place"] = _place(place)
    pattern = evidence["pattern"] if evidence else ""
    subject = comparison.get("subject", "device")
    if subject == "comparator":
        comparison["doubt"] = Doubt.COMPARATOR.value
    elif subject == "host":
        digest = re.match(r"golden has digest (\w+)", pattern)
        if re.fullmatch(r"cores \d+ and \d+|core \d+ alone|two threads", place):
            doubt = Doubt.MADE_TWICE
        elif pattern.startswith("integer and float64 arithmetic"):
            doubt = Doubt.ARITHMETIC
        else:
            doubt = Doubt.DIGEST if digest else Doubt.UNKNOWN
        comparison["doubt"] = doubt.value
        if digest:
            comparison["digest"] = digest[1]
    if evidence:
        comparison["evidence"] = _evidence(evidence)
    return comparison


def _place(text: str) -> dict[str, Any]:
    if alone := re.fullmatch(r"core (\d+) alone", text):
        return {"unit": "core", "numbers": [int(alone[1])] * 2}
    for pattern, unit in _PLACES:
        if found := re.fullmatch(pattern, text):
            return {"unit": unit, "numbers": [int(number) for number in found.groups()]}
    return {"unit": text, "numbers": []}


def _evidence(data: dict[str, Any]) -> dict[str, Any]:
    evidence = dict(data)
    told = evidence.pop("reproduced", "")
    if found := re.match(r"(\d+) of (\d+) fresh uploads wrong(?:, (\d+) with the same bits)?", told):
        wrong, repeats, alike = found.groups()
        evidence |= {"repeats": int(repeats), "repeats_wrong": int(wrong)}
        evidence["repeats_alike"] = None if alike is None else int(alike)
    spans = {axis: _span(text) for axis, text in evidence.get("lines", {}).items()}
    evidence["lines"] = {axis: span for axis, span in spans.items() if span is not None}
    return evidence


def _span(text: str) -> dict[str, int] | None:
    if found := re.fullmatch(r"(\d+)", text):
        return {"first": int(found[1]), "last": int(found[1]), "distinct": 1}
    if found := re.fullmatch(r"= (\d+) mod (\d+)", text):  # how many there were was not kept
        return {"first": int(found[1]), "last": int(found[1]), "distinct": 0, "period": int(found[2])}
    if found := re.fullmatch(r"(\d+)…(\d+) \((\d+) distinct\)", text):
        return {"first": int(found[1]), "last": int(found[2]), "distinct": int(found[3])}
    return None
