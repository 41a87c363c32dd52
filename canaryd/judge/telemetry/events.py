"""What happened: from two polls, or a line of the kernel log, to events. Pure functions.

Polls are not all kept, so everything that a rule of `canaryd.telemetry` needs beyond the newest values comes out of
here: what rose, fell, changed, was reset, and what held for how long.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial

from canaryd.judge.telemetry import xids
from canaryd.judge.telemetry.readings import READINGS
from canaryd.model import Event, LogRecord, Reading, Run, reading_key

STEP = 3 * 15.0
"""Longest time in seconds that one poll speaks for: three of the default periods (ours)."""
NVLINK5 = ("144", "145", "146", "147", "148", "149", "150")
"""Xids whose words, and not whose code, say how bad it is."""
LARGEST = 2.0**64
"""No counter of a driver is wider; what is larger is no number of a device."""
JUMP, DIMM_JUMP = 100, 10
"""Corrected errors between two polls that call for exact goldens: an accelerator's, a memory module's (ours)."""
RESET_SHOWN_BY = ("energy_joules_total", "ecc_errors_total")
"""Counters whose fall is a reset: nothing else makes them start again, except an operator who clears ECC counts."""
HOST_SUMS = ("throttle_events_total", "machine_check_exceptions_total")
"""Counters over the processors that are online: they move when one is taken offline or comes back."""
HOST_COUNTERS = (*HOST_SUMS, "edac_errors_total")
"""Counters whose fall is no reset: that the host was started again, its boot id tells."""
LOAD = 0.5
"""Share of time in use above which a link should be at full speed (ours): many links slow down when idle."""
PRESSURE = 0.1
"""Share of a minute in which every task waits for memory (ours): a tenth of all time is lost."""
HARMFUL = ("hw_slowdown", "hw_thermal", "hw_power_brake", "sw_thermal")
"""Reasons for lower clocks that tell of heat or power. Idleness, settings and a cap by software tell nothing."""
FLAGS = frozenset(
    {
        *("ecc_enabled", "ecc_sram_threshold_exceeded", "row_remap_pending", "row_remap_failed"),
        *("retired_pages_pending", "persistence_mode", "mig_enabled", "nvlink_up", "fabric_ready", "pcie_width_max"),
    }
)
"""Gauges whose change is an event."""
WORDS = frozenset({"recovery_action", "clock_source", "device_health"})
"""Gauges that are always 1 and say what they say in their label; a change is an event."""
SENSOR_LIMITS = {"core": "slowdown", "memory": "memory_max"}
"""Sensor → NVIDIA's threshold at which the device slows down; elsewhere the chip's own "<sensor>_crit"."""
Facts = Mapping[str, Reading]
"""Readings by key; numbers only."""


def changes(before: Run, after: Run) -> list[Event]:
    """Return what happened between two completed polls of one probe on one device; `after` is the newer.

    A rise came at some time between the two, so its event begins with the older poll; `within` shares it out. A reset
    is dated by the newer one.
    """
    old, new = numbers(before), numbers(after)
    event = partial(Event, device=after.device, first=min(before.started, after.started), last=after.started)
    counters = [k for k, r in new.items() if k in old and r.name in READINGS and READINGS[r.name].type == "counter"]
    fallen = [k for k in counters if float(new[k].value) < float(old[k].value)]
    anew = _anew(old, new, [k for k in counters if READINGS[new[k].name].volatile], fallen)
    online = (f.get("cpu_cores{state=online}") for f in (old, new))
    was_online, is_online = (0.0 if r is None else float(r.value) for r in online)
    events: list[Event] = []
    cleared: dict[str, list[str]] = {}
    for key in counters:
        was, now = _text(old[key]), _text(new[key])
        rise = float(new[key].value) - (0.0 if key in anew else float(old[key].value))
        if rise < 0:
            cleared.setdefault(new[key].name if READINGS[new[key].name].volatile else key, []).append(key)
        back = 0 < was_online < is_online and new[key].name in HOST_SUMS
        if rise > 0 and _telling(new[key]) and not back:
            text = f"{key} rose by {rise:g}"
            events.append(event(kind="counter", name=key, count=rise, before=was, after=now, detail=text))
    for name, keys in cleared.items():
        was, now = _text(old[keys[0]]), _text(new[keys[0]])
        text = f"{keys[0]} fell from {was} to {now}"
        text += f", and {len(keys) - 1} more of its kind" if len(keys) > 1 else ""
        events.append(event(kind="counter-fell", name=name, before=was, after=now, detail=text))
    if anew:
        # An uncorrected error that a reset wiped out must be known to the rules, so it is named before any other.
        key = min(anew, key=lambda k: ("kind=uncorrected" not in k, k))
        was, now = _text(old[key]), _text(new[key])
        text = f"{key} fell from {was} to {now}"
        was, now = f"{key} {was}", f"{key} {now}"
        reset = event(kind="reset", name="driver or device", before=was, after=now, detail=text)
        events.append(replace(reset, first=after.started))
    was_set, is_set = _flags(old), _flags(new)
    events += [
        event(kind="flag", name=k, before=was_set[k], after=v, detail=f"{k}: {was_set[k]} → {v}")
        for k, v in is_set.items()
        if k in was_set and was_set[k] != v
    ]
    if (seconds := min(after.started - before.started, STEP)) > 0:
        since = after.started - seconds
        events += [
            event(kind="condition", name=n, first=since, count=seconds, detail=t) for n, t in _conditions(new).items()
        ]
    return events


def _anew(old: Facts, new: Facts, volatile: Sequence[str], fallen: Sequence[str]) -> Sequence[str]:
    """Return the counters that a reset made start anew; none where it takes less than a reset to explain the fall.

    Some counters can be cleared by themselves, and some wrap. Where no counter can tell that rises with every reset,
    it takes most of them.
    """
    mine = [k for k in volatile if new[k].name not in HOST_COUNTERS and float(old[k].value) > 0]
    down = [k for k in mine if k in fallen]
    if telling := [k for k in mine if new[k].name in RESET_SHOWN_BY]:
        return down if any(k in down for k in telling) else []
    return down if len(down) > 1 and 2 * len(down) > len(mine) else []


def within(event: Event, start: float, end: float) -> float:
    """Return how much of an event's count falls after `start` and not after `end`, as if it had come evenly."""
    if event.last <= event.first:
        return event.count if start < event.last <= end else 0.0
    part = min(event.last, end) - max(event.first, start)
    return event.count * max(0.0, part) / (event.last - event.first)


