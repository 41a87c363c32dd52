"""Make and prove the exact canaries that canaryd ships; the proofs and canaryd's own `logits` must agree.

`python -m canaryd_lab.worker.exact_canary.ship probes/exact_models` takes minutes.
"""

from __future__ import annotations

import hashlib
import json
import sys
import zlib
from pathlib import Path
from typing import Any

from canaryd.worker.exact_canary.cases import text
from canaryd.worker.exact_canary.shape import EXPERTS, TINY, Shape
from canaryd.worker.exact_canary.shipped import INDEX, UNUSED, Shipped, logits
from canaryd.worker.numeric.integers import digest
from canaryd.worker.numeric.operands import Inexact
from canaryd.worker.numeric.tensors import need_torch, torch
from canaryd_lab.worker.exact_canary.construct import construct
from canaryd_lab.worker.exact_canary.prove import Walk
from canaryd_lab.worker.safetensors import write_safetensors

KINDS = ((TINY, True, 5), (TINY, False, 2), (EXPERTS, True, 3))
"""(sizes, whether there is an anchor, number of models) of each kind that is shipped."""
PROMPTS = 32
"""Number of proved prompts per model."""


def ship(directory: Path) -> None:
    """Write every model and the index into a directory."""
    entries, seed = [], 0
    for shape, anchored, count in KINDS:
        for _ in range(count):
            seed += 1
            data = zlib.compress(made(shape, seed, anchored=anchored), 9)
            name = f"{shape.family}-{seed}.zlib"
            (directory / name).write_bytes(data)
            found = hashlib.sha256(data).hexdigest()
            entries.append({"file": name, "experts": shape.experts, "anchored": anchored, "sha256": found})
    (directory / INDEX).write_text(json.dumps(entries, indent=1) + "\n")


def made(shape: Shape, seed: int, *, anchored: bool, prompts: int = PROMPTS) -> bytes:
    """Return the bytes of a model's file, with its proved prompts; raise `Inexact` if some format would round."""
    model = construct(shape, seed, anchored=anchored)
    program, walk = model.program, Walk(shape, model.weights)
    unused = torch.zeros(program.places + 1, shape.vocabulary - program.words, dtype=torch.bfloat16)
    proved: list[tuple[int, list[int], Any]] = []
    for number in range(1, prompts + 1):
        words = text(model, number, 0, program.steps)
        proof = walk.prove(words)
        if not proof.witnessed:
            raise Inexact("integer and float64 arithmetic of this host disagree")
        for word, row in zip(words, proof.logits, strict=True):
            unused[-1 if word == program.anchor else word // program.values] = row[program.words :]
        proved.append((number, words, proof.logits))
    sums = max(operator.sums for operator in walk.operators.values())
    shipped = Shipped(model, unused, (), sums)
    for number, words, right in proved:
        if not torch.equal(logits(shipped, words, program.steps), right):
            raise Inexact(f"prompt {number} of model {seed}: the program and the proof disagree")
    texts = {
        "seed": str(seed),
        "sums": str(sums),
        "prompts": json.dumps([[number, digest(right.to(torch.bfloat16))] for number, _, right in proved]),
    }
    return write_safetensors({**model.weights, UNUSED: unused}, texts)


if __name__ == "__main__":
    need_torch()
    torch.set_num_threads(1)
    ship(Path(sys.argv[1]))
