"""The laws as properties: each yields a sentence for what breaks it in one play of a story."""

from __future__ import annotations

import contextlib
import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from canaryd.engine import evidence
from canaryd.model import Cause, Run, State, Verdict
from tests.laws.further import BLAMELESS, FURTHER
from tests.laws.otherwise import reordered, settled, with_sibling, wrong_once_more
from tests.story.catalogue import DAY, EXACT, HOUR
from tests.story.format import STORIES, Story, load
from tests.story.host import Host
from tests.story.playing import Played, play

LATER = (0.0, 1.0, 8.0, 48.0)
"""Hours after the end of a story at which all is judged again, though nothing happened."""
CAPS = (50, 1000)
"""How many runs of a kind are kept."""
OFTEN = 2
"""How often a steady fault may change a state within a day; that it passed for the first time counts for nothing."""
RETOLD = {"clock_jump", "damage_store", "hide_store", "prune", "import"}
"""What a story may not have if its facts come late: an hour is no hour there, or facts are lost."""
Said = tuple[str, str]


@dataclass
class Base:
    """A story as it was played, for all laws."""

    story: Story
    seed: int
    played: Played
    facts: list[list[tuple[int, Run]]] = field(default_factory=list)
    """Each machine's runs, each with its round."""
    later: dict[float, dict[str, Verdict]] = field(default_factory=dict)
    """Hours after the end → the verdicts then."""

    @property
    def final(self) -> dict[str, Verdict]:
        """The verdicts at the end."""
        return self.later[0.0]

    @property
    def accused(self) -> list[str]:
        """The devices that are suspect or worse in the end, the worst first."""
        doubted = [n for n, v in self.final.items() if v.state.severity >= State.SUSPECT.severity]
        return sorted(doubted, key=lambda name: (-self.final[name].state.severity, name))


@functools.cache
def names() -> tuple[str, ...]:
    """Return the names of all stories."""
    return tuple(sorted({path.stem for path in STORIES.glob("*.yaml")} | {*FURTHER}))


def told(name: str) -> Story:
    """Return a story whose devices draw their own chances."""
    return replace(FURTHER[name] if name in FURTHER else load(STORIES / f"{name}.yaml"), apart=True)


def courses(name: str) -> range:
    """Return the seeds with which a story is played in full: ten where chance has a part in it, else two."""
    story = told(name)
    by_chance = story.noise or any(0.0 < fault.probability < 1.0 for fault in story.faults)
    return range(1, 11 if by_chance else 3)


@functools.lru_cache(maxsize=10)
def base(name: str, seed: int) -> Base:
    """Return a story as it is played."""
    story = told(name)
    found = Base(story=story, seed=seed, played=Played(story=story, verdicts={}, drills={}))

    def begin(hosts: Sequence[Host]) -> None:
        for host in hosts:
            host.facts = []
            found.facts.append(host.facts)

    def end(hosts: Sequence[Host]) -> None:
        for before, hours in zip((0.0, *LATER), LATER, strict=False):
            for host in hosts:
                host.live(host.now, (hours - before) * HOUR)
            found.later[hours] = _decided(hosts)

    found.played = play(story, seed=seed, begin=begin, end=end)
    return found


def _decided(hosts: Sequence[Host]) -> dict[str, Verdict]:
    """Judge everything now, and return the verdicts by name."""
    found = {}
    for host in hosts:
        while host.engine.days.sum_up():
            pass
        found.update({host.names[uuid]: verdict for uuid, verdict in host.engine.decide().items()})
    return found


def said(verdict: Verdict | None) -> Said:
    """Return the state and the cause of a verdict."""
    return ("not spoken of", "") if verdict is None else (verdict.state.value, verdict.cause.value)


