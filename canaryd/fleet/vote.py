"""The state of all nodes, from a Prometheus: the vote, suspect, silent and stale nodes, and software stacks.

The recording rules of deploy/prometheus/canaryd-fleet.rules.yml count the vote; it is only read here, so that the
command, the alerts and the dashboards cannot disagree. Every answer of the server is checked.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from canaryd.facts import printable
from canaryd.fleet.prometheus import FleetError, Labels, Prometheus, Sample
from canaryd.model import State

RULES = "canaryd-fleet.rules.yml"
"""The file whose rules count the vote."""
STALEST = 10
"""Nodes with the oldest evidence that are listed."""
STALE = 3.0
"""Periods without a clean run after which evidence is stale, as for the judge (docs/judgement.md)."""
OLD = 1800.0
"""Seconds after which a verdict is no longer relied on, as the alert CanarydVerdictStale has it."""
GROUP = ("model", "probe", "stack")
"""Labels that devices with equal software share."""
NODE = ("job", "instance")
KNOWN = (
    'canaryd:fleet_voiceless{why="accused"} or '
    '(canaryd:fleet_voiceless{why="acknowledged"} > ignoring (why) canaryd:fleet_odd_since)'
)
"""Suspect or faulty by their own canaryd, or acknowledged after the vote found them odd."""


def standing(selector: str = "") -> str:
    """Return the query for every device's state, with the last known one of silent nodes, as the alerts use it.

    `selector`: label matchers in braces, or "" for every state.
    """
    held = f"on (job, instance, device, state) device:canaryd_device_state:held{selector}"
    return f"(canaryd_device_state{selector} == 1) or {held}"


@dataclass(frozen=True, kw_only=True)
class Odd:
    """A device whose fingerprints differ from those of the majority of identical devices."""

    job: str
    instance: str
    device: str
    model: str
    results: tuple[Labels, ...]
    """Probe, stack and the odd fingerprint of each difference."""
    scope: str
    """"device"; "node" where no device of the node agrees with the majority; "shared" where other nodes have the same
    odd fingerprint, which points to software and accuses no device."""
    known: bool
    """Whether its own canaryd suspects it already, or an operator has acknowledged it; it has no vote."""


@dataclass(frozen=True, kw_only=True)
class Doubted:
    """A device that its own canaryd reports as suspect or faulty."""

    job: str
    instance: str
    device: str
    model: str
    state: str
    findings: tuple[Labels, ...]
    """Rule, state and cause of each finding."""


@dataclass(frozen=True, kw_only=True)
class Side:
    """One of the fingerprints in a group that does not agree."""

    fingerprint: str
    votes: int
    nodes: int
    some_nodes: tuple[str, ...]
    """A few instances that reported it."""


@dataclass(frozen=True, kw_only=True)
class Disputed:
    """A group whose results differ without an outvoted device."""

    model: str
    probe: str
    stack: str
    majority: bool
    """True: most agree, and several nodes share another result. False: there is no majority."""
    sides: tuple[Side, ...]
    """Most votes first."""


@dataclass(frozen=True, kw_only=True)
class Silent:
    """A node of which Prometheus hears nothing, or nothing new."""

    job: str
    instance: str
    why: str
    """"down": it is scraped and does not answer; "gone": it answered in the last day and is no longer scraped;
    "empty": it answers, and shows no device; "stuck": its verdicts are old, or dated in the future."""


@dataclass(frozen=True, kw_only=True)
class Stale:
    """The oldest evidence of a node."""

    instance: str
    device: str
    probe: str
    periods: float
    """Time since the probe's newest clean run, in periods of the probe."""


@dataclass(frozen=True, kw_only=True)
class Stack:
    """Devices of one model on one stack."""

    devices: int
    labels: Labels
    """model, stack and the parts of the software that are known."""


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """Everything that `canaryd fleet` shows."""

    url: str
    now: float
    """Prometheus's time, in seconds since the epoch."""
    nodes: int
    """Nodes that answer."""
    versions: Mapping[str, int]
    """Version of canaryd → nodes."""
    states: Mapping[str, int]
    """State → devices."""
    groups: int = 0
    """Number of groups (model, probe, stack) with votes."""
    decided: int = 0
    """Number of groups with a majority."""
    duplicates: int = 0
    """Number of devices that two targets report; they have no vote."""
    odd: tuple[Odd, ...] = ()
    doubted: tuple[Doubted, ...] = ()
    disputed: tuple[Disputed, ...] = ()
    silent: tuple[Silent, ...] = ()
    stalest: tuple[Stale, ...] = ()
    """At most `STALEST` nodes, the oldest evidence first."""
    stacks: tuple[Stack, ...] = ()
    stacks_differ: tuple[Labels, ...] = ()
    """model and probe whose majorities differ between stacks: software, no alarm."""
    problems: tuple[str, ...] = ()
    """What could not be queried; the fleet is not healthy then."""

    @property
    def accused(self) -> tuple[Odd, ...]:
        """Odd devices that were not suspected before."""
        return tuple(o for o in self.odd if not o.known and o.scope != "shared")

    @property
    def state(self) -> State:
        """The worst state of any device; at least unknown where something could not be learnt."""
        states = [State(s) for s, count in self.states.items() if count]
        if self.accused:
            states.append(State.SUSPECT)
        if self.problems or self.disputed or self.silent or self.nodes < 1 or not states:
            states.append(State.UNKNOWN)
        return max(states, key=lambda s: s.severity)


