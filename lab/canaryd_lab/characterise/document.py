"""The characterisation as one JSON document, the only source of the page."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from canaryd import __version__
from canaryd.codec import to_json
from canaryd.model import Device
from canaryd_lab.characterise.results import Part, Result, Status
from canaryd_lab.observation import Claim, Seen

SCHEMA = "canaryd.characterise/1"
Document = Mapping[str, Any]
STACK_NAMES = ("torch", "mlx", "onnxruntime", "jax", "cuda", "driver")
"""Components of a stack that appear in the file's name."""


def stack_name(stack: Mapping[str, str]) -> str:
    """Return a short name of a stack, such as "torch2.9.1+cu128-cuda12.8-driver570.86"."""
    return "-".join(f"{name}{stack[name]}" for name in STACK_NAMES if stack.get(name)) or "no-runtime"


def document(device: Device, results: Sequence[Result], left: Sequence[Part], *, drill: str) -> Document:
    """Return all results as JSON data; `left` are the parts without a result, `drill` the injected fault or ""."""
    environment = next((r.facts for r in results if r.name == "environment"), {})
    statuses = Counter(r.status for r in results)
    return {
        "schema": SCHEMA,
        "canaryd": __version__,
        "generated": time.time(),
        "drill": drill,
        "device": to_json(device),
        "stack": environment.get("stack", {}),
        "verdict": verdict(results, left),
        "statuses": {status.value: statuses[status] for status in Status if statuses[status]},
        "strict": {seen.value: sum(r.count(Claim.STRICT, seen) for r in results) for seen in Seen},
        "controls": {
            "failed_as_they_must": sum(r.count(Claim.CONTROL, Seen.WRONG) for r in results),
            "did_not_fail": sum(r.count(Claim.CONTROL, Seen.RIGHT, Seen.RAISED) for r in results),
        },
        "left": [{"name": p.name, "title": p.title, "seconds": p.seconds} for p in left],
        "parts": [
            {**to_json(r), "status": r.status.value, "counts": _counts(r)}
            for r in sorted(results, key=lambda r: (r.rank, r.name))
        ],
    }


def verdict(results: Sequence[Result], left: Sequence[Part]) -> str:
    """Return the worst verdict: "invalid", "wrong", "unclassified", "failed", "incomplete" (parts left) or "right"."""
    worst = {r.status for r in results}
    for status in (Status.INVALID, Status.WRONG, Status.UNCLASSIFIED, Status.FAILED):
        if status in worst:
            return str(status.value)
    controls = sum(r.count(Claim.CONTROL, Seen.WRONG) for r in results)
    return "incomplete" if left or not controls else "right"


def _counts(result: Result) -> dict[str, dict[str, int]]:
    return {
        claim.value: {seen.value: n for seen in Seen if (n := result.count(claim, seen))}
        for claim in Claim
        if result.count(claim, *Seen)
    }


def text(made: Document) -> str:
    """Return the document as the text that is written to its file."""
    return f"{json.dumps(made, indent=1)}\n"