def differences(before: Played, now: Played, slack: int = 0) -> Iterator[str]:
    """Yield the first difference of each device from an earlier play, beyond so many rounds sooner or later."""
    for name, verdicts in before.verdicts.items():
        for number, verdict in enumerate(now.verdicts.get(name, [])):
            near = [said(v) for v in verdicts[max(0, number - slack) : number + slack + 1]]
            if said(verdict) not in near:
                yield f"{name} {_at(now.story, number)}: {' '.join(near[-1])}, then {' '.join(said(verdict))}"
                break


def _ends(before: Mapping[str, Verdict], now: Mapping[str, Verdict]) -> Iterator[str]:
    for name, verdict in before.items():
        if said(verdict) != said(now.get(name)):
            yield f"{name}: {' '.join(said(verdict))}, then {' '.join(said(now.get(name)))}"


def _at(story: Story, number: int) -> str:
    return f"in round {number} ({number * story.seconds / HOUR:.1f} h)"


def steady(of: Base) -> Iterator[str]:
    """Yield what changed though nothing happened, and states that a steady fault changed too often."""
    for name in of.final:
        before = of.played.verdicts[name][-1] or of.final[name]
        for hours, verdicts in of.later.items():
            now = verdicts[name]
            worse = now.state.severity > max(before.state.severity, State.UNKNOWN.severity)
            other = now.state is before.state is not State.UNKNOWN and now.cause is not before.cause
            if worse or other:
                yield f"{name}: {' '.join(said(before))}, {hours:g} h later {' '.join(said(now))}, and nothing happened"
            before = now
    story = of.story
    day, begun = math.ceil(DAY / story.seconds), settled(story)
    for name, told_of in of.played.verdicts.items():
        states = [said(verdict)[0] for verdict in told_of]
        changed = [n for n in range(max(1, begun), len(states)) if states[n] != states[n - 1]]
        # An error that does not come back passes: nobody can tell earlier that a fault is a steady one.
        passed = next((n for n in changed if states[n] == states[changed[0] - 1]), len(states))
        for first in (n for n in changed if n != passed):
            within = [n for n in changed if first <= n < first + day and (n < passed) is (first < passed)]
            if len(within) > OFTEN:
                course = " → ".join([states[within[0] - 1], *(states[n] for n in within)][:7])
                yield f"{name}: {len(within)} changes within a day from {_at(story, first)[3:]}: {course}"
                break


def retention(of: Base) -> Iterator[str]:
    """Yield what is judged otherwise where fewer or more runs are kept."""
    most = max(Counter((run.device, run.probe) for facts in of.facts for _, run in facts).values(), default=0)
    for cap, fewest in zip(CAPS, (evidence.FEWEST, evidence.NEWEST), strict=True):
        if most <= fewest:
            continue  # all are kept either way
        with kept(cap):
            now = play(of.story, seed=of.seed)
        yield from (f"{cap} runs kept: {text}" for text in differences(of.played, now))


