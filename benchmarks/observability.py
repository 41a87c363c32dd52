"""Which single-bit faults change a logit of the exact canary, by operator, format and bit.

One bit of one element is flipped in an activation, a weight that is not 0, or an entry of the KV cache; the inference
is one pass over a prompt and its continuation, and all its logits are compared bit for bit. Elements are drawn evenly.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common import become_worker, machine, options, table, write
from canaryd.worker.exact_canary.cases import text
from canaryd.worker.exact_canary.construct import Model, construct
from canaryd.worker.exact_canary.run import Runner
from canaryd.worker.exact_canary.shape import TINY, Shape
from canaryd.worker.numeric.tensors import FORMATS, bits, strict_switches, torch

MANTISSA = {"float64": 52, "float32": 23, "bfloat16": 7, "float16": 10}
ROWS = 32
"""Faults in activations tried at once, one in each row of a batch."""
GOALS = {
    "all weights": 0.95,
    **dict.fromkeys(("attention_norm", "inner_norm", "norm", "output", "down", "middle", "out", "values"), 0.90),
}
"""Share that the construction is to reach, by place."""


@dataclass
class Count:
    """Faults tried and seen, by bit."""

    tried: dict[int, int] = field(default_factory=dict)
    seen: dict[int, int] = field(default_factory=dict)

    def add(self, bit: int, seen: bool) -> None:
        """Count one fault."""
        self.tried[bit] = self.tried.get(bit, 0) + 1
        self.seen[bit] = self.seen.get(bit, 0) + seen

    def share(self, chosen: range | None = None) -> float | None:
        """Return the share that was seen, of these bits or of all; None where none was tried."""
        wanted = [bit for bit in self.tried if chosen is None or bit in chosen]
        tried = sum(self.tried[bit] for bit in wanted)
        return sum(self.seen[bit] for bit in wanted) / tried if tried else None


def flip(flat: Any, index: int, bit: int) -> None:
    """Flip one bit of one element of a one-dimensional tensor of raw bits."""
    width = flat.element_size() * 8
    mask = -(1 << bit) if bit == width - 1 else 1 << bit
    flat[index] ^= mask


def activations(model: Model, form: str, whole: list[int], count: int, seed: int = 0) -> Iterator[tuple[str, Count]]:
    """Yield what was seen of about `count` faults at each place where a result is rounded, over layers and positions.

    Elements that are 0 count as well, except in "keys, not 0".
    """
    draw = random.Random(seed)
    weights = {name: w.to(getattr(torch, form)) for name, w in model.weights.items()}
    tokens, names, good = torch.tensor([whole]), [], None

    def note(name: str, tensor: Any) -> Any:
        names.append(name)
        return tensor

    good = Runner(model.shape, weights, watch=note).forward(tokens)
    counts: dict[str, Count] = {}
    for name in names:
        if name == "logits":
            continue
        place = name.rpartition(".")[2]
        for label, live in ((place, False), (f"{place}, not 0", True)):
            if live and place not in ("keys", "query", "scores", "mixed", "active"):
                continue
            for _ in range(max(1, count // ROWS // (1 if name == place else model.shape.layers))):
                where: list[int] = []
                runner = Runner(model.shape, weights, watch=_striking(name, where, draw, live=live))
                logits = runner.forward(tokens.expand(ROWS, -1))
                wrong = (bits(logits) != bits(good)).flatten(1).any(1).tolist()
                for bit, seen in zip(where, wrong, strict=True):
                    counts.setdefault(label, Count()).add(bit, seen)
    yield from counts.items()


def _striking(name: str, where: list[int], draw: random.Random, *, live: bool) -> Callable[[str, Any], Any]:
    """Return a watch that flips one random bit in each row of the tensor called `name`, and notes which bits."""

    def strike(seen: str, tensor: Any) -> Any:
        if seen != name:
            return tensor
        tensor = tensor.clone(memory_format=torch.contiguous_format)
        raw = bits(tensor).view(len(tensor), -1)
        some = (tensor.view(len(tensor), -1)[0] != 0).nonzero().view(-1).tolist() if live else range(raw.shape[1])
        for row in raw:
            where.append(draw.randrange(raw.element_size() * 8))
            flip(row, some[draw.randrange(len(some))], where[-1])
        return tensor

    return strike


def live_weights(model: Model, form: str, whole: list[int], count: int, seed: int = 0) -> Iterator[tuple[str, Count]]:
    """Yield what was seen of about `count` faults in each kind of weight that is not 0; and of all, by their number.

    Of the embedding only rows of words that occur are live.
    """
    draw = random.Random(seed)
    weights = {name: w.to(getattr(torch, form)) for name, w in model.weights.items()}
    tokens, runner = torch.tensor([whole]), Runner(model.shape, weights)
    good = runner.forward(tokens)
    counts: dict[str, Count] = {}
    numbers: dict[str, int] = {}
    for name, weight in weights.items():
        live = weight != 0
        if "embed" in name:
            live &= torch.zeros(len(weight), 1, dtype=torch.bool).index_fill_(0, tokens[0], value=True)
        places, raw = live.view(-1).nonzero().view(-1), bits(weight).view(-1)
        kind = ".".join(name.split(".")[-2:])
        numbers[kind] = numbers.get(kind, 0) + len(places)
        for _ in range(max(1, count // (model.shape.layers if "layers" in name else 1))):
            index, bit = int(places[draw.randrange(len(places))]), draw.randrange(raw.element_size() * 8)
            flip(raw, index, bit)
            wrong = not torch.equal(bits(runner.forward(tokens)), bits(good))
            flip(raw, index, bit)
            counts.setdefault(kind, Count()).add(bit, wrong)
    yield from counts.items()
    total = Count()
    for kind, found in counts.items():  # weighted: a fault strikes a matrix as often as it is large
        share = round(1000 * numbers[kind] / sum(numbers.values()))
        for bit, tried in found.tried.items():
            each = share / sum(found.tried.values())
            total.tried[bit] = total.tried.get(bit, 0) + each * tried  # type: ignore[assignment]
            total.seen[bit] = total.seen.get(bit, 0) + each * found.seen[bit]  # type: ignore[assignment]
    yield "all weights", total


def row(place: str, form: str, found: Count) -> list[object]:
    """Return a line of the report."""
    mantissa, width = MANTISSA[form], FORMATS[form].dtype.itemsize * 8
    parts = (
        None,
        range(mantissa // 2),
        range(mantissa // 2, mantissa),
        range(mantissa, width - 1),
        range(width - 1, width),
    )
    shares = [found.share(part) for part in parts]
    goal = GOALS.get(place)
    reached = "" if goal is None else "reached" if (shares[0] or 0) >= goal else f"missed ({goal:.0%})"
    return [place, form, *("-" if s is None else f"{100 * s:.1f} %" for s in shares), reached]


def main() -> int:
    """Measure, print and write the report."""
    parser = options(__doc__)
    parser.add_argument("--faults", type=int, default=960, help="faults per place and format (default: %(default)s)")
    parser.add_argument("--formats", nargs="+", default=list(MANTISSA), choices=list(MANTISSA))
    parser.add_argument("--seed", type=int, default=7)
    words = parser.parse_args()
    shape: Shape = TINY
    model = construct(shape, words.seed)
    whole = text(model, words.seed, 0, model.program.steps)
    rows, data = [], []
    with strict_switches(), torch.inference_mode():
        for form in words.formats:
            found = [
                *activations(model, form, whole, words.faults),
                *live_weights(model, form, whole, words.faults // 4),
            ]
            for place, count in found:
                rows.append(row(place, form, count))
                data.append({"place": place, "format": form, "tried": count.tried, "seen": count.seen})
                print(*rows[-1], file=sys.stderr)
    head = ("place", "format", "all bits", "low mantissa", "high mantissa", "exponent", "sign", "goal")
    body = f"{model.shape}\n\n{table(head, rows)}"
    title = "Which single-bit faults change a logit of the exact canary"
    write(Path(words.out), "observability", title, machine(), body, {"rows": data, "seed": words.seed})
    return 0


if __name__ == "__main__":
    become_worker()
    sys.exit(main())
