"""Measure how soon an intermittent fault of one core is found and the core named: campaigns through the real judge.

In each campaign one of this machine's cores makes an error with probability p in each product in which it takes part.
Products are computed, gathered, compared and placed as in a check, and the judge gets each round as one run. A campaign
ends when the judge names the core, or after `PATIENCE` / p products of the core. Its first round has no fault.

For rates below `SIMULATED` the fault has a simulated clock: every computed product counts as many, so that a campaign
does not compute millions of clean products.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from canaryd.config.judge_policy import JudgePolicy
from canaryd.facts import Comparison, Place
from canaryd.judge.case import Case as Evidence
from canaryd.judge.incidents import incidents
from canaryd.judge.node import node
from canaryd.judge.verdict import decide
from canaryd.model import Outcome, Run, State, Verdict
from canaryd.probe import Context
from canaryd.worker.numeric.cases import Case
from canaryd.worker.numeric.faults import flip
from canaryd.worker.numeric.operands import Product, build
from canaryd.worker.numeric.seeds import derive
from canaryd.worker.numeric.session import Session
from canaryd.worker.numeric.stack import cpu
from canaryd.worker.numeric.tensors import FORMATS, flat_bits, visible_cores
from canaryd.worker.numeric.verify import verify_case
from canaryd.worker.runtime.interface import Operation
from tests.faulty_gathers import Faulty

RATES = (1e-1, 1e-2, 1e-3, 1e-4)
SIMULATED = 1e-3
"""Rate below which the clock of the fault is simulated."""
STANDS_FOR = 100
PATIENCE = 40
"""Number of products of the core, in units of 1/p, after which a campaign ends without naming it."""
FORMS = ("float32", "bfloat16", "float16", "float64")
"""Number formats of the cases in a round."""
SIZE = 32, 32, 64
START, PERIOD = 1_700_000_000.0, 3600.0
NEVER = 1e-18
"""The rate of a round without the fault."""


class OneCore(Faulty):
    """A runtime in which products with one chosen core are wrong at a rate: one bit of one element flips."""

    def __init__(self, choice: int, core: int, rate: float, stands_for: int = 1) -> None:
        """Prepare the fault. `rate`: probability per product, above 0, below 1; `stands_for`: weight of a product."""
        super().__init__(choice)
        self.core, self.rate, self.stands_for = core, rate, stands_for
        self.computed = 0
        """Products, on any core."""
        self.products = 0
        """Products in which the core took part, by the clock of the fault."""
        self.due = self._wait()
        """The number of the product that errs next."""

    def _wait(self) -> int:
        """Return a random number of products until the next error, from the geometric distribution."""
        self.choice = derive(self.choice, "wait")
        return max(1, math.ceil(math.log((self.choice + 1) / 2**63) / math.log1p(-self.rate)))

    def run(self, operation: Operation, operands: tuple[Any, ...], out: Any) -> Any:
        """Compute as `Runtime.run` does; make the result wrong if the fault is due."""
        done = super().run(operation, operands, out)
        if operation.name == "matmul":
            self.computed += 1
            if self.core in visible_cores():
                self.products += self.stands_for
                if self.products >= self.due:
                    self.struck += 1
                    self.due = self.products + self._wait()
                    flip(flat_bits(done), self.choice)
        return done


@dataclass
class Campaigns:
    """The results of all campaigns at one rate."""

    rate: float
    simulated: bool
    waits: list[int]
    """For each campaign, the number of products of the core up to the first wrong result that was found."""
    named_after: list[int]
    """For each campaign that named one core, the number of products of the core up to then."""
    wrongly_named: int = 0
    """Number of campaigns in which the judge named another core."""
    false_alarms: int = 0
    """Number of rounds without the fault after which the device was not healthy."""
    missed: int = 0
    """Number of wrong products that were not found."""
    products: int = 0
    """Number of computed products."""

    @property
    def limit(self) -> int:
        """Number of products within which 95 % of the campaigns must find the fault."""
        return math.ceil(3 / self.rate)

    @property
    def in_time(self) -> float:
        """Fraction of the campaigns that found the fault within the limit."""
        return sum(wait <= self.limit for wait in self.waits) / len(self.waits)

    def to_json(self) -> dict[str, Any]:
        """Return the results as JSON data."""
        return {**asdict(self), "limit": self.limit, "in_time": self.in_time}


def _case(runtime: OneCore, form: str) -> Case:
    M, N, K = SIZE
    spec = Product("dense", FORMATS[form], FORMATS[form], FORMATS[form].bits, M, N, K)
    name = f"{form}/dense/square/nn@{M}x{N}x{K}"
    return Case(name, partial(build, spec), partial(runtime.run, Operation("matmul", form, form)), product=spec)


def _round(runtime: OneCore, seed: int, results: int) -> tuple[Comparison, ...]:
    """Return the comparisons of one round: a case of each format, each with about `results` products."""
    clock = partial(getattr, runtime, "computed")
    session = Session(Context(device=cpu(), level="quick", seed=seed, budget=float(results), clock=clock))
    session.runtime = runtime
    found = (verify_case(session, _case(runtime, form), float(results)) for form in FORMS)
    return tuple(fact for fact in itertools.chain.from_iterable(found) if isinstance(fact, Comparison))


def _run(number: int, seed: int, comparisons: tuple[Comparison, ...]) -> Run:
    return Run(
        id=f"campaign-{number:06d}", device=cpu().uuid, probe="exact_matmul", probe_version=1, seconds=1.0,
        started=START + number * PERIOD, outcome=Outcome.COMPLETED, seed=seed, comparisons=comparisons,
        stack={"torch": "as here"},
    )  # fmt: skip


def _judge(runs: list[Run]) -> Verdict:
    device, now = cpu(), runs[-1].started + 60.0
    among = node({device.uuid: device}, {device.uuid: runs}, now)
    return decide(Evidence(device=device, node=among, wanted={"exact_matmul": PERIOD}, policy=JudgePolicy(), now=now))


def _named(verdict: Verdict) -> list[Place]:
    """Return the cores with wrong results, according to the verdict's first incident about wrong results."""
    told = [i.wrong for i in incidents(verdict) if i.wrong is not None]
    return [p.place for p in told[0].places if p.wrong] if told else []


