"""`canaryd fleet`: what a Prometheus knows of all nodes: the vote, who is in question, silent or stale, and stacks.

The vote itself is held by the recording rules of deploy/prometheus/canaryd-fleet.rules.yml and only read here, so that
the command, the alarms and the dashboards cannot disagree. Standard library only; whatever a server answers is checked.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from canaryd.codec import to_json
from canaryd.fleet.prometheus import FleetError, Labels, Prometheus, Sample
from canaryd.formatting import moment, wrapped
from canaryd.judge import verdict
from canaryd.model import State, printable

SCHEMA = "canaryd.fleet/1"
RULES = "canaryd-fleet.rules.yml"
"""The file that holds the vote."""
SHOWN = 20
"""Entries of each list that the text shows; JSON has them all."""
STALEST = 10
"""Nodes among which the stalest are looked for."""
STALE = 3.0
"""Periods without a clean run from which evidence is called stale: the judge's own measure (docs/judgement.md)."""
GROUP = ("model", "probe", "stack")
"""What makes devices and their software equal."""
NODE = ("job", "instance")
KNOWN = (
    'canaryd:fleet_voiceless{why="accused"} or '
    '(canaryd:fleet_voiceless{why="acknowledged"} > ignoring (why) canaryd:fleet_odd_since)'
)
"""Suspect or faulty by their own canaryd, or acknowledged after the vote found them odd."""


def standing(selector: str = "") -> str:
    """Return the query of every device's state, of a silent node what stands of it, as for the alarms.

    `selector`: matchers with braces of their own, or "" for every state.
    """
    held = f"on (job, instance, device, state) device:canaryd_device_state:held{selector}"
    return f"(canaryd_device_state{selector} == 1) or {held}"


@dataclass(frozen=True, kw_only=True)
class Odd:
    """A device whose fingerprints are not those of the majority of its equals."""

    job: str
    instance: str
    device: str
    model: str
    results: tuple[Labels, ...]
    """Where: probe, stack and the odd fingerprint."""
    scope: str
    """"device"; "node" where no device of the node agrees with the majority; "shared" where other nodes have the same
    odd fingerprint, which speaks for software and accuses nobody."""
    known: bool
    """Whether its own canaryd suspects it already, or an operator has acknowledged it; it had no vote."""


@dataclass(frozen=True, kw_only=True)
class Doubted:
    """A device that its own canaryd calls suspect or faulty."""

    job: str
    instance: str
    device: str
    model: str
    state: str
    findings: tuple[Labels, ...]
    """Why: rule, state and cause."""


@dataclass(frozen=True, kw_only=True)
class Side:
    """One fingerprint of a group that does not agree."""

    fingerprint: str
    votes: int
    nodes: int
    some_nodes: tuple[str, ...]
    """A few instances that gave it."""


@dataclass(frozen=True, kw_only=True)
class Disputed:
    """A group in which the vote accuses nobody although results differ."""

    model: str
    probe: str
    stack: str
    majority: bool
    """Whether most agree and several nodes share another result; otherwise there is no majority."""
    sides: tuple[Side, ...]
    """Most votes first."""


@dataclass(frozen=True, kw_only=True)
class Silent:
    """A node that Prometheus does not hear any more."""

    job: str
    instance: str
    why: str
    """"down" where it is asked and does not answer; "gone" where it answered in the last day and is not asked now."""


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
    """All that `canaryd fleet` tells."""

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
    """(model, probe, stack) of which there are votes."""
    decided: int = 0
    """Those of them with a majority."""
    duplicates: int = 0
    """Devices that two targets show, so that they have no vote."""
    odd: tuple[Odd, ...] = ()
    doubted: tuple[Doubted, ...] = ()
    disputed: tuple[Disputed, ...] = ()
    silent: tuple[Silent, ...] = ()
    stalest: tuple[Stale, ...] = ()
    """At most `STALEST` nodes, the stalest first."""
    stacks: tuple[Stack, ...] = ()
    stacks_differ: tuple[Labels, ...] = ()
    """model and probe whose majorities differ between stacks: software, and no alarm."""
    problems: tuple[str, ...] = ()
    """What could not be learnt; a fleet of which something is not known is not healthy."""

    @property
    def accused(self) -> tuple[Odd, ...]:
        """Odd devices that nobody had in question before."""
        return tuple(o for o in self.odd if not o.known and o.scope != "shared")

    @property
    def state(self) -> State:
        """The worst that is known of any device; unknown where something is not."""
        states = [State(s) for s, count in self.states.items() if count]
        if self.accused:
            states.append(State.SUSPECT)
        if self.problems or self.disputed or self.silent or self.nodes < 1 or not states:
            states.append(State.UNKNOWN)
        return max(states, key=lambda s: s.severity)


