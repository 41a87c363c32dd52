"""Captures for tests: those of the exact canary, which need no model of the user's."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from canaryd_lab.worker.canary.capture import HIDDEN, Capture, Recorder, environment, read, write
from canaryd_lab.worker.exact_canary.capture import MODEL, Session
from canaryd_lab.worker.exact_canary.truth import Truth, truth

from canaryd.codec import to_json
from canaryd.worker.exact_canary.cases import EAGER, Inference
from canaryd.worker.numeric.stack import cpu
from canaryd.worker.numeric.tensors import torch

STEPS = 6
"""Words that are generated."""


@functools.lru_cache(maxsize=2)
def known(seed: int) -> Truth:
    """Return the truth that a capture of this seed is compared with."""
    return truth(seed, STEPS, anchored=True)


def exact(
    path: Path,
    dtype: str = "float32",
    *,
    forced: bool = True,
    operators: bool = True,
    drill: str = "",
    seed: int = 3,
) -> Capture:
    """Return a capture of the exact canary on this processor, read from its file at `path`."""
    session, recorder = Session(cpu()), Recorder(operators=True, drill=drill)
    inference = Inference(dtype, "forced" if forced else "decode", 1, EAGER, STEPS)
    with session.runtime.strict(session.device) as switches:
        weights: dict[str, Any] = {n: w.to(getattr(torch, dtype)) for n, w in known(seed).model.weights.items()}
        session.once(inference, known(seed), weights, recorder)
    if not operators:
        recorder.operators = False
        recorder.kept = {n: t for n, t in recorder.kept.items() if n.count("/") == 1 or n.rpartition("/")[2] in HIDDEN}
    texts = {
        "device": json.dumps(to_json(session.device)),
        "environment": json.dumps(environment(session.device, switches)),
        "dtype": dtype,
        "model": f"{MODEL}, attention eager",
        "digest": f"seed {seed}",
        "prompts": json.dumps(["exact"]),
        "path": "forced" if forced else "decode",
    }
    write(path, recorder, texts)
    return read(path)