def _campaign(into: Campaigns, seed: int) -> None:
    """Run one campaign and add its results to `into`."""
    cores = visible_cores()
    stands_for = STANDS_FOR if into.simulated else 1
    core = cores[seed % len(cores)]
    clean = OneCore(seed, core, NEVER)
    # A round brings about one wrong result; half of its cases run on all cores, half on one alone.
    results = max(2, round(1 / (into.rate * stands_for * len(FORMS))))
    runs = [_run(0, seed, _round(clean, derive(seed, "clean"), results))]
    into.false_alarms += _judge(runs).state is not State.HEALTHY
    into.products += clean.computed
    runtime, first = OneCore(derive(seed, "fault"), core, into.rate, stands_for), 0
    named: list[Place] = []
    while len(named) != 1 and runtime.products < PATIENCE / into.rate:
        before, due = runtime.struck, runtime.due
        number = len(runs)
        comparisons = _round(runtime, derive(seed, f"round {number}"), results)
        runs.append(_run(number, seed, comparisons))
        wrong = sum(c.wrong_trials for c in comparisons)
        into.missed += runtime.struck - before - wrong
        if not first and wrong:
            first = due
            into.waits.append(first)
        if wrong:
            named = _named(_judge(runs))
    into.products += runtime.computed
    if len(named) == 1:
        into.named_after.append(runtime.products)
        into.wrongly_named += named != [Place(unit="core", numbers=(core,))]


def run(campaigns: int, seed: int) -> list[Campaigns]:
    """Return the results of `campaigns` campaigns at each rate."""
    found = []
    for rate in RATES:
        into = Campaigns(rate, rate < SIMULATED, [], [])
        for number in range(campaigns):
            _campaign(into, derive(seed, f"{rate} {number}"))
        found.append(into)
    return found