@dataclass
class _Gatherer:
    """Asks one thing after the other; what one question could not learn costs no other answer."""

    prometheus: Prometheus
    problems: list[str] = field(default_factory=list)

    def ask(self, what: str, query: str) -> list[Sample]:
        try:
            return self.prometheus.ask(query)
        except FleetError as error:
            self.problems.append(f"{what}: not known: Prometheus {error}")
            return []


def gather(prometheus: Prometheus) -> Fleet:
    """Ask for everything; raise FleetError where Prometheus cannot be asked or has never heard of canaryd."""
    heard = prometheus.ask("count by (version) (canaryd_build_info)")
    asker = _Gatherer(prometheus)
    silent = _silent(asker)
    if not heard and not silent:
        raise FleetError("knows no canaryd: no target has served canaryd_build_info in the last day")
    states = asker.ask("the states of devices", f"count by (state) ({standing()})")
    odd = asker.ask("the vote's outliers", "canaryd:fleet_outlier")
    votes = asker.ask("the votes", "canaryd:fleet_voters")
    decided = asker.ask("the majorities", "count(canaryd:fleet_majority)")
    known = asker.ask("who is known already", KNOWN)
    twice = asker.ask("who is seen twice", 'count(count by (device) (canaryd:fleet_voiceless{why="duplicate"}))')
    if not votes and (marks := asker.ask("the fingerprints", "count(canaryd_golden_fingerprint)")):
        asker.problems.append(
            f"the vote: {marks[0].value:.0f} fingerprints and no votes: does Prometheus evaluate the rules of {RULES}, "
            "and is every device seen by one target alone?"
        )
    split = asker.ask("shared odd results", "canaryd:fleet_split")
    whole = asker.ask("nodes that are odd as a whole", "canaryd:fleet_outlier_node")
    stacks = asker.ask("the stacks", "canaryd:fleet_stack_devices")
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
        stacks_differ=tuple(_known(s.labels) for s in asker.ask("stacks that differ", "canaryd:fleet_stacks_differ")),
    )
    if not fleet.states:
        asker.problems.append("the states of devices: no node shows a device")
    return replace(fleet, problems=(*asker.problems, *prometheus.warnings))


def _only(samples: Sequence[Sample]) -> int:
    """Return the value of a count, of which no series means none."""
    return int(samples[0].value) if samples else 0


def _known(labels: Labels) -> Labels:
    return {k: v for k, v in sorted(labels.items()) if v and k != "__name__"}


def _pick(labels: Labels, names: Iterable[str]) -> tuple[str, ...]:
    return tuple(labels.get(name, "") for name in names)


def _states(samples: Sequence[Sample], asker: _Gatherer) -> dict[str, int]:
    found = {s.labels.get("state", ""): int(s.value) for s in samples}
    if strange := found.keys() - {s.value for s in State}:
        asker.problems.append(f"{printable(', '.join(sorted(strange)))}: no state that this canaryd knows")
    return {s.value: found[s.value] for s in State if s.value in found}


def _silent(asker: _Gatherer) -> tuple[Silent, ...]:
    """Targets that are asked in vain, and nodes that were heard an hour or a day ago and are not asked any more."""
    ever = "(canaryd_build_info or canaryd_build_info offset 1h or canaryd_build_info offset 1d)"
    down = asker.ask("silent nodes", f"(up == 0) and on (job) (group by (job) {ever})")
    gone = asker.ask(
        "nodes that are gone", f"group by (job, instance) {ever} unless on (job, instance) (up or canaryd_build_info)"
    )
    return tuple(
        sorted(
            (
                Silent(job=s.labels.get("job", ""), instance=s.labels.get("instance", ""), why=why)
                for why, found in (("down", down), ("gone", gone))
                for s in found
            ),
            key=lambda s: (s.why, s.instance, s.job),
        )
    )


