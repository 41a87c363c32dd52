"""Verdicts: collect the evidence on a device, ask the judge, and store verdicts that are new."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from canaryd.config.settings import Config
from canaryd.engine.counts import Counts
from canaryd.engine.days import Days
from canaryd.engine.discover import Discovery
from canaryd.engine.evidence import Acknowledgements, Evidence, last_pass
from canaryd.engine.host import Host
from canaryd.engine.learning import Learning
from canaryd.engine.polling import Watch
from canaryd.judge import verdict as judge_verdict
from canaryd.judge.case import Case
from canaryd.judge.node import Node, node
from canaryd.judge.recordings import drift, rules
from canaryd.judge.recordings.drift import Drift
from canaryd.judge.recordings.record import Peer, Record
from canaryd.judge.served import Behind
from canaryd.judge.telemetry.flag_rules import may_be_shared
from canaryd.judge.telemetry.signals import Poll, Signs
from canaryd.judge.watch import days_of_tests, has_looked
from canaryd.model import TORCH, UNDRIVEN, Device, Event, EventKind, Finding, Run, Verdict

REWRITE = 600.0
"""Seconds after which an unchanged verdict is stored again, to show readers that it is up to date."""
REJUDGED = 600.0
"""Seconds after which recordings are judged again even if none is new, because the rules look at several days."""
REWORD = 60.0
"""Seconds after which a verdict is stored again if only its wording changed, such as "3 minutes ago"."""


@dataclass(frozen=True, kw_only=True)
class _Judged:
    """The findings and drifts from the recordings of a device."""

    at: float
    version: int
    """Value of `Learning.version` when the recordings were judged."""
    findings: tuple[Finding, ...]
    drifts: tuple[Drift, ...]


class Decisions:
    """Judges the devices of `host` by the evidence in memory."""

    def __init__(
        self,
        host: Host,
        watch: Watch,
        evidence: Evidence,
        counts: Counts,
        acknowledgements: Acknowledgements,
        learning: Learning,
        days: Days,
        discovery: Discovery,
    ) -> None:
        """Keep the parts; no device is judged yet."""
        self._host = host
        self._watch = watch
        self._evidence = evidence
        self._counts = counts
        self._acks = acknowledgements
        self._learning = learning
        self._days = days
        self._discovery = discovery
        self._doubted: frozenset[str] = frozenset()
        """Devices with something against them in their newest verdict; they are no evidence on others."""
        self._verdicts: dict[str, Verdict] = {}
        """The stored verdicts, as they were read last."""
        self._kept_under: dict[str, Config] = {}
        """Device → the configuration under which this process stored its verdict last."""
        self._lost: tuple[float, str] | None = None
        """The store's loss, as it was read last."""
        self._recordings: dict[str, _Judged] = {}
        """Device → what its recordings show; removed when a recording is added."""

    def decide_all(self) -> dict[str, Verdict]:
        """Judge every known device, store the verdicts that are new, and return all verdicts by uuid."""
        previous = self._look()
        with self._host.mutex:
            nodes = {kind: self._node(kind) for kind in {type(d) for d in self._host.devices.values()}}
            return {
                uuid: self._decide(uuid, nodes[type(device)], previous.get(uuid))
                for uuid, device in self._host.devices.items()
            }

    def decide(self, uuid: str) -> Verdict:
        """Judge one device now and return the verdict."""
        previous = self._look().get(uuid)
        return self._decide(uuid, self._node(type(self._host.devices[uuid])), previous)

    def rehearse(self, runs: Mapping[str, Sequence[Run]]) -> dict[str, Verdict]:
        """Judge each device by these runs with an injected fault alone (uuid → runs); the verdicts are never stored."""
        if not runs:
            return {}
        self._look()
        host, claims = self._host, self._learning.claims
        found = {}
        with host.mutex:
            for device in (d for u, d in host.devices.items() if u in runs):
                record = replace(self._record(device), runs=tuple(filter(has_looked, runs[device.uuid])))
                alike = {u: d for u, d in host.devices.items() if type(d) is type(device)}
                case = Case(
                    device=device,
                    node=replace(node(alike, runs, host.clock()), claims=claims),
                    wanted=host.periods(device),
                    policy=host.config.judge,
                    now=host.clock(),
                    divided=host.is_divided(device),
                    recordings=tuple(rules.findings(record)),
                    behind=self._behind(device),
                )
                found[device.uuid] = replace(judge_verdict.decide(case), drill=True)
        return found

    def keep(self, verdict: Verdict) -> None:
        """Store a verdict, but not if its only reason is that canaryd starts, stops, or cannot read its records."""
        passing = self._host.stopping or self._host.store.unreadable
        if self._host.looked and (verdict.doubted or not passing):
            self._host.store.set_verdict(verdict)
            self._kept_under[verdict.device] = self._host.config

    def drifts(self, uuid: str) -> tuple[Drift, ...]:
        """Return the distances of a device's newest recordings from their baselines."""
        with self._host.mutex:
            self._look()
            return self._judge_recordings(self._host.devices[uuid]).drifts

    def take(self, run: Run) -> None:
        """Add a run to the evidence in memory. The recordings of all devices of its backend will be judged again."""
        with self._host.mutex:
            of = self._host.devices.get(run.device)
            for other in list(self._recordings):
                device = self._host.devices.get(other)
                if of is None or device is None or device.backend == of.backend:
                    self._recordings.pop(other, None)
            if self._evidence.add(run):
                self._counts.add(run)

    def _look(self) -> dict[str, Verdict]:
        """Read what other processes have stored since the last call; return device uuid → newest stored verdict."""
        self._learning.refresh()
        with self._host.mutex:
            for run in self._host.store.news():
                if run.device in self._host.devices:
                    self.take(run)
                    self._counts.forget()
            if self._evidence.outdated:
                self._evidence.recall()
                self._counts.forget()
        store = self._host.store
        verdicts, lost = store.verdicts(), store.lost
        if store.unreadable:  # what was read before still holds
            verdicts, lost = self._verdicts | verdicts, self._lost
        self._verdicts, self._lost = verdicts, lost
        self._doubted = frozenset(uuid for uuid, verdict in verdicts.items() if verdict.doubted)
        return verdicts

    # -- the case for the judge ---------------------------------------------------------------------------------------

    def _decide(self, uuid: str, among: Node, previous: Verdict | None) -> Verdict:
        """Judge one device by the evidence in `among`, store the verdict if it is new, and return the verdict."""
        host = self._host
        with host.mutex:
            device = host.devices[uuid]
            case = Case(
                device=device,
                node=among,
                wanted=host.periods(device),
                policy=host.config.judge,
                now=host.clock(),
                previous=previous,
                divided=host.is_divided(device),
                gone_since=None if uuid in host.in_place else self._discovery.last_seen.get(uuid),
                signs=self._signs(device, among.runs[uuid]) if device.is_hardware else None,
                sightings=self._sightings(device),
                accelerators=self._count(device),
                unlisted=host.failing if device.backend == "cpu" else {},
                recordings=self._judge_recordings(device).findings,
                acks=self._acks.in_force(uuid),
                history_lost=self._lost,
                unread=host.store.unreadable,
                slower=self._days.findings(device),
                compared=host.compared.get(uuid),
                behind=self._behind(device),
                serving=self._served_endpoints(device),
            )
            verdict = judge_verdict.decide(case)
            if not host.restricted and (missed := among.missed[uuid]):
                self._counts.learn(uuid, case.same, missed[-1].run.started)
            anew = self._kept_under.get(uuid) is not host.config  # a roll-out waits for the first verdict after it
            if not host.restricted and (anew or is_news(verdict, previous)):
                self.keep(verdict)
            return verdict

    def _node(self, kind: type[Device]) -> Node:
        """Return the devices of this host, or its endpoints, with their runs: they are judged apart."""
        host = self._host
        with host.mutex:
            devices = {u: d for u, d in host.devices.items() if type(d) is kind}
            runs = {u: self._evidence.of(u) for u in devices}
            summed = {u: self._counts.tested(u) for u in devices}
            counted = {u: self._counts.of(u) for u in devices}
        if host.restricted:  # the verdict is about the part that was asked for, so runs of that part count as complete
            part = host.asked.cases, host.asked.intensity
            for uuid, listed in runs.items():
                runs[uuid] = tuple(
                    replace(r, cases=(), intensity="") if (r.cases, r.intensity) == part else r for r in listed
                )
        return replace(
            node(devices, runs, host.clock(), counted),
            summed=summed,
            claims=self._learning.claims,
            stacks=self._counts.stacks,
            known={u: self._counts.compared(u) for u in devices},
        )

    def _signs(self, device: Device, runs: Sequence[Run]) -> Signs:
        """Return the signs of trouble that a device, its driver and the kernel log have reported."""
        host = self._host
        instances = [u for u, d in host.devices.items() if d.parent == device.uuid and u in host.present]
        # A divided device has passed when all of its instances have.
        passes = [last_pass(self._evidence.of(u)) for u in instances] or [last_pass(runs)]
        tested = (runs, *map(self._evidence.of, instances))
        wrong = [r for each in tested for r in each if r.wrong]
        since = self._acks.evidence_since(device.uuid)
        signs = Signs(
            device=device,
            polls=self._polls(device),
            events=tuple(e for e in self._watch.history.life(device) if e.last > since),
            last_pass=min((p for p in passes if p is not None), default=None) if None not in passes else None,
            last_mismatch=max((r.started for r in wrong), default=None),
            now=host.clock(),
            policy=host.config.telemetry,
        )
        # Another device may have the name of one that is gone, which is then called by its uuid.
        others: dict[str, Device] = {}
        for other in host.in_place_first():
            if other.part != device.part and other.is_whole:
                others[other.uuid if other.name in {device.name, *others} else other.name] = other
        # Instances are units of their card; a device that is gone is no witness.
        kind = host.devices.get(device.part, device).kind
        signs = replace(signs, siblings=[n for n, d in others.items() if d.kind == kind and d.uuid in host.in_place])
        # Only for what several devices may have together the polls or events of all others are asked for.
        if may_be_shared(signs):
            reporting = {n: replace(signs, device=d, polls=self._polls(d), events=()) for n, d in others.items()}
            signs = replace(signs, reporting=reporting)
        kinds = ("xid", "aer", "amdgpu", "intel")
        if signs.losses or any(map(signs.seen, kinds)) or signs.counted_losses or signs.rises("pcie_aer_errors_total"):
            return replace(signs, beside={n: self._watch.history.life(d) for n, d in others.items()})
        return signs

    def _polls(self, device: Device) -> dict[str, Poll]:
        """Return telemetry probe → its polls of a device since the device was repaired or acknowledged last."""
        host = self._host
        polls = self._watch.recorded(device.uuid, host.telemetry_periods(), self._acks.evidence_since(device.uuid))
        return {name: poll for name, poll in polls.items() if name in host.entries}

    def _sightings(self, device: Device) -> dict[str, list[Event]]:
        """Return device uuid → its hardware and software changes, for every other device of the same backend."""
        others = (d for u, d in self._host.devices.items() if u != device.uuid and d.backend == device.backend)
        return {d.uuid: [e for e in self._watch.history.of(d) if e.kind == EventKind.CHANGE] for d in others}

    def _count(self, device: Device) -> tuple[int, int] | None:
        """Return (accelerators found, expected), or None if no number is configured or the device is not the CPU."""
        expected = self._host.config.devices.expected
        if expected is None or device.backend != "cpu":
            return None
        here = [d for u, d in self._host.devices.items() if u in self._host.present]
        found = (d for d in here if d.is_accelerator and not d.parent and d.runtime == TORCH)
        return sum(UNDRIVEN not in d.detail for d in found), expected

    def _behind(self, device: Device) -> tuple[Behind, ...]:
        """Return the devices that serve an endpoint, each with its runs and whether it is in doubt; () for a device."""
        parts = self._host.devices_behind(device)
        return tuple(Behind(d.name, tuple(self._evidence.of(d.uuid)), d.uuid in self._doubted) for d in parts)

    def _served_endpoints(self, device: Device) -> dict[str, tuple[int, Sequence[Finding]]]:
        """Return uuid → (number of serving devices, findings), for each endpoint that a device serves."""
        behind = ((d, self._host.devices_behind(d)) for d in self._host.devices.values())
        return {d.uuid: (len(parts), self._judge_recordings(d).findings) for d, parts in behind if device in parts}

    def _judge_recordings(self, device: Device) -> _Judged:
        """Return the findings from a device's recordings; they are cached, because judging all of them takes time."""
        now, version = self._host.clock(), self._learning.version
        known = self._recordings.get(device.uuid)
        if known is None or known.version != version or not 0 <= now - known.at < REJUDGED:
            known = _Judged(at=now, version=version, findings=(), drifts=())
            if any(run.recordings for run in self._evidence.of(device.uuid)):
                record = self._record(device)
                known = replace(known, findings=tuple(rules.findings(record)), drifts=drift.drifts(record))
            self._recordings[device.uuid] = known
        return known

    def _record(self, device: Device) -> Record:
        """Return the recordings and baselines of a device, and those of every device that it can be compared with."""
        host = self._host
        of = {u: self._evidence.looked(u) for u in host.devices}
        behind = host.devices_behind(device)  # endpoints that share a device are no evidence on each other
        return Record(
            device=device,
            runs=of[device.uuid],
            baselines=self._learning.of(device.uuid),
            policy=host.config.judge,
            now=host.clock(),
            tested=days_of_tests(self._evidence.of(device.uuid), self._counts.tested(device.uuid)),
            wanted=host.periods(device),
            peers={
                d.name: Peer(
                    device=d,
                    trusted=u not in self._doubted,
                    runs=of[u],
                    baselines=self._learning.of(u),
                )
                for u, d in host.devices.items()
                if u != device.uuid and not any(part in behind for part in host.devices_behind(d))
            },
            imported=self._learning.imported,
        )


def is_news(verdict: Verdict, previous: Verdict | None) -> bool:
    """Return whether to store a verdict: it differs from the stored verdict, or the stored verdict is old."""
    if previous is None or (verdict.state, verdict.cause) != (previous.state, previous.cause):
        return True
    if [(f.rule, f.state, f.wrong) for f in verdict.findings] != [
        (f.rule, f.state, f.wrong) for f in previous.findings
    ]:  # what was counted too: every report must give the same numbers
        return True
    same = list(map(_texts, verdict.findings)) == list(map(_texts, previous.findings))
    return verdict.decided - previous.decided > (REWRITE if same else REWORD)


def _texts(finding: Finding) -> tuple[str, ...]:
    """Return the texts of a finding that a reader sees."""
    return finding.message, finding.action, *finding.evidence
