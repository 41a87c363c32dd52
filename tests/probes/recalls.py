"""Records what a file tells it to: cases with tokens and values, on a chain."""

import json
from pathlib import Path

from canaryd.probe import ProbeSpec, Reading, Recording

SPEC = ProbeSpec(
    name="recalls",
    summary="Records what a file says",
    backends=("cpu", "endpoint"),
    numeric=False,
    period=1.0,
    budget={"quick": 0.1, "standard": 0.1, "deep": 0.1},
)


def run(ctx):
    said = json.loads(Path(ctx.settings["file"]).read_text())
    yield Reading(name="baselining", value=ctx.baselining)
    for case, vectors in said["cases"].items():
        if ctx.cases and case not in ctx.cases:
            continue
        for number in range(said.get("repeat", 30) if ctx.baselining else 1):
            one = vectors[number % len(vectors)]
            values = tuple(one.get("values", ()))
            yield Recording(
                case=case,
                digest=one["digest"],
                chain=said.get("chain", {}),
                condition=one.get("condition", ""),
                tokens=tuple(one.get("tokens", "")),
                values=values,
                margins=tuple(one.get("margins", ())) or (1.0,) * len(values),
                text=one.get("text", ""),
            )
