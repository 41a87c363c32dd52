"""The rounds of tests of each device: the probes that are due run as soon as the budget allows.

A tick finds what is due on one device and runs it as one series per instruction set, so that no device ever runs two
probes at once and no runs pile up.
"""

from __future__ import annotations

import json
import logging
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from canaryd.engine import budget, schedule
from canaryd.engine.check import gave
from canaryd.engine.engine import Engine, Progress
from canaryd.engine.polling import poll_tasks
from canaryd.judge import case, clock
from canaryd.model import Device, Outcome
from canaryd.probe import LEVELS
from canaryd.store import notes
from canaryd.store.locks import Busy
from canaryd.store.store import Store

log = logging.getLogger("canaryd")

TICK = 5.0
"""Seconds between two ticks of a device; each tick runs the tests that are due."""
TRIGGER_PAUSE, LONGEST_PAUSE = 600.0, 21_600.0
"""Seconds after an extra test in which no event starts another one; largest value of this pause. The pause doubles
while events continue, so that a crashing application cannot keep a device busy."""
ASIDE = {budget.DOUBT: "first retest", budget.RETEST: "retest"}
"""Purpose → its name in log lines, for runs outside of rounds."""


class _Round(NamedTuple):
    """The probes that run now on one device."""

    names: list[str]
    complete: bool
    """Whether these probes are all that is due."""
    purpose: str
    """Purpose to which the budget counts the device time of the round."""
    trigger: str = ""
    """The event that requires an extra test, or "" if the probes are due by the clock."""


