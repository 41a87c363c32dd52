"""Measure which single-bit faults change a logit of the exact canary, by operator, format and bit.

One bit of one element is flipped in an activation, in a weight that is not 0, or in an entry of the KV cache. The
inference is one pass over a prompt and its continuation; all its logits are compared bit for bit. Elements are drawn
evenly. A second figure says how many of these faults an endpoint's log probabilities show (float32, eight candidates).
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from canaryd_lab.worker.exact_canary.construct import construct
from canaryd_lab.worker.exact_canary.export import right_answer
from canaryd_lab.worker.exact_canary.prove import Walk

from benchmarks.common import become_worker, machine, options, table, write
from canaryd.worker.endpoint.answers import Answer, Position
from canaryd.worker.endpoint.marking import mark
from canaryd.worker.exact_canary.cases import text
from canaryd.worker.exact_canary.expected import Expected, Question
from canaryd.worker.exact_canary.golden import codes
from canaryd.worker.exact_canary.run import Runner, Watch
from canaryd.worker.exact_canary.shape import TINY
from canaryd.worker.exact_canary.shipped import Model
from canaryd.worker.numeric.tensors import FORMATS, bits, strict_switches, torch

MANTISSA = {"float64": 52, "float32": 23, "bfloat16": 7, "float16": 10}
ROWS = 32
"""Number of faults in activations that are tried at once, one in each row of a batch."""
GOALS = {
    "all weights": 0.95,
    **dict.fromkeys(
        (
            "attention_norm",
            "inner_norm",
            "norm",
            "output",
            "down",
            "middle",
            "out",
            "keys, read later",
            "values, read later",
        ),
        0.90,
    ),
}
"""Place → fraction of its faults that the construction of the model must make visible."""


@dataclass
class Count:
    """Numbers of faults tried and seen, by bit; `other`: number of faults that a second measure saw, over all bits."""

    tried: dict[int, int] = field(default_factory=dict)
    seen: dict[int, int] = field(default_factory=dict)
    other: int = 0

    def add(self, bit: int, seen: bool) -> None:
        """Count one fault."""
        self.tried[bit] = self.tried.get(bit, 0) + 1
        self.seen[bit] = self.seen.get(bit, 0) + seen

    def share(self, chosen: range | None = None) -> float | None:
        """Return the fraction of faults that were seen, in the `chosen` bits or in all; None if none was tried."""
        wanted = [bit for bit in self.tried if chosen is None or bit in chosen]
        tried = sum(self.tried[bit] for bit in wanted)
        return sum(self.seen[bit] for bit in wanted) / tried if tried else None


def flip(flat: Any, index: int, bit: int) -> None:
    """Flip one bit of one element of a one-dimensional tensor of raw bits."""
    width = flat.element_size() * 8
    mask = -(1 << bit) if bit == width - 1 else 1 << bit
    flat[index] ^= mask


def activations(
    model: Model,
    form: str,
    whole: list[int],
    count: int,
    places: Sequence[str] = (),
    shows: Callable[[Any], list[bool]] = lambda _: [],
) -> Iterator[tuple[str, Count]]:
    """Yield (place, `Count` of about `count` faults) for each place that rounds a result, over layers and positions.

    Elements that are 0 count as well, except under "…, not 0" and "…, read later".
    """
    weights = {name: w.to(getattr(torch, form)) for name, w in model.weights.items()}
    tokens, read = torch.tensor([whole]), read_later(model, whole)

    def inference(watch: Watch) -> Any:
        return Runner(model.shape, weights, watch=watch).forward(tokens.expand(min(count, ROWS), -1))

    def others(name: str) -> list[tuple[str, Any]]:
        found = [(", not 0", True)] if name in ("query", "scores", "mixed", "active") else []
        return found + ([(", read later", read[None, None, :, None])] if name in ("keys", "values") else [])

    yield from strikes(inference, count, others, shows, places)


def strikes(
    inference: Callable[[Watch], Any],
    count: int,
    others: Callable[[str], list[tuple[str, Any]]],
    shows: Callable[[Any], list[bool]],
    places: Sequence[str],
) -> Iterator[tuple[str, Count]]:
    """Yield (place, `Count` of about `count` faults) for each of `places` (empty: all), with equal rows.

    The faults strike all elements, and separately the nonzero elements that `others` selects for a place: (suffix of
    the place's name, mask). `shows` returns for each row of logits whether the second measure sees the fault.
    """
    draw, names = random.Random(0), []

    def note(name: str, tensor: Any) -> Any:
        names.append(name)
        return tensor

    good = inference(note)
    counts: dict[str, Count] = {}
    for name in names:
        place = name.rpartition(".")[2]
        if name == "logits" or (places and place not in places):
            continue
        alike = sum(each.rpartition(".")[2] == place for each in names)
        for suffix, among in (("", None), *others(place)):
            for _ in range(max(1, count // ROWS // alike)):
                where: list[int] = []
                logits = inference(_striking(name, where, draw, among))
                wrong = (bits(logits) != bits(good)).flatten(1).any(1).tolist()
                found = counts.setdefault(place + suffix, Count())
                found.other += sum(shows(logits))
                for bit, seen in zip(where, wrong, strict=True):
                    found.add(bit, seen)
    yield from counts.items()


def _striking(name: str, where: list[int], draw: random.Random, among: Any) -> Watch:
    """Return a watch that flips one random bit in each row of the tensor `name`, and appends the bits to `where`.

    `among` is None for all elements, or a mask; then only elements of the mask that are not 0 are struck.
    """

    def strike(seen: str, tensor: Any) -> Any:
        if seen != name:
            return tensor
        tensor = tensor.clone(memory_format=torch.contiguous_format)
        raw = bits(tensor).view(len(tensor), -1)
        live = torch.ones_like(tensor[:1], dtype=torch.bool) if among is None else (tensor[:1] != 0) & among
        some = live.view(-1).nonzero().view(-1).tolist()
        for row in raw:
            where.append(draw.randrange(raw.element_size() * 8))
            flip(row, some[draw.randrange(len(some))], where[-1])
        return tensor

    return strike


def read_later(model: Model, whole: list[int]) -> Any:
    """Return a mask of a text's positions: whether a generated word reads the position. None reads the last few."""
    program = model.program
    places = [word // program.values for word in whole]
    looked = {place - lag for place in range(program.prompt, max(places[1:]) + 1) for lag in program.lags}
    return torch.tensor([place in looked or word == program.anchor for word, place in zip(whole, places, strict=True)])


# --- What others see -------------------------------------------------------------------------------------------------


def printed(model: Model, whole: list[int]) -> Callable[[Any], list[bool]]:
    """Return a function of logits: for each row, whether an engine's words and log probabilities show a fault.

    The engine prints float32 log probabilities of eight candidates.
    """
    program = model.program
    words = whole[: program.prompt + program.anchored]
    count = len(whole) - len(words) + 1
    golden = Walk(model.shape, model.weights).prove(whole).logits[-count:]
    right = right_answer(program, model.shape, words, count, golden.tolist())
    question = Question(number=1, text="", prompt=words, tokens=right.tokens, chances=right.log_probabilities)
    expected = Expected(
        directory=Path(),
        shape=model.shape,
        program=program,
        seed=model.seed,
        weights="",
        questions=(question,),
        codes=codes(program, model.seed),
    )

    def shows(logits: Any) -> list[bool]:
        chances = torch.log_softmax(logits[:, -count:].to(torch.float32), -1)
        return [not mark(expected, question, _as_printed(row)).right for row in chances]

    return shows


def _as_printed(chances: Any) -> Answer:
    values, tokens = chances.topk(8, -1)
    chosen = chances.argmax(-1).tolist()
    positions = tuple(
        Position(token=str(token), value=float(row[token]), top=tuple(zip(map(str, best), some, strict=True)))
        for token, row, best, some in zip(chosen, chances, tokens.tolist(), values.tolist(), strict=True)
    )
    return Answer(text="", positions=positions, scored=True)


def live_weights(model: Model, form: str, whole: list[int], count: int, seed: int = 0) -> Iterator[tuple[str, Count]]:
    """Yield (kind of weight, `Count` of about `count` faults in nonzero weights); the last kind is "all weights".

    In the embedding only rows of words that occur are struck. "all weights" weighs each kind by its number of weights.
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
    """Return a row of the report for one place and format."""
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


def printed_share(place: str, form: str, found: Count) -> list[object]:
    """Return a row of the report: share of faults that change a logit, and share that an endpoint's output shows."""
    shares = found.share() or 0.0, found.other / sum(found.tried.values())
    return [place, form, *(f"{100 * share:.1f} %" for share in shares)]


def main() -> int:
    """Measure and write the report; return the exit status."""
    parser = options(__doc__)
    parser.add_argument("--faults", type=int, default=960, help="faults per place and format (default: %(default)s)")
    parser.add_argument("--formats", nargs="+", default=list(MANTISSA), choices=list(MANTISSA))
    parser.add_argument("--places", nargs="+", default=[], help="these activations alone, into a result of their own")
    parser.add_argument("--seed", type=int, default=7)
    words = parser.parse_args()
    model = construct(TINY, words.seed)
    whole = text(model, words.seed, 0, model.program.steps)
    faults, beside = [], []
    with strict_switches(), torch.inference_mode():
        for form in words.formats:
            found = list(activations(model, form, whole, words.faults, words.places, printed(model, whole)))
            beside += [printed_share(place, form, count) for place, count in found]
            if not words.places:
                found += live_weights(model, form, whole, words.faults // 4)
            faults += [row(place, form, count) for place, count in found]
            print(form, *faults[-len(found) :], sep="\n", file=sys.stderr)
    body = "".join(
        f"\n## {title}\n\n{table(heads, lines)}"
        for title, heads, lines in (
            (
                "Share of faults that change a logit",
                ("place", "format", "all bits", "low mantissa", "high mantissa", "exponent", "sign", "goal"),
                faults,
            ),
            (
                "Beside what an endpoint prints (all bits, all elements)",
                ("place", "format", "all logits", "printed"),
                beside,
            ),
        )
        if lines
    )
    title = "Which single-bit faults change a logit of the exact canary"
    name = "-".join(("observability", *words.places))
    data = {"faults": faults, "beside": beside, "seed": words.seed}
    write(Path(words.out), name, title, machine(), f"{model.shape}\n{body}", data)
    return 0


if __name__ == "__main__":
    become_worker()
    sys.exit(main())
