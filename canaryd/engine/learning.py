"""What is learnt from runs: baselines of recorded results, and the classes of exact cases that devices computed."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from canaryd.engine.evidence import Acknowledgements, Evidence
from canaryd.engine.host import Host
from canaryd.engine.schedule import Plan, Step
from canaryd.formatting import DAY
from canaryd.judge.characterised import Claims, Line, Met, learns, met_in
from canaryd.judge.findings import DEPARTED
from canaryd.judge.recordings import intake, launches
from canaryd.judge.recordings.baseline import Baseline, Key, key_of
from canaryd.model import Outcome, Run, State


class Learning:
    """What was learnt, in memory; it is read again when the store changes."""

    def __init__(self, host: Host, evidence: Evidence, acknowledgements: Acknowledgements) -> None:
        """Start empty; `refresh` reads what is stored."""
        self._host = host
        self._evidence = evidence
        self._acks = acknowledgements
        self._baselines: dict[str, dict[Key, Baseline]] = {}
        self.imported: tuple[Baseline, ...] = ()
        """Baselines of devices of other hosts."""
        self._met: dict[Line, Met] = {}
        """The classes of exact cases that each device computed correctly, here or on another host."""
        self._claims: Claims | None = None
        self.version = 0
        """Rises whenever baselines and acknowledgements are read again."""
        self._store_version: object = None
        """The store's mark of writes by others at the last read; None forces the next read."""

    def of(self, uuid: str) -> Mapping[Key, Baseline]:
        """Return the baselines of a device."""
        return self._baselines.get(uuid, {})

    def refresh(self, *, always: bool = False) -> None:
        """Read everything again if another process has written to the store, or if `always`."""
        store = self._host.store
        with self._host.mutex:
            found = store.changes()
            if not always and found == self._store_version:
                return
            self._acks.read()
            met, baselines = {met.line: met for met in store.met()}, store.baselines()
            if store.unreadable:  # what was read before still holds
                self._store_version = None
                return
            self._store_version = found
            self._met, self._claims = met, None
            self._baselines = {uuid: {} for uuid in self._host.devices}
            for baseline in (b for b in baselines if b.device in self._host.devices):
                # What a device computed before its repair does not count.
                if baseline.first > self._acks.evidence_since(baseline.device):
                    self._baselines[baseline.device][baseline.key] = baseline
            self.imported = tuple(b for b in baselines if b.imported)
            self.version += 1

    @property
    def claims(self) -> Claims:
        """The classes of exact cases, in a form that answers whether one is proven to be exact."""
        with self._host.mutex:
            if self._claims is None:
                self._claims = Claims(self._met.values())
            return self._claims

    def meet(self, run: Run) -> list[Met]:
        """Add the classes of cases that a run computed correctly; return the record, which the caller stores, if new.

        A record changes at least once a day while its software is in use: it must outlive the mismatches that it
        explains.
        """
        device = self._host.devices.get(run.device)
        if device is None or not learns(device.kind) or not run.stack:
            return []
        with self._host.mutex:
            line = Line(run.device, run.probe, run.probe_version, run.stack_id)
            known, names = self._met.get(line), met_in(run)
            fresh = names - known.classes.keys() if known else names
            if not fresh and (known is None or run.started - known.used <= DAY):
                return []
            seen = Met(
                device=run.device,
                kind=device.kind,
                probe=run.probe,
                probe_version=run.probe_version,
                stack=run.stack,
                classes=dict.fromkeys(sorted(fresh), run.started),
                used=run.started,
            )
            self._met[line] = known.merged(seen) if known else seen
            self._claims = None
            return [self._met[line]]

    def lacks_baseline(self, uuid: str, probe: str) -> bool:
        """Return whether a device's newest recordings of a probe lack a complete baseline; True without recordings."""
        self.refresh()
        mine = [r for r in self._evidence.of(uuid) if r.probe == probe]
        newest = {s.case: key_of(r, s) for r in mine for s in r.recordings}
        known, wanted = self.of(uuid), self._host.config.judge.confirm_runs
        first = next((r for r in reversed(mine) if r.whole and r.recordings), None)
        if first is not None and first.unknown and launches.begins_launch(first, mine, known, wanted):
            return True
        return not newest or any(key not in known or not known[key].complete for key in newest.values())

    def steps_to_repeat(self, plan: Plan, runs: Sequence[Run]) -> tuple[Step, ...]:
        """Return the steps of a plan to run again at once: after new software was met, or its results were learnt.

        Only a later recording is compared with learnt results, so without a repeat the endpoint stays unknown until the
        next round.
        """
        whole = {r.probe: r for r in runs if r.recordings and r.whole and not r.drill}
        found = []
        for step in plan.steps:
            run = whole.get(step.entry.spec.name)
            if run is not None and run.baselining != self.lacks_baseline(plan.device.uuid, run.probe):
                why = "what was learnt is compared" if run.baselining else "the chain changed"
                found += [replace(step, trigger=why)]
        return tuple(found)

    def take_in(self, run: Run, *, keep: bool = True) -> tuple[Run, Collection[Baseline]]:
        """Compare a run's recordings with the baselines, and learn from the run if its device is trusted.

        Returns (the run with the results of the comparison, the baselines that changed). Without `keep` nothing is
        learnt or counted.
        """
        trusted = keep and self._is_trusted(run)
        self.refresh()
        # A verdict that cannot be read may be against the device, and what is learnt anew would replace what is stored.
        trusted = trusted and not self._host.store.unreadable
        with self._host.mutex:
            mine = self._baselines.setdefault(run.device, {})
            try:
                earlier, wanted = self._evidence.of(run.device), self._host.config.judge.confirm_runs
                run, learnt = intake.intake(launches.label(run, mine, earlier, wanted), mine, learns=trusted)
            except ValueError as error:  # an invalid baseline: keep the run
                self._host.problems.append(f"{run.device} {run.probe}: not compared with its baselines: {error}")
                return run, ()
            self._baselines[run.device] = mine | learnt if keep else mine
        return run, learnt.values()

    def _is_trusted(self, run: Run) -> bool:
        """Return whether baselines may learn from a run: it must be complete, and no finding may accuse its device.

        A bad device must not become its own standard. An endpoint whose results differ from those of its old software
        can still learn those of its new software, or its finding could never end. It cannot learn while one of its
        devices has findings of its own.
        """
        if run.wrong or run.cases or run.intensity or run.outcome is not Outcome.COMPLETED:
            return False
        device = self._host.devices.get(run.device)
        if device is None:
            return False  # left out by a reload meanwhile, and its baselines are not in memory
        if device.computes_here:
            before = self._host.store.verdict(run.device)
            return before is None or not before.doubted
        verdicts = self._host.store.verdicts()
        found = [f for d in self._host.devices_behind(device) if d.uuid in verdicts for f in verdicts[d.uuid].findings]
        accusing = [f for f in found if f.state.severity >= State.SUSPECT.severity or f.acknowledged]
        return all(f.rule == DEPARTED for f in accusing)