class Rounds:
    """Runs the probes that are due on each device, within the budget."""

    def __init__(self, engine: Engine, store: Store, changed: Callable[[], None]) -> None:
        """Store the arguments. Calling `changed` publishes the present evidence."""
        self._engine = engine
        self._store = store
        self._changed = changed
        self._turns: dict[tuple[str, ...], int] = {}
        """(device, probes that are due together) → number of their rounds, which chooses the instruction set."""
        self._last: dict[tuple[str, str], float] = {}
        """(device, probe) → when this process last started it."""
        self._luck: dict[str, float] = {}
        """Device → where in the jitter of a period its next round lies."""
        self._at_work: dict[str, str] = {}
        """Card → the device of it that is being tested now; there are several where runtimes share a card."""
        self._triggered: dict[str, tuple[float, float]] = {}
        """Device → its last extra test, by the monotonic clock, and the seconds without another one."""

    def tick(self, uuid: str) -> None:
        """Run the probes that are due on one device."""
        engine = self._engine
        device = engine.devices.get(uuid)
        if device is None or uuid not in engine.present or engine.halted or not device.is_reached:
            self._stop_waiting(uuid)
            return
        if self._at_work.setdefault(device.physical, uuid) != uuid:
            return  # the card is tested through another runtime just now; the next tick comes soon
        try:
            self._test(device)
        finally:
            del self._at_work[device.physical]

    def _test(self, device: Device) -> None:
        engine, uuid = self._engine, device.uuid
        if not self._loading(engine.periods(device)):
            self._stop_waiting(uuid)
        if self._is_unpolled(device):
            return
        try:
            self.run_aside(device, engine.experiments.owed(uuid), budget.DOUBT)
            self.run_aside(device, engine.experiments.retests(uuid), budget.RETEST)
        except Busy as busy:
            log.info("%s: retests wait: %s", device.name, busy)
            return
        chosen = self._choose(device, engine.periods(device))  # retests take long: a reload may have left probes out
        if chosen.names:
            self._run(device, chosen)

    def _loading(self, names: Mapping[str, float]) -> list[str]:
        """Return the names of the probes that load the device."""
        return [name for name in names if self._engine.entries[name].spec.numeric]

    def _is_unpolled(self, device: Device) -> bool:
        """Return whether an accelerator was not polled yet: a context alone may take what memory a server has left."""
        if not device.is_accelerator:
            return False
        polls = self._engine.watch.polls(device.physical)  # also those that the store holds
        done = {name for name, poll in polls.items() if poll.newest is not None}
        return any(t.request.spec.name not in done for t in poll_tasks(self._engine, {device.physical}))

    def _choose(self, device: Device, periods: Mapping[str, float]) -> _Round:
        """Return the round to run now: an extra test after an event, or the due probes that the budget allows."""
        uuid, luck = device.uuid, self._luck.setdefault(device.uuid, random.random())
        last = {name: self._last[uuid, name] for name in periods if (uuid, name) in self._last}
        due = schedule.due(last, periods, now=time.time(), luck=luck)
        loading = self._loading(periods)
        hindered = loading and uuid in self._engine.watch.history.triggers and self._waits(device, budget.DOUBT)
        if not hindered and (trigger := self._take_trigger(uuid)):
            log.info("%s: tested out of turn: %s", device.name, trigger)
            return _Round(loading, complete=True, purpose=budget.DOUBT, trigger=trigger)
        names, purpose = self.within_budget(device, due, periods)
        return _Round(names, complete=names == due, purpose=purpose)

    def _run(self, device: Device, chosen: _Round) -> None:
        engine, uuid, names = self._engine, device.uuid, chosen.names
        group = (uuid, *names)
        turn = self._turns.get(group, 0)
        levels = {n: level for n, level in engine.levels().items() if n in names}
        plans = schedule.plan_round(
            device,
            [engine.entries[n] for n in names],
            levels=levels,
            seed=schedule.new_seed(),
            trigger=chosen.trigger,
            sets=schedule.instruction_sets(device, max(levels.values(), key=LEVELS.index), turn),
        )
        started, before = time.time(), engine.account.spent(device.physical)
        turned = {(uuid, name): started for name in names}
        try:
            for plan in plans:
                engine.carry_out(plan, purpose=chosen.purpose)
        except Busy as busy:
            log.info("%s: %s; trying again in %.0f s", device.name, busy, TICK)
            self._put_back(uuid, chosen.trigger)
            return
        except Exception:  # a mistake of canaryd: the next try is at the next turn, and not at the next tick
            self._last.update(turned)
            raise
        finally:
            self._changed()
        if engine.halted:  # released meanwhile: what was cut short or did not begin is due as before
            self._put_back(uuid, chosen.trigger)
            return
        if any(plan.numeric for plan in plans) and chosen.complete:  # where a part was forced, the rest goes on waiting
            if chosen.purpose == budget.DOUBT:  # this spends no share, and does not show what a round costs
                engine.account.release(uuid)
            else:
                engine.account.took(uuid, tuple(names), max(0.0, engine.account.spent(device.physical) - before))
            self._note_waiting()
        self._turns[group] = turn + 1
        self._luck[uuid] = random.random()
        self._last.update(turned)

    def _take_trigger(self, uuid: str) -> str:
        """Remove and return the event that requires an extra test, or "" if there is none or the pause is not over."""
        now, triggers = time.monotonic(), self._engine.watch.history.triggers
        last, pause = self._triggered.get(uuid, (now - LONGEST_PAUSE, 0.0))
        if uuid not in triggers or now - last < pause:
            return ""
        again = 2 * pause if now - last < 2 * pause else TRIGGER_PAUSE
        self._triggered[uuid] = (now, min(again, LONGEST_PAUSE))
        return triggers.pop(uuid)

    def _put_back(self, uuid: str, trigger: str) -> None:
        """Restore the event `trigger` whose extra test could not finish, so that the event requires the test again."""
        if trigger:
            self._engine.watch.history.triggers.setdefault(uuid, trigger)
            half = self._triggered[uuid][1] / 2  # as if the test before had been as long ago as its pause
            self._triggered[uuid] = time.monotonic() - half, half

    def run_aside(self, device: Device, plans: Sequence[schedule.Plan], purpose: str) -> None:
        """Run the confirmations or retests in `plans`, unless the budget makes the device wait."""
        if plans and not self._waits(device, purpose):
            for plan in plans:
                if plan.device.uuid == device.uuid or self.may(plan.device, purpose):
                    self._engine.carry_out(plan, purpose=purpose)
            self._stop_waiting(device.uuid)

    # The budget

    def within_budget(self, device: Device, names: list[str], periods: Mapping[str, float]) -> tuple[list[str], str]:
        """Return (probes among the due `names` that can run now, purpose to which the budget counts their time).

        `periods`: probe → seconds between its runs. All probes that load the device wait together. A probe whose
        evidence would grow too old runs anyway, without the others that load the device. A run without a result counts
        as evidence here, so a probe that never completes cannot escape the budget. A probe's first quick run in this
        process runs anyway too, because a verdict is needed soon after a start.
        """
        engine, policy = self._engine, self._engine.config.budget
        loading = [n for n in names if engine.entries[n].spec.numeric and device.computes_here]
        if not loading:
            return names, budget.ROUND
        facts = self._facts(device, self._expected(device.uuid, tuple(names)))
        if budget.wait(policy, facts, budget.ROUND) is None:
            return names, budget.ROUND
        young = {
            n
            for n in loading
            if not self._is_first(device.uuid, n)
            and self._since(device.uuid, n) < budget.COVERAGE * case.freshness(engine.config.judge, periods[n])
        }
        purpose = budget.FORCED if young < set(loading) else budget.ROUND
        left = min((1 - budget.COVERAGE) * case.freshness(engine.config.judge, periods[n]) for n in loading)
        if facts.starting >= left:  # the evidence would become too old
            facts = replace(facts, newest=None)
        if self._waits(device, purpose, facts):
            return [n for n in names if n not in loading], budget.ROUND
        return [n for n in names if n not in young], purpose

    def may(self, device: Device, purpose: str) -> bool:
        """Return whether the budget allows a confirmation or retest to load a device now; log the reason if not."""
        if found := budget.wait(self._engine.config.budget, self._facts(device), purpose):
            log.info("%s: no %s here: %s", device.name, ASIDE[purpose], found.text)
        return found is None

    def recall_spent(self, uuid: str) -> None:
        """Add the device time that earlier processes used in the last hour, so that a restart resets no budget."""
        engine, now = self._engine, time.time()
        for run in engine.evidence(uuid):
            age, entry = max(0.0, clock.age(run, now)), engine.entries.get(run.probe)
            of_round = not (run.confirms or run.intensity)
            if age < budget.HOUR and of_round and entry is not None and entry.spec.numeric:
                engine.account.recall(engine.devices[uuid].physical, budget.worked(run.seconds), age)

    def _is_first(self, uuid: str, probe: str) -> bool:
        """Return whether a probe runs at level quick and has not run on a device in this process yet."""
        return (uuid, probe) not in self._last and self._engine.levels()[probe] == "quick"

    def _since(self, uuid: str, probe: str) -> float:
        """Return the age in seconds of a probe's newest run with any outcome, or infinity if the probe never ran."""
        runs = (r for r in self._engine.evidence(uuid) if r.probe == probe and r.whole)
        now = time.time()
        return min((clock.age(r, now) for r in runs), default=math.inf)

    def _expected(self, uuid: str, names: tuple[str, ...]) -> float:
        """Return the device seconds that a round of these probes should take, estimated from earlier runs."""
        engine = self._engine
        if cost := engine.account.cost(uuid, names):
            return cost
        newest = {r.probe: r.seconds for r in engine.evidence(uuid) if r.whole}
        return budget.worked(sum(newest.get(n, 0.0) for n in names if engine.entries[n].spec.numeric))

    def _facts(self, device: Device, expected: float = 0.0) -> budget.Conditions:
        engine, now = self._engine, time.time()
        facts = budget.facts(
            device,
            engine.watch.readings(device.physical, now),
            engine.watch.readings(device.parent, now) if device.parent else (),
            now=now,
            spent=engine.account.spent(device.physical),
            expected=expected,
        )
        return replace(facts, starting=engine.account.starting(device.uuid, facts.newest))

    def _waits(self, device: Device, purpose: str, facts: budget.Conditions | None = None) -> bool:
        """Return whether the budget postpones tests of this `purpose`; if so, log, count and publish the reason."""
        found = budget.wait(self._engine.config.budget, facts or self._facts(device), purpose)
        if found and self._engine.account.withhold(device.uuid, found, time.time()):
            log.info("%s: put off: %s", device.name, found.text)
            self._note_waiting()
            self._changed()
        return found is not None

    def _stop_waiting(self, uuid: str) -> None:
        """Record that no test of a device is postponed any more: it has run, or no test is left."""
        account = self._engine.account
        if account.withheld(uuid) and not self._engine.stopping:
            account.release(uuid)
            self._note_waiting()
            self._changed()

    def _note_waiting(self) -> None:
        """Store the postponed rounds of all devices for `canaryd status`, if they have changed."""
        engine = self._engine
        held = {u: engine.account.withheld(u) for u in engine.devices}
        waiting = {u: {"since": h.since, "text": h.wait.text} for u, h in held.items() if h is not None}
        text = json.dumps(waiting) if waiting else ""
        if self._store.note(notes.BUDGET_NOTE) != text:
            self._store.set_note(notes.BUDGET_NOTE, text)


def log_run(progress: Progress) -> bool:
    """Log the run if one has just ended; return whether one has."""
    run = progress.done
    if run is None:
        return False
    level = logging.INFO if run.outcome is Outcome.COMPLETED and not run.wrong else logging.WARNING
    first = run.detail.splitlines()[0] if run.detail else ""
    detail = f": {first}" if first and run.outcome is not Outcome.COMPLETED else ""
    what = f"{progress.device.name} {run.probe}{' (retest)' if run.confirms else ''}"
    log.log(level, "%s %s %s: %s%s", run.id, what, run.outcome.value, gave(run), detail)
    return True