@dataclass
class _Gatherer:
    """Runs queries; one that fails becomes a problem and does not stop the others."""

    prometheus: Prometheus
    problems: list[str] = field(default_factory=list)

    def ask(self, what: str, query: str) -> list[Sample]:
        try:
            return self.prometheus.ask(query)
        except FleetError as error:
            self.problems.append(f"{what}: unknown, Prometheus {error}")
            return []


def gather(prometheus: Prometheus) -> Fleet:
    """Run all queries; raise FleetError where Prometheus cannot be reached or has no data of canaryd."""
    heard = prometheus.ask("count by (version) (canaryd_build_info)")
    asker = _Gatherer(prometheus)
    silent = _silent(asker)
    if not heard and not silent:
        raise FleetError("has no data of canaryd: no target served canaryd_build_info in the last day")
    states = asker.ask("device states", f"count by (state) ({standing()})")
    odd = asker.ask("outvoted devices", "canaryd:fleet_outlier")
    votes = asker.ask("votes", "canaryd:fleet_voters")
    decided = asker.ask("majorities", "count(canaryd:fleet_majority)")
    known = asker.ask("suspected devices", KNOWN)
    twice = asker.ask("duplicate devices", 'count(count by (device) (canaryd:fleet_voiceless{why="duplicate"}))')
    if not votes and (marks := asker.ask("fingerprints", "count(canaryd_golden_fingerprint)")):
        asker.problems.append(
            f"votes: none, with {marks[0].value:.0f} fingerprints; check that Prometheus evaluates {RULES} "
            "and that each device is reported by one target only"
        )
    split = asker.ask("shared odd results", "canaryd:fleet_split")
    whole = asker.ask("outvoted nodes", "canaryd:fleet_outlier_node")
    stacks = asker.ask("stacks", "canaryd:fleet_stack_devices")
    fleet = Fleet(
        url=prometheus.url,
        now=prometheus.at,
        nodes=int(sum(s.value for s in heard)),
        versions={s.labels.get("version", ""): int(s.value) for s in heard},
        states=_states(states, asker),
        groups=len(votes),
        decided=_only(decided),
        duplicates=_only(twice),
        odd=_odd(odd, known, split, whole),
        doubted=_doubted(asker),
        disputed=_disputed(asker, split),
        silent=silent,
        stalest=_stalest(asker),
        stacks=tuple(
            sorted(
                (Stack(devices=int(s.value), labels=_known(s.labels)) for s in stacks),
                key=lambda s: (s.labels.get("model", ""), -s.devices, s.labels.get("stack", "")),
            )
        ),
        stacks_differ=tuple(_known(s.labels) for s in asker.ask("differing stacks", "canaryd:fleet_stacks_differ")),
    )
    if not fleet.states:
        asker.problems.append("device states: no node reports a device")
    return replace(fleet, problems=(*asker.problems, *prometheus.warnings))


def _only(samples: Sequence[Sample]) -> int:
    """Return the value of a count; no series means 0."""
    return int(samples[0].value) if samples else 0


def _known(labels: Labels) -> Labels:
    return {k: v for k, v in sorted(labels.items()) if v and k != "__name__"}


def _pick(labels: Labels, names: Iterable[str]) -> tuple[str, ...]:
    return tuple(labels.get(name, "") for name in names)


def _named(labels: Labels, *names: str) -> dict[str, Any]:
    """Return these labels as the fields of their names."""
    return dict(zip(names, _pick(labels, names), strict=True))


def _states(samples: Sequence[Sample], asker: _Gatherer) -> dict[str, int]:
    found = {s.labels.get("state", ""): int(s.value) for s in samples}
    if strange := found.keys() - {s.value for s in State}:
        asker.problems.append(f"{printable(', '.join(sorted(strange)))}: unknown to this version of canaryd")
    return {s.value: found[s.value] for s in State if s.value in found}


