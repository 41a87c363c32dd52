"""The same story told otherwise: other names, another order, one more sibling, one more wrong result."""

from __future__ import annotations

import math
import random
from dataclasses import replace

from tests.story.catalogue import EXACT
from tests.story.format import Fault, Happening, Machine, Part, Story, listed, numbered


def reordered(story: Story, seed: int) -> Story:
    """Return the story with other uuids, and with each machine's devices in another order.

    Where devices move to slots that the story names, they keep their order.
    """
    told = replace(story, salt=f"other {seed}")
    if any(happening.do == "move" for happening in story.events):
        return told
    shuffle = random.Random(seed).shuffle
    machines = []
    for machine in story.hosts:
        parts = [replace(part, name=name, count=1) for part in machine.devices for name in numbered(part)]
        before = list(parts)
        while parts == before and len(parts) > 1:
            shuffle(parts)
        parts.sort(key=lambda part: bool(part.card))  # a card is named by one that stands before it
        machines.append(replace(machine, devices=tuple(parts)))
    return replace(told, hosts=tuple(machines))


def with_sibling(story: Story) -> Story | None:
    """Return the story with one more clean GPU in each machine, like its first.

    None where no machine has a GPU, and where what goes wrong strikes every device, or gives the same wrong bits on all
    of several like it: it would not be clean.
    """
    if any(fault.device == "*" and fault.kind != "golden" for fault in story.faults):  # a golden is the host's
        return None
    machines, like = [], {}
    for number, machine in enumerate(story.hosts):
        part = next((p for p in machine.devices if p.backend == "cuda" and p.present and p.reached), None)
        if part is None:
            machines.append(machine)
            continue
        sibling = replace(part, name=f"sibling{number}", count=1)
        like[sibling.name] = _alike(machine, part)
        expected = None if machine.expected is None else machine.expected + 1
        machines.append(replace(machine, devices=(*machine.devices, sibling), expected=expected))
    shared = [{*listed(fault.device, ())} for fault in story.faults if fault.same]
    if not like or any(len(alike) > 1 and alike <= devices for alike in like.values() for devices in shared):
        return None
    events = [_joined(happening, like) for happening in story.events]
    return replace(story, hosts=tuple(machines), events=tuple(events))


def _alike(machine: Machine, part: Part) -> set[str]:
    """Return the names of the devices that are like a part."""
    same = (part.backend, part.model)
    return {name for p in machine.devices if (p.backend, p.model) == same and p.present for name in numbered(p)}


def _joined(happening: Happening, like: dict[str, set[str]]) -> Happening:
    """Return the event, with the siblings in it too where all that are like them get other software."""
    if happening.do != "stack" or isinstance(happening.device, str):
        return happening
    also = [sibling for sibling, alike in like.items() if alike <= {*happening.device}]
    return replace(happening, device=(*happening.device, *also))


def wrong_once_more(story: Story, device: str, at: int) -> Story:
    """Return the story with one more wrong upload on a device, of one round."""
    once = Fault(kind="upload", device=device, after=at, until=at + 1, times=1, bits=(5,), row=7, column=9, probe=EXACT)
    return replace(story, faults=(*story.faults, once))


def settled(story: Story) -> int:
    """Return the round from which on nothing begins, ends or happens; the number of rounds where that is never so."""
    if any(fault.temperature_above > -math.inf for fault in story.faults):
        return story.rounds
    begun = [fault.after for fault in story.faults] + [happening.at for happening in story.events]
    ended = [fault.until for fault in story.faults] + [h.at + h.rounds for h in story.events]
    return max((0, *begun, *(end for end in ended if end < story.rounds)))