@contextlib.contextmanager
def kept(cap: int) -> Iterator[None]:
    """Keep so many runs of each kind in memory."""
    caps = {"NEWEST": cap, "FAILURES": cap, "DEVICE_FAILURES": cap}
    before = {name: getattr(evidence, name) for name in caps}
    try:
        for name, value in caps.items():
            setattr(evidence, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(evidence, name, value)


def order(of: Base) -> Iterator[str]:
    """Yield what is judged otherwise where devices have other uuids and stand in another order.

    What one device's run asks of another may come a round sooner or later.
    """
    yield from differences(of.played, play(reordered(of.story, of.seed), seed=of.seed), slack=1)


def sibling(of: Base) -> Iterator[str]:
    """Yield the devices that are worse off with one more clean sibling; what was unknown may be settled by it."""
    story = with_sibling(of.story)
    if story is None:
        return
    now = play(story, seed=of.seed)
    for name, verdicts in of.played.verdicts.items():
        for number, verdict in enumerate(now.verdicts.get(name, [])):
            near = [v for v in verdicts[max(0, number - 1) : number + 2] if v is not None]
            if verdict is None or not near or any(v.state is State.UNKNOWN for v in near):
                continue
            if verdict.state.severity > max(v.state.severity for v in near):
                yield f"{name} {_at(story, number)}: {' '.join(said(near[-1]))}, then {' '.join(said(verdict))}"
                break


def wrong(of: Base) -> Iterator[str]:
    """Yield where one more wrong result makes the state of its own device better."""
    numeric = [name for name in (*of.accused, *of.story.names()) if not name.startswith("endpoint:")]
    if not numeric or EXACT not in of.story.probes:
        return
    name, at = numeric[0], of.story.rounds * 2 // 3
    verdicts = of.played.verdicts[name]
    now = play(wrong_once_more(of.story, name, at), seed=of.seed)
    for number, verdict in enumerate(now.verdicts[name]):
        near = [v.state.severity for v in verdicts[max(0, number - 1) : number + 2] if v is not None]
        if number >= at and verdict is not None and near and verdict.state.severity < min(near):
            yield f"{name} {_at(of.story, number)}: {' '.join(said(verdicts[number]))}, then {' '.join(said(verdict))}"
            return


def lateness(of: Base) -> Iterator[str]:
    """Yield what ends otherwise where the same facts come an hour late: of the accused, of all others, of the log."""
    if {happening.do for happening in of.story.events} & RETOLD or of.story.seconds > HOUR:
        return
    every = list(of.final)
    mine = of.accused or every[::2]
    late: dict[str, tuple[list[str], float]] = {
        f"the runs of {', '.join(mine)}": (mine, 0.0),
        f"the runs of all but {', '.join(mine)}": ([name for name in every if name not in mine], 0.0),
    }
    if any(happening.do == "xid" for happening in of.story.events):
        late["the kernel's log"] = ([], HOUR)
    for what, (names_late, log) in late.items():
        if names_late or log:
            yield from (f"{what} an hour late: {text}" for text in _ends(of.final, retold(of, names_late, log)))


def retold(of: Base, late: Sequence[str], log_late: float = 0.0) -> dict[str, Verdict]:
    """Tell the same facts again, some of them an hour late, and return the verdicts when all have come."""
    rounds = math.ceil(HOUR / of.story.seconds)
    found: dict[str, Verdict] = {}

    def begin(hosts: Sequence[Host]) -> None:
        for host, facts in zip(hosts, of.facts, strict=True):
            host.log_late = log_late
            host.retold = {}
            for number, run in facts:
                at = number + rounds * (host.names[run.device] in late)
                host.retold.setdefault(at, []).append(run)

    def end(hosts: Sequence[Host]) -> None:
        for host in hosts:
            ended = host.now
            for _, runs in sorted((host.retold or {}).items()):
                for run in runs:
                    host.hear(run)
            host.log_late, host.now = 0.0, ended
            host.engine.read_log(until_end=True)
        found.update(_decided(hosts))

    play(of.story, seed=of.seed, begin=begin, end=end)
    return found


def innocence(of: Base) -> Iterator[str]:
    """Yield the devices that are called hardware where no device is broken."""
    for name, verdicts in of.played.verdicts.items() if of.story.name in BLAMELESS else ():
        for number, verdict in enumerate(verdicts):
            if verdict is not None and verdict.cause is Cause.HARDWARE and verdict.state is not State.HEALTHY:
                yield f"{name} {_at(of.story, number)}: {' '.join(said(verdict))}"
                break


LAWS: Mapping[str, Callable[[Base], Iterator[str]]] = {
    law.__name__: law for law in (steady, retention, order, sibling, wrong, lateness, innocence)
}
"""The laws by name."""


def broken(name: str, law: str, seeds: Sequence[int]) -> list[str]:
    """Return what breaks a law in a story, over several courses of chance."""
    return [f"seed {seed}: {text}" for seed in seeds for text in sorted(LAWS[law](base(name, seed)))]