def _odd(
    odd: Sequence[Sample], known: Sequence[Sample], split: Sequence[Sample], whole: Sequence[Sample]
) -> tuple[Odd, ...]:
    told = {_pick(s.labels, ("instance", "device")) for s in known}
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
                    {k: x.get(k, "") for k in ("probe", "stack", "fingerprint")}
                    for x in sorted(labels, key=lambda x: _pick(x, GROUP))
                ),
                scope="shared" if not alone else "node" if len(wide) == len(alone) else "device",
                known=(instance, device) in told,
            )
        )
    return tuple(found)


def _doubted(asker: _Gatherer) -> tuple[Doubted, ...]:
    states = asker.ask("suspect and faulty devices", standing('{state=~"suspect|faulty"}'))
    why = defaultdict(list)
    for sample in asker.ask("findings", 'canaryd_finding{state=~"suspect|faulty"}'):
        why[_pick(sample.labels, (*NODE, "device"))].append(
            {k: sample.labels.get(k, "") for k in ("rule", "state", "cause")}
        )
    found = [
        Doubted(
            job=s.labels.get("job", ""),
            instance=s.labels.get("instance", ""),
            device=s.labels.get("device", ""),
            model=s.labels.get("model", ""),
            state=s.labels.get("state", ""),
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
            model=key[0],
            probe=key[1],
            stack=key[2],
            majority=key in with_majority,
            sides=tuple(sorted(found, key=lambda s: (-s.votes, s.fingerprint))),
        )
        for key, found in sorted(sides.items())
    )


def _stalest(asker: _Gatherer) -> tuple[Stale, ...]:
    """Ask for the oldest evidence node by node; a probe that has never been clean has no age and is unknown instead."""
    age = "(time() - canaryd_probe_last_success_timestamp_seconds)"
    ratio = f"({age} / on (job, instance, device, probe) canaryd_probe_period_seconds)"
    # A time ahead of Prometheus's own, or none, is a broken clock and no evidence of age.
    found = asker.ask("the stalest nodes", f"topk({STALEST}, topk by (job, instance) (1, {ratio} >= 0))")
    stale = [
        Stale(
            instance=s.labels.get("instance", ""),
            device=s.labels.get("device", ""),
            probe=s.labels.get("probe", ""),
            periods=s.value,
        )
        for s in found
    ]
    return tuple(sorted(stale, key=lambda s: -s.periods))


def as_json(fleet: Fleet) -> dict[str, Any]:
    """Return the object that `canaryd fleet --json` prints (docs/fleet.schema.json)."""
    told = {f.name: to_json(getattr(fleet, f.name)) for f in fields(fleet)}
    told["prometheus"] = told.pop("url")
    state = fleet.state
    return {
        "schema": SCHEMA,
        "state": state.value,
        "exit_code": verdict.exit_code(state),
        "answer": answer(fleet),
        **told,
    }


def answer(fleet: Fleet) -> str:
    """Return the first sentence, which says whether this fleet's numbers may be trusted."""
    bad = [
        (fleet.states.get("faulty", 0), "faulty device", "faulty devices"),
        (fleet.states.get("suspect", 0), "suspect device", "suspect devices"),
        (len(fleet.accused), "device outvoted by its equals", "devices outvoted by their equals"),
    ]
    open_ = [
        (fleet.states.get("unknown", 0), "unknown device", "unknown devices"),
        (len(fleet.silent), "silent node", "silent nodes"),
        (len(fleet.disputed), "disputed vote", "disputed votes"),
        (len(fleet.problems), "problem", "problems"),
    ]
    if found := [_many(*entry) for entry in bad if entry[0]]:
        return f"Not all of it can be trusted: {', '.join(found)}."
    if found := [_many(*entry) for entry in open_ if entry[0]]:
        return f"Not known of all of it: {', '.join(found)}."
    if degraded := fleet.states.get("degraded", 0):
        return f"Yes so far: {_many(degraded, 'device is', 'devices are')} degraded, and no number is wrong."
    return "Yes: every device is healthy, and no vote says otherwise."


