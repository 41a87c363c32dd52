"""What the runs of each device found, as it was counted when they were stored."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

from canaryd.engine.evidence import Acknowledgements
from canaryd.engine.host import Host
from canaryd.formatting import DAY
from canaryd.judge.cause import Same, SameKey
from canaryd.judge.clock import AHEAD
from canaryd.judge.tally import Tallied, edges, merged, tally
from canaryd.model import Run
from canaryd.store.store import Store

SEEN = 90 * DAY
"""Age in seconds up to which days of tests are read; the rules in docs/judgement.md need less."""


class Counts:
    """The tallies of each device in memory, added up; none are read before something was wrong."""

    def __init__(self, host: Host, acknowledgements: Acknowledgements) -> None:
        """Start empty; the store is read when it is asked for."""
        self._host = host
        self._acks = acknowledgements
        self._acks_version = -1
        self._known: frozenset[str] = frozenset()
        self._tallies: dict[str, tuple[Tallied, ...]] | None = None
        self._days: dict[str, dict[str, set[int]]] = {}
        self._stacks: Mapping[str, Mapping[str, str]] = {}
        self._compared: dict[str, dict[SameKey, Same]] = {}
        self._read_at = -math.inf

    def forget(self) -> None:
        """Read everything again at the next question: another process has stored runs, or another file is in use."""
        self._acks_version = -1

    def add(self, run: Run) -> None:
        """Count a run that this process has just stored; where the store cannot be read, nothing else counts it."""
        unreadable = bool(self._host.store.unreadable)
        if not (self._is_current or unreadable):
            return
        counted = tally(run)
        if counted.tested:
            self._days.setdefault(run.device, {}).setdefault(run.probe, set()).add(int(run.started // DAY))
        if self._tallies is None and run.wrong and unreadable:
            self._tallies = {}
        if self._tallies is not None:
            self._tallies[run.device] = (*self._tallies.get(run.device, ()), counted)
            self._add_up()
        elif run.wrong:
            self.forget()

    def of(self, uuid: str) -> Sequence[Tallied]:
        """Return a device's tallies since its last repair."""
        self._refresh()
        return (self._tallies or {}).get(uuid, ())

    def tested(self, uuid: str) -> Mapping[str, frozenset[int]]:
        """Return probe → days on which it tested a device after the last repair (UTC days since the epoch)."""
        self._refresh()
        return {probe: frozenset(days) for probe, days in self._days.get(uuid, {}).items()}

    def compared(self, uuid: str) -> Mapping[SameKey, Same]:
        """Return how siblings computed what a device computed wrong since its last repair."""
        self._refresh()
        return self._compared.get(uuid, {})

    def learn(self, uuid: str, found: Mapping[SameKey, Same], at: float) -> None:
        """Store how siblings computed it, if that is new; `at` is the device's newest mismatch (epoch s)."""
        known = self._compared.setdefault(uuid, {})
        if new := {key: same for key, same in found.items() if known.get(key) != same}:
            known |= new
            self._host.store.set_compared(uuid, new, at)

    @property
    def stacks(self) -> Mapping[str, Mapping[str, str]]:
        """Id → software stack; empty before something was wrong."""
        return self._stacks

    @property
    def _is_current(self) -> bool:
        return self._acks_version == self._acks.version

    def _refresh(self) -> None:
        host, store, known = self._host, self._host.store, frozenset(self._host.devices)
        now = host.clock()
        # After a clock was set back, what it dated ahead may be merged with what is of the present.
        if self._is_current and known == self._known and now >= self._read_at - AHEAD:
            self._read_at = max(self._read_at, now)
            return
        days: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
        tallies: dict[str, tuple[Tallied, ...]] | None = {} if store.ever_wrong else None
        compared: dict[str, dict[SameKey, Same]] = {}
        repaired = {uuid: at for uuid in known if (at := self._acks.evidence_since(uuid))}
        # Each device's are added up as soon as they are read: a bad year has a hundred thousand, which take 100 MB.
        wrong = [store.wrong_between(uuid, repaired.get(uuid, 0.0)) for uuid in known] if tallies is not None else []
        apart = {now + AHEAD}.union(*(pair for pairs in wrong for pair in pairs))
        for uuid in known:
            cut = repaired.get(uuid, 0.0)
            for probe, day in store.tested(uuid, max(now - SEEN, cut)):
                days[uuid][probe].add(day)
            if tallies is not None:
                tallies[uuid] = merged((t for t in store.tallies(uuid) if t.first > cut), apart)
                compared[uuid] = known_of(store, uuid, repaired)
        stacks = store.stacks() if tallies is not None else {}
        if store.unreadable and self._known:
            return  # what was read before still holds
        self._days, self._tallies, self._stacks, self._compared = days, tallies, stacks, compared
        self._acks_version, self._known, self._read_at = self._acks.version, known, now
        self._add_up()

    def _add_up(self) -> None:
        """Add up what no first or newest wrong result tells apart; goldens of one device can accuse another."""
        if self._tallies is not None:
            # What is dated in the future is no clean trial, so it stays apart.
            at = frozenset({self._host.clock() + AHEAD}).union(*map(edges, self._tallies.values()))
            self._tallies = {uuid: merged(found, at) for uuid, found in self._tallies.items()}


def known_of(store: Store, uuid: str, repaired: Mapping[str, float]) -> dict[SameKey, Same]:
    """Return how siblings computed what a device computed wrong; `repaired`: device → its last repair (epoch s)."""
    found = store.compared(uuid, repaired.get(uuid, 0.0))
    for other, at in repaired.items():
        # What a sibling gave before its repair shows nothing shared any more.
        for key in found.keys() - store.compared(uuid, at).keys():
            found[key] = found[key]._replace(alike=found[key].alike - {other})
    return found
