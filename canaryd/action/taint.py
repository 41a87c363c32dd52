"""Taint one faulty GPU of a node in Kubernetes: `python3 -m canaryd.action.taint`, a process and account of its own.

It asks the gate as `canaryd gate` does, finds the GPU in the ResourceSlices and writes a DeviceTaintRule for that
one device (docs/enforcement.md). The first effect of a rule is None, which does nothing: it takes a place in the queue.
Since every node raises only rules that stand early enough in the queue, all nodes together keep to the share.
"""

from __future__ import annotations

import calendar
import hashlib
import itertools
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from canaryd.action.kubernetes import ACCOUNT, Api, ApiError, Json, in_pod
from canaryd.action.watch import Turns, asking, node_name, options
from canaryd.report import gate

SLICES = "/apis/resource.k8s.io/v1/resourceslices"
RULES = "/apis/resource.k8s.io/v1beta2/devicetaintrules"
EFFECTS = ("None", "NoSchedule", "NoExecute")
"""What a rule does, in the order in which a rule is raised."""
KEY, NODE, UUID = "canaryd.io/faulty", "canaryd.io/node", "canaryd.io/uuid"
"""Key of the taint; annotations of a rule: the node that wrote it, and the device that it is about."""
IDENTITIES = ("uuid", "parentUUID")
"""Attributes of a published device that name the GPU, or the GPU of which it is a part."""


class Selector(NamedTuple):
    """What selects one device in a cluster."""

    driver: str
    pool: str
    device: str


class Write(NamedTuple):
    """A request that changes a rule."""

    method: str
    path: str
    body: Json | None
    said: str


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """What the API server says."""

    published: Mapping[Selector, Mapping[str, Json]]
    """Selector → the device ("device"), and what published it ("spec")."""
    rules: Sequence[Json]

    def of(self, node: str, uuid: str) -> list[Selector]:
        """Return the places of a GPU on a node."""
        mine = [p for p, found in self.published.items() if found["spec"].get("nodeName") == node]
        return [place for place in mine if uuid in self.uuids(place)]

    def uuids(self, place: Selector) -> set[str]:
        """Return what a published device calls itself; nothing if none is published there."""
        attributes = self.published.get(place, {}).get("device", {}).get("attributes") or {}
        named = {name.rpartition("/")[2]: value.get("string", "") for name, value in attributes.items()}
        return {named[name] for name in IDENTITIES if named.get(name)}

    def out(self, rule: Json) -> set[Selector]:
        """Return the devices of its driver that are out of service, or will be, once a rule of ours acts."""
        selected = {place for place in self.published for r in self.rules if _before(r, rule) and _selects(r, place)}
        drivers = {p for p, found in self.published.items() if any(map(_acts, found["device"].get("taints") or ()))}
        return {place for place in selected | drivers | {_place(rule)} if place.driver == _place(rule).driver}

    def allowed(self, driver: str, share: float) -> int:
        """Return how many devices of a driver may be out of service."""
        return math.floor(share * sum(place.driver == driver for place in self.published) + 1e-9)


def _of(node: str, cluster: Cluster) -> dict[Selector, Json]:
    """Return the rules that a node wrote."""
    return {_place(r): r for r in cluster.rules if (r["metadata"].get("annotations") or {}).get(NODE) == node}


def _acts(taint: Json) -> bool:
    return taint.get("effect") in EFFECTS[1:]


def _before(rule: Json, of: Json) -> bool:
    """Return whether a rule counts before a rule of ours: an older one of ours always, others' if they act."""
    taint = rule["spec"]["taint"]
    return bool(_turn(rule) <= _turn(of)) if taint["key"] == KEY else _acts(taint)


def _turn(rule: Json) -> tuple[str, str]:
    return rule["metadata"].get("creationTimestamp", ""), rule["metadata"]["name"]


def _place(rule: Json) -> Selector:
    selector = rule["spec"].get("deviceSelector") or {}
    return Selector(*(selector.get(name, "") for name in Selector._fields))


def _selects(rule: Json, place: Selector) -> bool:
    selector = rule["spec"].get("deviceSelector")
    return selector is not None and all(not want or want == has for want, has in zip(_place(rule), place, strict=True))