def watched(run: Run) -> tuple[tuple[str, float | str], ...]:
    """Return what makes a poll worth storing at once, by value: flags, and counters whose rise is an event."""
    facts = numbers(run)
    shown: dict[str, float | str] = {k: float(r.value) for k, r in facts.items() if _telling(r)}
    return tuple(sorted((shown | _flags(facts)).items()))


def happened(record: LogRecord, device: str) -> Event:
    """Return the event that a line of the kernel log tells: fields stand after the text, in braces.

    `before` and `after` are the place on the chip, so that of merged events the first and the newest one are known.
    What grades a code differently from one line to the next is part of the name: only what is graded alike is merged.
    """
    fields = {k: v for k, v in sorted(record.fields.items()) if re.fullmatch(r"[^\s{},=]+", f"{k}{v}")}
    place = " ".join(f"{k.upper()} {fields[k]}" for k in ("gpc", "tpc") if k in fields)
    return Event(
        device=device,
        kind=record.kind,
        name=" ".join(filter(None, (record.name, *_grading(record, fields)))),
        first=record.at,
        last=record.at,
        before=place,
        after=place,
        detail=f"{record.text} {reading_key('', fields)}".strip(),
    )


def _grading(record: LogRecord, fields: Mapping[str, str]) -> tuple[str, ...]:
    """Return what a line says that grades its code: an NVSwitch's severity; unit, severity and table of an Xid."""
    severity = fields.get("severity", "")
    if record.kind == "sxid":
        return (severity,) if severity != "unknown" else ()
    if record.kind != "xid" or record.name not in NVLINK5:
        return ()
    unit, info, status = (fields.get(k, "") for k in ("unit", "intr_info", "error_status"))
    found = xids.decode(int(record.name), unit, info, status)
    return unit, severity, found.grade if found.rows else ""


def triggers(events: Iterable[Event]) -> str:
    """Return in few words why exact goldens should run now on the device of these events; "" for no reason."""
    return ", ".join(list(dict.fromkeys(filter(None, map(_trigger, events))))[:3])


