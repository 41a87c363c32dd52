"""Measure which single-bit faults `canaryd capture --exact` locates on one device: layer, operator, element and bit.

While the exact canary runs, one bit of one element of one operator's result is flipped once. If this changes no value
(the sign of a 0), another fault is drawn. Operators are drawn evenly, then layer, pass, element and bit. A fault is
named if the first fault in the answer has the same layer, operator, pass, element and bit. Before that, models of other
seeds run without a fault: a value that is called wrong there is a false alarm.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from canaryd_lab.worker.canary.capture import Recorder
from canaryd_lab.worker.exact_canary.capture import Ran, Session, every, inferences
from canaryd_lab.worker.exact_canary.truth import Truth, truth

from benchmarks.common import become_worker, machine, options, table, write
from benchmarks.observability import flip
from canaryd.worker.exact_canary.cases import Inference
from canaryd.worker.numeric import stack
from canaryd.worker.numeric.tensors import bits, strict_switches, torch

FORMATS = ("float64", "float32", "bfloat16", "float16")
KERNELS = ("eager", "flash_attention", "math")
GOAL = 0.95
"""Wanted fraction of faults that are named."""


@dataclass
class Strike:
    """A fault that flips one bit of one element of an operator's result, in the pass number `turn`."""

    name: str
    """Name of the tensor in the capture: "exact/3/2/down"."""
    element: int
    """Index of the element in the order of the tensor's memory."""
    bit: int
    changed: bool = False
    """Whether the flip changed the value; a changed sign of a 0 does not count."""
    index: tuple[int, ...] = ()
    _met: int = 0

    @property
    def place(self) -> str:
        """Name of the operator and layer as `run` uses it, e.g. "2.down"."""
        _, _, layer, operator = self.name.split("/")
        return operator if layer in ("input", "head") else f"{layer}.{operator}"

    @property
    def turn(self) -> int:
        """Number of earlier results of this operator in the run; for decoding, the prefill's result is number 0."""
        step = self.name.split("/")[1]
        return 0 if step == "forced" else int(step)

    def __call__(self, name: str, tensor: Any) -> Any:
        """Return the tensor with which the run continues: a copy with the flip if it is the chosen one."""
        if name != self.place:
            return tensor
        self._met += 1
        if self._met != self.turn + 1:
            return tensor
        copy = tensor.clone(memory_format=torch.contiguous_format)
        self.index = tuple(int(i) for i in torch.unravel_index(torch.tensor(self.element), copy.shape))
        before = copy[self.index].item()
        flip(bits(copy).view(-1), self.element, self.bit)
        self.changed = before != copy[self.index].item()
        return copy

    def outcome(self, ran: Ran) -> str:
        """Return "named", "another place named" or "not seen", according to the result of a run with this fault."""
        if ran.fault is None:
            return "not seen"
        place, (index, *_) = ran.fault.place, ran.fault.evidence.first[0]
        named = self.name.split("/")[1:] == [place.step, place.layer, place.operator]
        exact = named and index == self.index and ran.fault.bits == (self.bit,)
        return "named" if exact else "another place named"


def draw(kept: dict[str, Any], chance: random.Random) -> Strike:
    """Return a random fault in one of the tensors of a capture; all operators are equally likely."""
    by_operator: dict[str, list[str]] = {}
    for name in kept:
        if name.count("/") == 3:
            by_operator.setdefault(name.rpartition("/")[2], []).append(name)
    name = chance.choice(by_operator[chance.choice(sorted(by_operator))])
    tensor = kept[name]
    return Strike(name, chance.randrange(tensor.numel()), chance.randrange(tensor.element_size() * 8))


def strikes(
    session: Session, inference: Inference, known: Truth, count: int, chance: random.Random
) -> list[tuple[Strike, Ran]]:
    """Run an inference with `count` random faults, one at a time; return (fault, result of its run) for each."""
    weights = {name: w.to(getattr(torch, inference.form)) for name, w in known.model.weights.items()}
    session.strike, recorder = None, Recorder(operators=True)
    assert session.once(inference, known, weights, recorder).fault is None
    found: list[tuple[Strike, Ran]] = []
    while len(found) < count:
        session.strike = strike = draw(recorder.kept, chance)
        ran = session.run(inference, known, weights)
        if strike.changed:
            found.append((strike, ran))
    return found