def look(api: Api) -> Cluster:
    """Return what the API server publishes, of each pool the newest generation. Raises `ApiError`."""
    try:
        slices = [each["spec"] for each in api.items(SLICES)]
        newest: dict[tuple[str, str], int] = {}
        for spec in slices:
            pool = spec["driver"], spec["pool"]["name"]
            newest[pool] = max(newest.get(pool, 0), spec["pool"]["generation"])
        published = {
            Selector(spec["driver"], spec["pool"]["name"], device["name"]): {"device": device, "spec": spec}
            for spec in slices
            if spec["pool"]["generation"] == newest[spec["driver"], spec["pool"]["name"]]
            for device in spec.get("devices") or ()
        }
        rules = api.items(RULES)
        for rule in rules:
            _turn(rule), _place(rule), rule["spec"]["taint"]["key"], rule["spec"]["taint"]["effect"]
    except (KeyError, TypeError, AttributeError) as error:
        raise ApiError(f"an object of {SLICES} or {RULES} has another shape: {error!r}") from error
    return Cluster(published=published, rules=rules)


def _name(place: Selector) -> str:
    return f"canaryd-{hashlib.sha256('/'.join(place).encode()).hexdigest()[:20]}"


def rule_for(place: Selector, node: str, item: gate.Item) -> Json:
    """Return a new rule that does nothing yet. Raises `ValueError` for an empty part: it would select many devices."""
    if not all(place):
        raise ValueError(f"{place}: a rule without driver, pool and device would taint more than one device")
    return {
        "apiVersion": "resource.k8s.io/v1beta2",
        "kind": "DeviceTaintRule",
        "metadata": {
            "name": _name(place),
            "annotations": {NODE: node, UUID: item.device},
        },
        "spec": {
            "deviceSelector": place._asdict(),
            "taint": {"key": KEY, "value": item.cause.value, "effect": EFFECTS[0]},
        },
    }


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """How far rules go."""

    effect: str = EFFECTS[0]
    """The last effect of a rule."""
    share: float = 0.05
    """Largest part of a driver's devices in the cluster that may be out of service."""
    step: float = 300.0
    """Seconds for which a rule keeps an effect before it gets the next."""


def plan(answer: gate.Answer, silence: str, node: str, cluster: Cluster, limits: Bounds, now: float) -> list[Write]:
    """Return the changes that the gate's answer asks for; one without a method only says why nothing is changed."""
    own = _of(node, cluster)
    if silence:
        return [_withdrawn(rule, f"enforcement is silenced ({silence})") for rule in own.values()]
    items = {item.device: item for item in answer.devices}
    found = _failing(items, cluster, node)
    wanted = {place: items[device] for device, places in found.items() for place in places}
    moved = {new: rule for place, rule in own.items() for new in _moved(place, rule, items, cluster, node)}
    standing = [(place, rule) for place, rule in own.items() if place not in wanted and place not in moved]
    ended = [(rule, why) for place, rule in standing if (why := _over(place, rule, items, cluster, node))]
    anew = {place: item for place, item in wanted.items() if place in own or place not in moved}
    return [
        *_unpublished(found, items, node),
        *(_carried(place, rule) for place, rule in moved.items() if place not in own),
        *itertools.starmap(_withdrawn, ended),
        *(_wanted(place, item, own.get(place), cluster, node, limits, now) for place, item in anew.items()),
    ]


def _failing(items: Mapping[str, gate.Item], cluster: Cluster, node: str) -> dict[str, list[Selector]]:
    return {device: cluster.of(node, device) for device, item in items.items() if item.decision == gate.FAIL}


def _unpublished(found: Mapping[str, list[Selector]], items: Mapping[str, gate.Item], node: str) -> list[Write]:
    lost = [device for device, places in found.items() if not places]
    return [Write("", "", None, f"{items[device]}: no ResourceSlice of {node} has {device}") for device in lost]


def _moved(place: Selector, rule: Json, items: Mapping[str, gate.Item], cluster: Cluster, node: str) -> list[Selector]:
    """Return the places to which the GPU of a rule has moved, unless it is healthy and proven."""
    uuid = rule["metadata"]["annotations"].get(UUID, "")
    passes = (item := items.get(uuid)) is not None and item.decision == gate.PASS
    return [] if passes or uuid in cluster.uuids(place) else cluster.of(node, uuid)


def _carried(place: Selector, rule: Json) -> Write:
    """Return the rule for the same GPU under another name, with the effect that it had."""
    taint = {key: value for key, value in rule["spec"]["taint"].items() if key != "timeAdded"}
    body = {
        "apiVersion": "resource.k8s.io/v1beta2",
        "kind": "DeviceTaintRule",
        "metadata": {"name": _name(place), "annotations": rule["metadata"]["annotations"]},
        "spec": {"deviceSelector": place._asdict(), "taint": taint},
    }
    return Write("POST", RULES, body, f"{_place(rule).device} is {place.device} now: tainted ({taint['effect']})")