def as_text(fleet: Fleet, width: int) -> str:
    """Return the fleet for people: the answer, the bad news, then the census; lists are cut at `SHOWN`."""
    devices = ", ".join(f"{count:,} {state}" for state, count in fleet.states.items() if count)
    lines = [
        f"{fleet.state.value.upper()}  {answer(fleet)}",
        f"{_many(fleet.nodes, 'node', 'nodes')}; devices: {devices or 'none'}; as of {moment(fleet.now)}"
        if fleet.now
        else f"{_many(fleet.nodes, 'node', 'nodes')}",
    ]
    vote = f"vote: {fleet.decided:,} of {_many(fleet.groups, 'group', 'groups')} of equals have a majority"
    if fleet.duplicates:
        vote += f"; {_many(fleet.duplicates, 'device has', 'devices have')} no vote, for two targets show the same uuid"
    lines.append(vote)
    for title, entries in _sections(fleet):
        if entries:
            lines += ["", title, *_cut(entries, width)]
    return "\n".join(printable(line) for line in lines)


def _sections(fleet: Fleet) -> Iterator[tuple[str, list[str]]]:
    yield "problems", list(fleet.problems)
    yield "outvoted by equals (hardware, by device or by node)", [_told_odd(o) for o in fleet.accused]
    yield (
        "suspect and faulty by their own canaryd",
        [
            f"{d.instance}  {d.device}  {d.model}  {d.state}: "
            + (", ".join(f"{f['rule']} ({f['cause']})" for f in d.findings) or "no finding says why")
            + (", outvoted as well" if any((o.instance, o.device) == (d.instance, d.device) for o in fleet.odd) else "")
            for d in fleet.doubted
        ],
    )
    yield "results differ and nobody is accused", [_told_dispute(d) for d in fleet.disputed]
    yield (
        "silent nodes",
        [
            f"{s.instance} ({s.job}): "
            + ("does not answer" if s.why == "down" else "not a target any more, heard today")
            for s in fleet.silent
        ],
    )
    yield (
        "stalest evidence",
        [
            f"{s.instance}  {s.device}  {s.probe}: {s.periods:.1f} periods{', stale' if s.periods > STALE else ''}"
            for s in fleet.stalest
        ],
    )
    yield (
        "stacks that agree within and differ from each other (software, no alarm)",
        [f"{x.get('model', '')}  {x.get('probe', '')}" for x in fleet.stacks_differ],
    )
    yield (
        "devices by model and stack",
        [
            f"{s.devices:>7,}  {s.labels.get('model', 'no model')}  stack {s.labels.get('stack', '')}  "
            + ", ".join(f"{k} {v}" for k, v in s.labels.items() if k not in ("model", "stack"))
            for s in fleet.stacks
        ],
    )
    yield "canaryd", [f"{count:>7,}  {version}" for version, count in sorted(fleet.versions.items())]


def _told_odd(odd: Odd) -> str:
    probes = ", ".join(sorted({x["probe"] for x in odd.results}))
    whole = "; so is every voting device of its node" if odd.scope == "node" else ""
    return f"{odd.instance}  {odd.device}  {odd.model}: odd in {probes}{whole}"


def _told_dispute(dispute: Disputed) -> str:
    sides = []
    for side in dispute.sides:
        more = side.nodes - len(side.some_nodes)
        where = ", ".join(side.some_nodes) + (f" and {more:,} more" if more > 0 else "")
        sides.append(f"{side.fingerprint}: {_many(side.votes, 'vote', 'votes')} ({where})")
    kind = "several nodes share another result than the majority" if dispute.majority else "no majority"
    return f"{dispute.model}  {dispute.probe}  stack {dispute.stack}: {kind}: {'; '.join(sides[:4])}" + (
        f"; and {len(sides) - 4:,} other results" if len(sides) > 4 else ""
    )


def _cut(entries: Sequence[str], width: int) -> Iterator[str]:
    for entry in entries[:SHOWN]:
        lead = "  " + " " * (len(entry) - len(entry.lstrip()))
        first, *rest = wrapped(lead, entry.lstrip(), width) or [""]
        yield first
        yield from (f"    {line.lstrip()}" for line in rest)
    if len(entries) > SHOWN:
        yield f"  and {len(entries) - SHOWN:,} more; --json has them all"


def _many(count: int, one: str, several: str) -> str:
    return f"{count:,} {one if count == 1 else several}"
