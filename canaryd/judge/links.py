"""Wrong data on links: which end of a link is at fault, and which link of a processor is the only wrong one.

A link has two ends, and both are suspects. If one of them is also wrong with a third device, that one is at fault.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from canaryd.facts import Comparison, Place
from canaryd.judge.cause import Mismatch, Scene, names
from canaryd.model import Device

Ends = Mapping[str, frozenset[str]]
"""Device → the devices with which its links were wrong."""


def wrong_ends(mismatches: Mapping[str, Sequence[Mismatch]]) -> Ends:
    """Return device → the devices at the other ends of its wrong links, from device → mismatches."""
    found: dict[str, set[str]] = defaultdict(set)
    for uuid, listed in mismatches.items():
        for mismatch in listed:
            if peer := mismatch.comparison.peer:
                found[uuid].add(peer)
                found[peer].add(uuid)
    return {uuid: frozenset(peers) for uuid, peers in found.items()}


def errs_with_a_third(ends: Ends, uuid: str) -> bool:
    """Return whether a device's links to two or more others are wrong, and no other link of these others is wrong."""
    peers = ends.get(uuid, frozenset())
    return len(peers) > 1 and all(ends[peer] == {uuid} for peer in peers)


def is_link(place: Place) -> bool:
    """Return whether a place is one link, with both its ends."""
    return place.unit == "link" and len(place.numbers) == 2


def links_of(ends: Ends, uuid: str, known: Mapping[str, Device], mismatches: Sequence[Mismatch]) -> Scene:
    """Return the facts about a device's wrong links: which end is at fault, if that is known."""
    peers = names(known[p].name if p in known else p for p in {m.comparison.peer for m in mismatches})
    if errs_with_a_third(ends, uuid):
        return Scene(named=f"Data between it and {peers} is wrong; its peers are right with all others.")
    return Scene(disputed=f"data between it and {peers} is wrong; either end or the link may be at fault.")


def lone_link(mismatches: Sequence[Mismatch]) -> str:
    """Return a sentence that names the only wrong link between cores, or the only core with wrong links; else ""."""
    accused = {m.comparison.place for m in mismatches}
    if not all(map(is_link, accused)) or any(m.comparison.peer for m in mismatches):
        return ""
    runs = {id(m.run): m.run for m in mismatches}.values()
    right = _right(c for run in runs for c in run.comparisons) - accused
    if len(accused) == 1:
        return _alone(accused.pop(), len(right)) if right else ""
    shared = set.intersection(*(set(place.numbers) for place in accused))
    far = {place for place in right if not shared & set(place.numbers)}
    return _alone(f"core {shared.pop()}", len(far)) if len(shared) == 1 and far else ""


def _alone(what: Place | str, others: int) -> str:
    right = "the other link" if others == 1 else f"{others} other links"
    return f"Only {what} is wrong: {right} carried the same data correctly."


def _right(comparisons: Iterable[Comparison]) -> set[Place]:
    """Return the links that carried data correctly at least once and never wrongly."""
    listed = [c for c in comparisons if is_link(c.place)]
    return {c.place for c in listed} - {c.place for c in listed if c.wrong}