def _wanted(
    place: Selector, item: gate.Item, rule: Json | None, cluster: Cluster, node: str, limits: Bounds, now: float
) -> Write:
    if rule is None:
        return Write("POST", RULES, rule_for(place, node, item), f"{item}: tainted {place.device} (None)")
    return _raised(rule, cluster, limits, now) or Write("", "", None, "")


def _over(place: Selector, rule: Json, items: Mapping[str, gate.Item], cluster: Cluster, node: str) -> str:
    """Return why a rule ends, or "". Names of devices move, so it is about a GPU and not about a name."""
    uuid = rule["metadata"]["annotations"].get(UUID, "")
    here, item = cluster.uuids(place), items.get(uuid)
    if item is not None and item.decision == gate.PASS:
        return f"{item.name} is healthy and proven"
    if cluster.of(node, uuid) or (item is not None and here):
        return "" if uuid in here else f"{place.device} is another GPU now"
    proven = [i.name for found in here if (i := items.get(found)) and i.decision == gate.PASS]
    return f"{proven[0]}, in its place, is healthy and proven" if item is None and proven else ""


def _raised(rule: Json, cluster: Cluster, limits: Bounds, now: float) -> Write | None:
    taint, name, place = rule["spec"]["taint"], rule["metadata"]["name"], _place(rule)
    at = EFFECTS.index(taint["effect"]) if taint["effect"] in EFFECTS else len(EFFECTS)
    if at >= EFFECTS.index(limits.effect) or now - _epoch(taint.get("timeAdded"), now) < limits.step:
        return None
    out, allowed = len(cluster.out(rule)), cluster.allowed(place.driver, limits.share)
    if at == 0 and out > allowed:
        of = sum(each.driver == place.driver for each in cluster.published)
        said = f"{place.device} stays at None: {out} of {of} devices would be out, {allowed} may be"
        return Write("", "", None, said)
    new = {key: value for key, value in taint.items() if key != "timeAdded"} | {"effect": EFFECTS[at + 1]}
    body = {**rule, "spec": {**rule["spec"], "taint": new}}
    return Write("PUT", f"{RULES}/{name}", body, f"{place.device}: {EFFECTS[at + 1]}")


def _epoch(text: str | None, unknown: float) -> float:
    try:
        return calendar.timegm(time.strptime((text or "")[:19], "%Y-%m-%dT%H:%M:%S"))
    except ValueError:
        return unknown


def _withdrawn(rule: Json, why: str) -> Write:
    return Write(
        "DELETE", f"{RULES}/{rule['metadata']['name']}", None, f"{_place(rule).device}: taint withdrawn, {why}"
    )


@dataclass(kw_only=True)
class Writer(Turns):
    """The rules of one node."""

    node: str
    api: Api
    limits: Bounds
    clear: bool = False
    """Whether no rule of this node stands: then a healthy node asks the API server nothing."""

    def act(self, answer: gate.Answer, silence: str, now: float) -> Iterator[str]:
        """Change the rules as the gate's answer asks for, and yield a line for each change."""
        failing = [item for item in answer.devices if item.decision == gate.FAIL]
        if silence:
            yield from (f"would taint {item} (log only: {silence})" for item in failing)
        if self.clear and (silence or not failing):
            return
        self.clear, cluster = False, look(self.api)
        writes = plan(answer, silence, self.node, cluster, self.limits, now)
        for write in writes:
            if write.method:
                self.api.call(write.method, write.path, write.body)
        self.clear = not writes and not _of(self.node, cluster)
        yield from (write.said for write in writes if write.said)


def main(words: Sequence[str] | None = None) -> None:
    """Keep the rules of this node, for ever."""
    parser = options("taint", "Taint faulty GPUs of this node.")
    parser.add_argument("--effect", choices=EFFECTS, default=Bounds.effect, help="the last effect of a rule")
    parser.add_argument("--share", type=float, default=Bounds.share, help="part of a driver's devices that may be out")
    parser.add_argument("--step", type=float, default=Bounds.step, metavar="SECONDS", help="between two effects")
    parser.add_argument("--api", default=in_pod(os.environ), metavar="URL")
    parser.add_argument("--account", type=Path, default=ACCOUNT, metavar="DIR")
    given = parser.parse_args(words)
    if not 0 <= given.share <= 1:
        parser.error(f"--share {given.share:g}: write a part from 0 to 1, such as 0.05 for one device in twenty")
    api, limits = (
        Api(address=given.api, account=given.account),
        Bounds(effect=given.effect, share=given.share, step=given.step),
    )
    Writer(api=api, node=node_name(parser), limits=limits, ask=asking(given.config)).run(given.every)


if __name__ == "__main__":
    main()