def _silent(asker: _Gatherer) -> tuple[Silent, ...]:
    """Return targets that do not answer or say nothing new, and nodes that answered in the last day and are gone."""
    ever = "(canaryd_build_info or canaryd_build_info offset 1h or canaryd_build_info offset 1d)"
    down = asker.ask("silent nodes", f"(up == 0) and on (job) (group by (job) {ever})")
    gone = asker.ask(
        "gone nodes", f"group by (job, instance) {ever} unless on (job, instance) (up or canaryd_build_info)"
    )
    empty = asker.ask(
        "nodes without a device",
        "group by (job, instance) (canaryd_build_info) unless on (job, instance) canaryd_device_state",
    )
    age = "abs(time() - canaryd_device_verdict_timestamp_seconds)"
    stuck = asker.ask("old verdicts", f"group by (job, instance) ({age} > {OLD:.0f})")
    return tuple(
        sorted(
            (
                Silent(**_named(s.labels, *NODE), why=why)
                for why, found in (("down", down), ("gone", gone), ("empty", empty), ("stuck", stuck))
                for s in found
            ),
            key=lambda s: (s.why, s.instance, s.job),
        )
    )


def _odd(
    odd: Sequence[Sample], known: Sequence[Sample], split: Sequence[Sample], whole: Sequence[Sample]
) -> tuple[Odd, ...]:
    suspected = {_pick(s.labels, ("instance", "device")) for s in known}
    shared = {_pick(s.labels, (*GROUP, "fingerprint")) for s in split}
    nodes = {_pick(s.labels, (*NODE, *GROUP)) for s in whole}
    devices = defaultdict(list)
    for sample in odd:
        devices[_pick(sample.labels, (*NODE, "device", "model"))].append(sample.labels)
    found = []
    for (job, instance, device, model), labels in sorted(devices.items()):
        alone = [x for x in labels if _pick(x, (*GROUP, "fingerprint")) not in shared]
        wide = [x for x in alone if _pick(x, (*NODE, *GROUP)) in nodes]
        found.append(
            Odd(
                job=job,
                instance=instance,
                device=device,
                model=model,
                results=tuple(
                    _named(x, "probe", "stack", "fingerprint") for x in sorted(labels, key=lambda x: _pick(x, GROUP))
                ),
                scope="shared" if not alone else "node" if len(wide) == len(alone) else "device",
                known=(instance, device) in suspected,
            )
        )
    return tuple(found)


def _doubted(asker: _Gatherer) -> tuple[Doubted, ...]:
    states = asker.ask("suspect and faulty devices", standing('{state=~"suspect|faulty"}'))
    why = defaultdict(list)
    for sample in asker.ask("findings", 'canaryd_finding{state=~"suspect|faulty"}'):
        why[_pick(sample.labels, (*NODE, "device"))].append(_named(sample.labels, "rule", "state", "cause"))
    found = [
        Doubted(
            **_named(s.labels, *NODE, "device", "model", "state"),
            findings=tuple(sorted(why[_pick(s.labels, (*NODE, "device"))], key=lambda f: (f["state"], f["rule"]))),
        )
        for s in states
    ]
    return tuple(sorted(found, key=lambda d: (d.state, d.instance, d.device)))  # "faulty" comes before "suspect"


def _disputed(asker: _Gatherer, split: Sequence[Sample]) -> tuple[Disputed, ...]:
    where = "on (model, probe, stack) (canaryd:fleet_no_majority or canaryd:fleet_split)"
    votes = asker.ask("disputed votes", f"canaryd:fleet_votes and {where}")
    nodes = {
        _pick(s.labels, (*GROUP, "fingerprint")): int(s.value)
        for s in asker.ask("disputed nodes", f"canaryd:fleet_vote_nodes and {where}")
    }
    named = defaultdict(list)
    few = "topk by (model, probe, stack, fingerprint) (4, canaryd:fleet_ballots and "
    for sample in asker.ask("names of disputed nodes", f"{few}{where})"):
        named[_pick(sample.labels, (*GROUP, "fingerprint"))].append(sample.labels.get("instance", ""))
    with_majority = {_pick(s.labels, GROUP) for s in split}
    sides = defaultdict(list)
    for sample in votes:
        key = _pick(sample.labels, (*GROUP, "fingerprint"))
        sides[key[:3]].append(
            Side(
                fingerprint=key[3],
                votes=int(sample.value),
                nodes=nodes.get(key, 0),
                some_nodes=tuple(sorted(named[key])),
            )
        )
    return tuple(
        Disputed(
            **dict(zip(GROUP, key, strict=True)),
            majority=key in with_majority,
            sides=tuple(sorted(found, key=lambda s: (-s.votes, s.fingerprint))),
        )
        for key, found in sorted(sides.items())
    )


def _stalest(asker: _Gatherer) -> tuple[Stale, ...]:
    """Return the oldest evidence of the stalest nodes; a probe that was never clean has no age and is left out."""
    age = "(time() - canaryd_probe_last_success_timestamp_seconds)"
    ratio = f"({age} / on (job, instance, device, probe) canaryd_probe_period_seconds)"
    # A time later than Prometheus's own comes from a broken clock and is not an age.
    found = asker.ask("stalest nodes", f"topk({STALEST}, topk by (job, instance) (1, {ratio} >= 0))")
    stale = [Stale(**_named(s.labels, "instance", "device", "probe"), periods=s.value) for s in found]
    return tuple(sorted(stale, key=lambda s: -s.periods))
