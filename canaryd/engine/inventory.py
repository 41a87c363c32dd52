"""The devices of this machine, and the changes since the last discovery.

There are two sources: the vendors' libraries under canaryd's interpreter, and torch under the stack under test. `merge`
makes one list of both; `changes` returns the differences. Both are pure functions.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from canaryd.config.judge_policy import JudgePolicy
from canaryd.config.settings import Config
from canaryd.engine import endpoints
from canaryd.judge import acks
from canaryd.judge.watch import is_over
from canaryd.model import (
    NO_CUDA,
    NO_CUDA_CODE,
    SHARED,
    TORCH,
    UNDRIVEN,
    UNIDENTIFIED,
    UNSEEN,
    UNSEEN_CODE,
    Ack,
    Device,
    Event,
    EventKind,
    State,
    Verdict,
)
from canaryd.store.devices import DeviceRecord
from canaryd.store.store import Store
from canaryd.supervisor.protocol import Description, Listing, Reach

BACKEND_OF_MODULE = {"nvidia": "cuda", "amd": "rocm", "intel": "xpu", "ascend": "npu", "apple": "mps"}
"""Vendor module → backend of its devices."""
STACK = ("torch", "blas", "mkl", "onednn", "kernel")
"""Keys of `Description.stack` whose changes the inventory reports."""
OF_NOW = (UNSEEN, UNSEEN_CODE, SHARED, UNIDENTIFIED)
"""Keys of `Device.detail` that are valid for one inventory only."""
UNREMARKABLE = ("boot_id", "cores", UNDRIVEN, *OF_NOW)
"""Keys of `Device.detail` whose change makes no event: a reboot has its own, and usable cores are not hardware."""


def is_included(device: Device, config: Config) -> bool:
    """Return whether the configuration includes a device.

    `devices.include` must be empty or name the device. The device's runtime or endpoint must be configured.
    """
    if not device.is_hardware and device.uuid.partition(":")[2] not in endpoints.named(config):
        return False
    if device.runtime != TORCH and device.runtime not in config.worker.runtimes.each:
        return False
    wanted = config.devices.include
    return not wanted or any(w in (device.uuid, device.name, device.backend) for w in wanted)


def remembered(
    record: DeviceRecord,
    store: Store,
    here: Collection[str],
    config: Config,
    now: float,
    acknowledged: Iterable[Ack] = (),
    *,
    verdict: Verdict | None,
) -> bool:
    """Return whether a device is still known: its uuid is in `here`, or it disappeared recently and not on purpose.

    A device that the configuration leaves out is not known. `acknowledged`: the operators' acknowledgements. `verdict`:
    the newest verdict on the device. `now`: epoch s. A disappearance is recent until the daemon has tested other
    devices here on as many days as the judge watches a suspect.
    """
    device = record.device
    if not is_included(device, config):
        return False
    if device.uuid in here or not device.is_hardware:  # an endpoint exists because it is configured
        return True
    planned = device.uuid in config.devices.absent or UNDRIVEN in device.detail
    planned |= acks.retired(device, acknowledged, record.last_seen)
    # The GPU was divided differently, so its old instances are gone; a doubted one is still reported. A faulty one is a
    # part of a GPU that is still here.
    divided_anew, state = device.parent in here, None if verdict is None else verdict.state
    planned |= divided_anew and not (verdict is not None and verdict.doubted)
    stays = divided_anew and state is State.FAULTY
    return not planned and (stays or not _outlived(record, store, here, now, config.judge))


def _outlived(record: DeviceRecord, store: Store, here: Collection[str], now: float, policy: JudgePolicy) -> bool:
    """Return whether the devices `here` were tested for `policy.watch` seconds since the device was last seen.

    Only days with tests count: a machine that was off, or a clock that jumped, does not make a device forgotten.
    """
    if now - record.last_seen < policy.watch:
        return False
    since, days = max(record.last_seen, now - 3 * policy.watch), set[int]()
    for uuid in here:
        days |= {day.day for day in store.days(uuid, since) if day.tested}
        if is_over(record.last_seen, now, policy.watch, days, policy.stale_after):
            return True
    return False


@dataclass(frozen=True, kw_only=True)
class Found:
    """The result of an inventory."""

    devices: tuple[Device, ...]
    uncertain: frozenset[str]
    """Backends that could not be listed; a known device of one of them may still be present."""


def bus_key(bus_id: str) -> str:
    """Return a PCI address in one form without its function: "00000000:65:00.0" → "0000:65:00"; else ""."""
    match = re.fullmatch(r"(?:([0-9a-fA-F]{4,8}):)?([0-9a-fA-F]{2}):([0-9a-fA-F]{2})(?:\.[0-7])?", bus_id.strip())
    if not match:
        return ""
    domain = int(match[1] or "0", 16)
    return f"{domain:04x}:{match[2]}:{match[3]}".lower()


def merge(
    described: Description,
    listing: Listing,
    known: Mapping[str, Device],
    here: Collection[str] = (),
    runtimes: Mapping[str, Reach] | None = None,
) -> Found:
    """Return one list of the devices that torch, the vendors' libraries and other runtimes see.

    `known` are the devices of earlier inventories; those with uuids in `here` were present at the last one. A device
    that both torch and a vendor see gets the vendor's index and identity, torch's number, and the facts of both. Known
    facts that cannot be read now are kept.
    """
    from_torch = list(described.devices)
    from_vendors = [d for devices in listing.devices.values() for d in devices if UNDRIVEN not in d.detail]
    cuda = any(d.backend == "cuda" for d in from_torch)
    divided = {d.parent for d in from_vendors if d.parent}
    found = []
    for device in from_vendors:
        twin = next((t for t in from_torch if _same(device, t)), None)
        if twin is not None:
            from_torch.remove(twin)
        if twin is not None and device.uuid not in divided:  # else CUDA gave an instance under its GPU's uuid
            # NVML's and torch's uuids differ at most by a prefix; for other vendors a worker needs torch's.
            uuid = device.uuid if twin.weak_identity or device.backend == "cuda" else twin.uuid
            detail = {**twin.detail, **device.detail}
            device = replace(device, uuid=uuid, torch_index=twin.torch_index, detail=detail)  # noqa: PLW2901
        elif device.parent and cuda:
            # CUDA shows a process only one instance. Its worker gets this one, which is number 0 there.
            device = replace(device, torch_index=0)  # noqa: PLW2901
        elif device.backend in ("cuda", "rocm") and (why := described.stack.get(NO_CUDA)):
            told = {UNSEEN: why, UNSEEN_CODE: described.stack.get(NO_CUDA_CODE, "")}
            device = replace(device, detail={**device.detail, **told})  # noqa: PLW2901
        found.append(device)
    for device in from_torch:  # torch counts those that no vendor lists together with those above: names stay unique
        taken = {d.index for d in found if d.backend == device.backend}
        free = next(n for n in itertools.chain([device.index], itertools.count()) if n not in taken)
        found.append(replace(device, index=free))
    # A device that was present before is missed under its own name, not as an unknown one in its place.
    missed = [d for uuid, d in known.items() if uuid in here]
    named = [d for d in (*found, *missed) if UNDRIVEN not in d.detail]
    claimed = {place for d in named for place in (bus_key(d.detail.get("bus_id", "")), d.name)}
    unnamed = [d for devices in listing.devices.values() for d in devices if UNDRIVEN in d.detail]
    for device in sorted(unnamed, key=lambda d: UNIDENTIFIED not in d.detail):  # its driver knows more than the bus
        place = bus_key(device.detail.get("bus_id", "")) or device.name
        if place not in claimed:
            claimed.add(place)
            vendor = next(name for name, backend in BACKEND_OF_MODULE.items() if backend == device.backend)
            why = listing.unavailable.get(vendor, "its driver does not list it")
            why = device.detail[UNDRIVEN] if UNIDENTIFIED in device.detail else why
            found.append(replace(device, detail={**device.detail, UNDRIVEN: why}))
    stack = {key: described.stack[key] for key in STACK if key in described.stack}
    # Torch shows only one instance of a divided GPU, and no device that a variable hides. Where something of the vendor
    # is installed, only the vendor's list is complete.
    failing = {BACKEND_OF_MODULE[name] for name in listing.failing if name in BACKEND_OF_MODULE}
    asked = {BACKEND_OF_MODULE[name] for name in listing.devices if name in BACKEND_OF_MODULE}
    asked |= {d.backend for d in described.devices} - failing
    silent = {BACKEND_OF_MODULE[name] for name in listing.unavailable if name in BACKEND_OF_MODULE}
    if described.torch is None:
        silent |= {*BACKEND_OF_MODULE.values()}
    if not described.devices:  # no worker: it lists the processor in any case
        silent.add("cpu")
    seen = [_filled(d, stack, listing, known) for d in found]
    seen += [on_its_card(d, found) for reach in (runtimes or {}).values() for d in reach.devices]
    lost = {name for name, reach in (runtimes or {}).items() if reach.problem}
    silent |= {d.backend for d in known.values() if d.runtime in lost}
    return Found(devices=tuple(seen), uncertain=frozenset(silent - asked))


def on_its_card(device: Device, others: Iterable[Device]) -> Device:
    """Return a device of another runtime, with `card` set to the uuid of the device in `others` on the same card.

    The match is by uuid, by PCI address, or because a Mac has one GPU. A processor's runtime sets the card itself.
    Without a match, the identity is marked as weak.
    """
    if device.card:
        return device
    uuid, bus = device.detail.get("gpu_uuid", "").lower(), bus_key(device.detail.get("bus_id", ""))
    macs = [other for other in others if other.backend == "mps"]
    same = [
        other.uuid
        for other in others
        if UNDRIVEN not in other.detail
        and not other.parent
        and ((uuid and other.uuid.lower() == uuid) or (bus and bus_key(other.detail.get("bus_id", "")) == bus))
    ]
    same = same or [other.uuid for other in macs if device.unit == "metal" and len(macs) == 1]
    if same:
        return replace(device, card=same[0])
    why = "not known: the runtime gives no uuid and no PCI address that another device here has"
    return replace(device, weak_identity=True, detail={**device.detail, "card": why})


def _filled(device: Device, stack: Mapping[str, str], listing: Listing, known: Mapping[str, Device]) -> Device:
    before = known.get(device.uuid)
    kept = {name: value for name, value in before.detail.items() if name not in OF_NOW} if before else {}
    facts = {**stack, **listing.facts} if device.backend == "cpu" else {k: stack[k] for k in ("torch",) if k in stack}
    if before is not None and device.backend != "cpu" and "driver" in kept.keys() - device.detail.keys():
        # Only torch sees it this time; what torch calls its model, memory or address is no change of any.
        return replace(device, model=before.model, index=before.index, detail={**device.detail, **kept, **facts})
    return replace(device, detail={**kept, **facts, **device.detail})


def _same(device: Device, other: Device) -> bool:
    """Return whether a vendor's and torch's device are the same: by uuid without prefix, bus address, or else index."""
    if device.backend != other.backend:
        return False
    if device.uuid.partition("-")[2].lower() == other.uuid.partition("-")[2].lower():
        return True
    if device.backend == "cuda":
        return False
    bus, other_bus = (bus_key(d.detail.get("bus_id", "")) for d in (device, other))
    if bus and other_bus:
        return bus == other_bus
    return device.index == other.index  # torch does not know its place, and has a name of its own for it


def changes(
    known: Mapping[str, Device],
    here: Collection[str],
    found: Iterable[Device],
    gone: Sequence[DeviceRecord],
    now: float,
) -> list[Event]:
    """Return the changes since the last discovery: one event per component, with its values before and after.

    `known` are the devices before it; those with uuids in `here` were present then. The first discovery on a machine
    reports no change, and a component that could not be read did not change. A device in `gone` disappeared at an
    unknown time after it was last seen, so its event lasts from that time to `now`.
    """
    events = []
    for device in found:
        before = known.get(device.uuid)
        if before is None:
            if known and UNDRIVEN not in device.detail:
                events.append(_change(device, "device", "", "found", f"{device.name} ({device.model}) is new", now))
            continue
        if device.uuid not in here and UNDRIVEN not in device.detail:
            events.append(_change(device, "device", "gone", "found", f"{device.name} ({device.model}) is back", now))
        for key in sorted(before.detail.keys() & device.detail.keys() - {*UNREMARKABLE}):
            old, new = before.detail[key], device.detail[key]
            if old != new:
                events.append(_change(device, key, old, new, f"{key}: {old} → {new}", now))
    for record in gone:
        text = f"{record.device.name} ({record.device.model}) is gone"
        event = _change(record.device, "device", "found", "gone", text, now)
        events.append(replace(event, first=min(record.last_seen, now)))
    return events


def _change(device: Device, name: str, before: str, after: str, detail: str, now: float) -> Event:
    changed = Event(device=device.uuid, kind=EventKind.CHANGE, name=name, first=now, last=now)
    return replace(changed, before=before, after=after, detail=detail)
