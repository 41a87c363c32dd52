"""A store and an engine whose clock the test sets."""

from __future__ import annotations

import itertools

from canaryd.config.settings import Config
from canaryd.engine.catalogue import Entry, ProbeFile
from canaryd.engine.engine import Engine
from canaryd.facts import Comparison, Evidence, Exactness, Reading, Recording
from canaryd.model import Ack, Device, Outcome, Run, State
from canaryd.probe import ProbeSpec
from canaryd.store.store import Store
from tests.places import place

NOW = 1_790_000_000.0
HOUR, DAY, YEAR = 3600.0, 86_400.0, 365 * 86_400.0
GPU = Device(uuid="GPU-1", backend="cuda", index=0, model="H100", torch_index=0)
EVIDENCE = Evidence(wrong=1, total=4, first=(), bits={"0": 1}, zeroed=0, nonfinite=0, lines={}, pattern="one element")


def run(number, at, *, wrong=False, trials=10, **fields):
    comparison = Comparison(
        case="a",
        shape="M=4",
        seed=number,
        exactness=Exactness.UNIVERSAL,
        place=place("device"),
        trials=trials,
        wrong_trials=int(wrong),
        evidence=EVIDENCE if wrong else None,
    )
    made = {"device": GPU.uuid, "probe": "p", "probe_version": 1, "seconds": 1.0, "outcome": Outcome.COMPLETED}
    made |= {"comparisons": (comparison,), "readings": (Reading(name="trials", value=trials),)}
    return Run(id=f"run-{number:05d}", started=at, **{**made, **fields})


class Host:
    """A store and an engine whose clock the test sets."""

    def __init__(self, place, now):
        self.place, self.now = place, now
        self.store = Store.open(place, now=self.clock)
        self.store.see_device(GPU, now)
        self.numbers = itertools.count(len(self.store.runs()))
        file = ProbeFile(name="p", path=place / "p.py", source="directory")
        self.entries = {"p": Entry(spec=ProbeSpec(name="p", summary="s"), file=file)}
        self.restart()

    def clock(self):
        return self.now

    def restart(self):
        """Begin anew on the same store, as the next daemon would."""
        self.engine = Engine(Config(state_dir=self.place), self.store, clock=self.clock)
        self.engine.entries, self.engine.present = self.entries, {GPU.uuid}
        self.engine.recall()

    def add(self, **fields):
        """Add a run of now, with a recording of known bits."""
        default = {"recordings": (Recording(case="c", digest="1" * 16, values=(0.5,)),)}
        return self.engine.add(run(next(self.numbers), self.now, **{**default, **fields}))

    def live(self, seconds, **fields):
        """Add a run every half hour for so long."""
        for _ in range(int(seconds / (HOUR / 2))):
            self.now += HOUR / 2
            self.add(**fields)

    def say(self, kind, reason, until=0.0):
        """Add an operator's word of now, from another process's place."""
        rules = tuple(f.rule for f in self.verdict.findings if f.state is State.SUSPECT)
        word = Ack(device=GPU.uuid, kind=kind, at=self.now, until=until, reason=reason, rules=rules)
        with Store.open(self.place, now=self.clock) as other:
            assert other.add_ack(word)
        return word

    @property
    def verdict(self):
        return self.engine.decide()[GPU.uuid]

    @property
    def rules(self):
        return {f.rule for f in self.verdict.findings}