def _trigger(event: Event) -> str:
    name, labels = taken_apart(event.name)
    if event.kind == "xid":
        xid = xids.explain(xid_code(event))
        # Before a reboot there is nothing to ask: the boot itself is the trigger.
        asked = xid.grade not in ("none", "reboot")
        tells = xid.grade == "none" and xid.nature in ("either", "hardware")
        return f"Xid {name.partition(' ')[0]}" if asked or tells else ""
    if event.kind == "change":
        return "" if event.after == "gone" else f"{name} changed"
    if event.kind == "counter":
        if labels.get("kind") == "uncorrected":
            return "uncorrected ECC error"
        if labels.get("kind") == "corrected":
            return "corrected errors jumped" if event.count >= (DIMM_JUMP if "dimm" in labels else JUMP) else ""
        if labels.get("severity") in ("nonfatal", "fatal"):
            return "PCI Express error"
        reasons = {"machine_check_exceptions_total": "machine check", "device_recoveries_total": "reset"}
        return reasons.get(name, "throttled" if "throttle" in name else "")
    if event.kind == "condition":
        return "throttled" if name.startswith(("throttle", "hot")) else ""
    if event.name in ("corrected", "ras-corrected"):
        return ""
    reasons = {"reset": "reset", "boot": "reboot", "mce": "machine check", "edac": "uncorrected ECC error"}
    reasons |= {"thermal": "throttled", "amdgpu": f"amdgpu {event.name}"}
    return reasons.get(event.kind, "")


def numbers(run: Run) -> dict[str, Reading]:
    """Return the readings of a poll that are numbers a device can have, by key."""
    return {r.key: r for r in run.readings if isinstance(r.value, (int, float)) and abs(r.value) < LARGEST}


def _telling(reading: Reading) -> bool:
    """Whether a rise of this counter is an event. The idle and the capped would give one at every poll, for nothing."""
    kind = READINGS.get(reading.name)
    return kind is not None and kind.event and reading.labels.get("reason", HARMFUL[0]) in HARMFUL


def _flags(facts: Facts) -> dict[str, str]:
    words = {r.name: " ".join(r.labels.values()) for r in facts.values() if r.name in WORDS}
    return {k: _text(r) for k, r in facts.items() if r.name in FLAGS} | words


def _conditions(facts: Facts) -> dict[str, str]:
    """Return what holds now and comes and goes: the condition's name → in words."""

    def value(name: str, **labels: str) -> float | None:
        reading = facts.get(reading_key(name, labels))
        return None if reading is None else float(reading.value)

    found = {}
    load = value("utilization_ratio", engine="gpu") or 0.0
    if load > LOAD:
        width, lanes = value("pcie_width"), value("pcie_width_max")
        if width and lanes and width < lanes:
            found["pcie-width"] = f"{width:g} of {lanes:g} lanes at {load:.0%} load"
        generation, best = value("pcie_generation"), value("pcie_generation_max")
        if generation and best and generation < best:
            found["pcie-generation"] = f"generation {generation:g} of {best:g} at {load:.0%} load"
    for reading in (r for r in facts.values() if r.name == "temperature_celsius"):
        sensor = reading.labels.get("sensor", "")
        for threshold in (SENSOR_LIMITS.get(sensor, ""), f"{sensor}_crit"):
            limit = value("temperature_threshold_celsius", threshold=threshold)
            if limit and float(reading.value) >= limit:
                found["hot"] = f"{sensor} at {reading.value:g} °C, its limit is {limit:g} °C"
    margin = value("temperature_margin_celsius")
    least = value("temperature_margin_threshold_celsius", threshold="slowdown")
    if margin is not None and least is not None and margin <= least:
        found["hot"] = f"{margin:g} °C left of the margin, it slows down at {least:g} °C"
    for reason in HARMFUL:
        if value("throttle_active", reason=reason) and value("throttle_seconds_total", reason=reason) is None:
            found[f"throttle {reason}"] = f"held down by {reason}"
    pressure = value("pressure_ratio", resource="memory", kind="full")
    if pressure is not None and pressure >= PRESSURE:
        found["memory-pressure"] = f"all tasks waited for memory {pressure:.0%} of the last minute"
    return found


def _text(reading: Reading) -> str:
    number = float(reading.value)
    return str(int(number)) if number.is_integer() else f"{number:.6g}"


@lru_cache(maxsize=4096)
def taken_apart(key: str) -> tuple[str, Mapping[str, str]]:
    """Return name and labels of a `Reading.key`."""
    name, _, inside = key.removesuffix("}").partition("{")
    return name, dict(pair.split("=", 1) for pair in inside.split(",") if "=" in pair)


def has(key: str, name: str, labels: Mapping[str, str]) -> bool:
    """Return whether a `Reading.key` is of a name and has at least these labels."""
    found, own = taken_apart(key)
    return found == name and labels.items() <= own.items()


def xid_code(event: Event) -> int:
    """Return the code of an Xid's event; -1 for what is none."""
    code = event.name.partition(" ")[0]
    return int(code) if re.fullmatch(r"[0-9]{1,5}", code) else -1


def fields_of(event: Event) -> Mapping[str, str]:
    """Return the fields that `happened` put behind the text."""
    return taken_apart(event.detail[event.detail.rfind(" {") + 1 :])[1]