def false_alarms(session: Session, forms: tuple[str, ...], seeds: range) -> tuple[int, int]:
    """Run whole captures without a fault; return (number of compared values, number of values called wrong)."""
    values = wrong = 0
    for seed in seeds:
        for ran in every(session, forms, seed, lambda *_: None):
            if isinstance(ran, Ran):
                values, wrong = values + ran.values, wrong + ran.wrong
        print(f"seed {seed}: {wrong} false alarms in {values:,} values", file=sys.stderr)
    return values, wrong


def main() -> int:
    """Measure and write the report; return 0 if the goal is reached without a false alarm, else 1."""
    parser = options(__doc__)
    parser.add_argument("--faults", type=int, default=100, help="per format, path and kernel (default: %(default)s)")
    parser.add_argument("--clean", type=int, default=20, help="captures without a fault (default: %(default)s)")
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=FORMATS)
    parser.add_argument("--seed", type=int, default=7)
    words = parser.parse_args()
    chance = random.Random(words.seed)
    tried: Counter[tuple[str, str, str]] = Counter()
    told: Counter[str] = Counter()
    session, missed = Session(stack.cpu()), []
    todo = [i for i in inferences(stack.cpu(), tuple(words.formats)) if i.kernel in KERNELS]
    with strict_switches():
        values, alarms = false_alarms(session, tuple(words.formats), range(words.clean))
        known = {
            (i.shape, i.anchored): truth(words.seed, i.steps, anchored=i.anchored, shape=i.shape)
            for i in {(i.shape, i.anchored): i for i in todo}.values()
        }
        for inference in todo:
            for strike, ran in strikes(
                session, inference, known[inference.shape, inference.anchored], words.faults, chance
            ):
                outcome = strike.outcome(ran)
                tried[inference.form, strike.name.rpartition("/")[2], outcome] += 1
                told[ran.again] += 1
                if outcome != "named":
                    missed.append(f"{inference.name} {strike.name} {strike.index} bit {strike.bit}: {outcome}")
            print(inference.name, f"{len(missed)} of {tried.total()} not named", file=sys.stderr)
    rows = [_row(form, "all", tried) for form in ("all", *words.formats)]
    rows += [_row("all", operator, tried) for operator in dict.fromkeys(key[1] for key in sorted(tried))]
    share = 1 - len(missed) / tried.total()
    again = f"A second run without the fault was right in {told['right']:,} of {tried.total() - told['']:,} cases."
    quiet = f"False alarms: {alarms} in {values:,} values of {words.clean} captures without a fault."
    goal = f"Named: {share:.1%}. Goal {GOAL:.0%}: {'reached' if share >= GOAL else 'missed'}."
    head = ("format", "operator", "faults", "named", "another place named", "not seen", "share named")
    title = "Which single-bit faults `canaryd capture --exact` names"
    body = f"{(__doc__ or '').partition(chr(10))[2].strip()}\n\n{goal}\n{again}\n{quiet}\n\n{table(head, rows)}"
    counts = [[*key, number] for key, number in sorted(tried.items())]
    data = {"seed": words.seed, "counts": counts, "not_named": missed}
    data |= {"clean": words.clean, "values": values, "false_alarms": alarms}
    write(Path(words.out), "exact_capture", title, machine(), body, data)
    return 0 if share >= GOAL and not alarms else 1


def _row(form: str, operator: str, tried: Counter[tuple[str, str, str]]) -> list[object]:
    """Return a row of the report; "all" stands for the sum over formats or operators."""
    counts: Counter[str] = Counter()
    for (one, other, outcome), number in tried.items():
        if form in ("all", one) and operator in ("all", other):
            counts[outcome] += number
    number = sum(counts.values())
    shares = [counts[name] for name in ("named", "another place named", "not seen")]
    return [form, operator, number, *shares, f"{shares[0] / number:.1%}"]


if __name__ == "__main__":
    become_worker()
    sys.exit(main())
