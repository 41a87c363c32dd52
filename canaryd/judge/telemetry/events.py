"""Turn two polls, or a line of the kernel log, into events. Pure functions.

Not every poll is kept, so events hold all that the rules need beyond the newest readings: what rose, fell, changed, was
reset, and which condition held for how long.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from canaryd.facts import LogRecord, Reading, Unread, reading_key
from canaryd.judge.telemetry import xids
from canaryd.judge.telemetry.readings import READINGS, in_words
from canaryd.model import Event, EventKind, Run

STEP = 3 * 15.0
"""Longest time in seconds that one poll stands for: three of the default periods (ours)."""
NVLINK5 = (144, 145, 146, 147, 148, 149, 150)
"""Xids that are graded by the words of their message, not by their code."""
LARGEST = 2.0**64
"""No counter of a driver is wider; a larger value is no reading of a device."""
JUMP, DIMM_JUMP = 100, 10
"""Corrected errors between two polls that call for an exact test: of an accelerator, of a memory module (ours)."""
RESET_SHOWN_BY = ("energy_joules_total", "ecc_errors_total")
"""Counters whose fall shows a reset: nothing else restarts them, except an operator who clears ECC counts."""
RESET_SINCE = "since"
"""Of a reset's fields: seconds since the epoch of the poll before it."""
HOST_SUMS = ("throttle_events_total", "machine_check_exceptions_total")
"""Counters summed over the online processors: they move when a processor goes offline or comes back."""
HOST_COUNTERS = (*HOST_SUMS, "edac_errors_total")
"""Counters whose fall shows no reset: the boot id shows a reboot of the host."""
LOAD = 0.5
"""Share of time in use above which a link should run at full speed (ours): many links slow down when idle."""
PRESSURE = 0.1
"""Share of a minute in which every task waits for memory (ours): a tenth of all time is lost."""
HARMFUL = {
    "hw_slowdown": "heat or power",
    "hw_thermal": "heat",
    "hw_power_brake": "the power supply",
    "sw_thermal": "heat",
}
"""Reasons for lower clocks that point to heat or power, in words. Idleness and software's power cap do not."""
FLAGS = frozenset(
    {
        *("ecc_enabled", "ecc_sram_threshold_exceeded", "row_remap_pending", "row_remap_failed"),
        *("retired_pages_pending", "persistence_mode", "mig_enabled"),
        *("nvlink_up", "fabric_ready", "fabric_fault", "pcie_width", "pcie_width_max"),
    }
)
"""Gauges whose change is an event."""
WORDS = frozenset({"recovery_action", "clock_source", "device_health"})
"""Gauges that are always 1 and carry their value in a label; a change is an event."""
FAILED = frozenset({8, 10, 11, 14, 999})
"""Codes of NVML by which the driver fails to read what it has for the device: no external power, no answer in time, a
problem of interrupts, a corrupted InfoROM, an unknown error. Any other says that device, driver, setting or rights do
not offer it (ours): not supported, no permission, a call or version that is not known, a reset that is awaited."""
SENSOR_LIMITS = {"core": "slowdown", "memory": "memory_max"}
"""Sensor → NVIDIA's threshold at which the device slows down; elsewhere the chip's own "<sensor>_crit"."""
Facts = Mapping[str, Reading]
"""Readings by key; numbers only."""


def changes(before: Run, after: Run, failed: float = 0.0) -> list[Event]:
    """Return what happened between two completed polls of one probe on one device; `after` is the newer.

    `failed`: when the newest poll between them began, which failed; 0.0 for none.

    A counter rose at an unknown time between the two, so its event begins with the older poll; `within` shares it out.
    A reset has the time of the newer poll, by which it was over, and in `fields` that of the poll before it: equal
    events of an hour are merged, and the newest one's beginning must be known. Where polls failed, a reset ended that.
    """
    old, new = numbers(before), numbers(after)
    event = partial(Event, device=after.device, first=min(before.started, after.started), last=after.started)
    counters = [k for k, r in new.items() if k in old and r.name in READINGS and READINGS[r.name].type == "counter"]
    fallen = [k for k in counters if float(new[k].value) < float(old[k].value)]
    restarted = _restarted(old, new, [k for k in counters if READINGS[new[k].name].volatile], fallen)
    events = [*_counter_events(old, new, counters, restarted, event)]
    if restarted:
        # The rules must know of an uncorrected error that a reset cleared, so it is named before any other.
        key = min(restarted, key=lambda k: (new[k].labels.get("kind") != "uncorrected", k))
        was, now = _text(old[key]), _text(new[key])
        reset = event(
            kind=EventKind.RESET,
            name="driver or device",
            before=f"{key} {was}",
            after=f"{key} {now}",
            detail=f"{in_words(key)} fell from {was} to {now}",
            reading=new[key].name,
            labels=new[key].labels,
        )
        events.append(
            replace(reset, first=after.started, fields={RESET_SINCE: repr(min(max(reset.first, failed), reset.last))})
        )
    was_set, is_set = _flags(old), _flags(new)
    for key, (reading, value) in is_set.items():
        if key in was_set and was_set[key][1] != value:
            was = was_set[key][1]
            text = f"{in_words(key)} changed from {was} to {value}"
            flag = event(kind=EventKind.FLAG, name=key, before=was, after=value, detail=text, reading=reading.name)
            events.append(replace(flag, labels=reading.labels if reading.name in FLAGS else {}))
    if (seconds := min(after.started - before.started, STEP)) > 0:
        since = after.started - seconds
        events += _conditions(new, partial(event, kind=EventKind.CONDITION, first=since, count=seconds))
    return events


def _counter_events(
    old: Facts, new: Facts, counters: Sequence[str], restarted: Sequence[str], event: partial[Event]
) -> list[Event]:
    """Return the rises of counters, and the falls that no reset explains: one event for all of a volatile name."""
    online = (f.get("cpu_cores{state=online}") for f in (old, new))
    was_online, is_online = (0.0 if r is None else float(r.value) for r in online)
    events: list[Event] = []
    cleared: dict[str, list[str]] = {}
    for key in counters:
        reading, was, now = new[key], _text(old[key]), _text(new[key])
        rise = float(reading.value) - (0.0 if key in restarted else float(old[key].value))
        if rise < 0:
            cleared.setdefault(reading.name if READINGS[reading.name].volatile else key, []).append(key)
        came_back = 0 < was_online < is_online and reading.name in HOST_SUMS
        if rise > 0 and _is_judged(reading) and not came_back:
            text = f"{in_words(key)} rose by {rise:g}"
            rose = event(kind=EventKind.COUNTER, name=key, count=rise, before=was, after=now, detail=text)
            events.append(replace(rose, reading=reading.name, labels=reading.labels))
    for name, keys in cleared.items():
        reading, was, now = new[keys[0]], _text(old[keys[0]]), _text(new[keys[0]])
        text = f"{in_words(keys[0])} fell from {was} to {now}"
        text += f", and {len(keys) - 1} more of its kind" if len(keys) > 1 else ""
        fell = event(kind=EventKind.COUNTER_FELL, name=name, before=was, after=now, detail=text, reading=reading.name)
        events.append(replace(fell, labels={} if READINGS[reading.name].volatile else reading.labels))
    return events


def _restarted(old: Facts, new: Facts, volatile: Sequence[str], fallen: Sequence[str]) -> Sequence[str]:
    """Return the counters that a reset restarted; none where less than a reset explains the fall.

    Some counters can be cleared one by one, and some wrap. Where no counter is read that every reset restarts, most of
    the others must fall.
    """
    mine = [k for k in volatile if new[k].name not in HOST_COUNTERS and float(old[k].value) > 0]
    down = [k for k in mine if k in fallen]
    if decisive := [k for k in mine if new[k].name in RESET_SHOWN_BY]:
        return down if any(k in down for k in decisive) else []
    return down if len(down) > 1 and 2 * len(down) > len(mine) else []


def within(event: Event, start: float, end: float) -> float:
    """Return how much of an event's count falls after `start` and not after `end`, if it came at an even rate."""
    if event.last <= event.first:
        return event.count if start < event.last <= end else 0.0
    part = min(event.last, end) - max(event.first, start)
    return event.count * max(0.0, part) / (event.last - event.first)


def judged_values(run: Run) -> tuple[tuple[str, float | str], ...]:
    """Return the values whose change makes a poll worth storing at once: flags, and counters whose rise is an event."""
    facts = numbers(run)
    counts: dict[str, float | str] = {k: float(r.value) for k, r in facts.items() if _is_judged(r)}
    return tuple(sorted((counts | {k: value for k, (_, value) in _flags(facts).items()}).items()))


def unread(poll: Run, known: Mapping[str, tuple[Reading, float]]) -> tuple[Unread, ...]:
    """Return what a driver failed to give in a poll, of what is `known`: key → the newest reading, when it was read."""
    missed = {name for name, code in poll.codes.items() if code in FAILED}
    if not missed:
        return ()
    read, newest = {r.key for r in poll.readings}, dict[str, float]()
    for reading, at in known.values():
        newest[reading.name] = max(at, newest.get(reading.name, at))
    return tuple(
        Unread(reading=reading, at=at)
        for key, (reading, at) in known.items()
        # A whole name is missed with one code: of those that carry a word in a label, only the newest was there.
        if key not in read and (key in missed or (reading.name in missed and at == newest[reading.name]))
    )


def log_event(record: LogRecord, device: str) -> Event:
    """Return the event of a line of the kernel log.

    `before` and `after` are the place on the chip: a merged event has the first and the newest one. What changes the
    grade of a code from line to line is part of the name, so that only lines of equal grade are merged.
    """
    code = int(record.name) if record.kind in ("xid", "sxid") and record.name.isdecimal() else None
    place = " ".join(f"{k.upper()} {record.fields[k]}" for k in ("gpc", "tpc") if k in record.fields)
    return Event(
        device=device,
        kind=record.kind,
        name=" ".join(filter(None, (record.name, *_grading(record, code)))),
        first=record.at,
        last=record.at,
        before=place,
        after=place,
        detail=record.text,
        code=code,
        fields=record.fields,
    )


def _grading(record: LogRecord, code: int | None) -> tuple[str, ...]:
    """Return what grades the code of a line beside it.

    Severity of an SXid; unit, severity and table row of an NVLink 5 Xid; whether the port above reports an AER error.
    """
    severity = record.fields.get("severity", "")
    if record.kind == "aer" and "below" in record.fields:
        return ("port",)
    if record.kind == "sxid":
        return (severity,) if severity != "unknown" else ()
    if record.kind != "xid" or code not in NVLINK5:
        return ()
    unit, info, status = (record.fields.get(k, "") for k in ("unit", "intr_info", "error_status"))
    found = xids.decode(code, unit, info, status)
    return unit, severity, found.grade if found.rows else ""


def triggers(events: Iterable[Event]) -> str:
    """Return in few words why an exact test should run now on the device of these events; "" for no reason."""
    return ", ".join(list(dict.fromkeys(filter(None, map(_trigger, events))))[:3])


def _trigger(event: Event) -> str:
    if event.kind == "xid":
        xid = xids.explain(event.code)
        # Before a reboot no test can run: the boot itself is the trigger.
        calls = xid.grade not in ("none", "reboot")
        tells = xid.grade == "none" and xid.nature in ("either", "hardware")
        return f"Xid {event.code if event.code is not None else event.name}" if calls or tells else ""
    if event.kind == EventKind.CHANGE:
        return "" if event.after == "gone" else f"{event.name} changed"
    if event.kind == EventKind.COUNTER:
        return _trigger_of_counter(event)
    if event.kind == EventKind.CONDITION:
        return "throttled" if event.reading == "throttle_active" or event.name == "hot" else ""
    if event.name in ("corrected", "ras-corrected"):
        return ""
    reasons = {
        EventKind.RESET: "reset",
        EventKind.BOOT: "reboot",
        "mce": "machine check",
        "edac": "uncorrected ECC error",
    }
    reasons |= {"thermal": "throttled", "amdgpu": f"amdgpu {event.name}", "intel": f"Intel {event.name}"}
    return reasons.get(event.kind, "")


def _trigger_of_counter(event: Event) -> str:
    if event.labels.get("kind") == "uncorrected":
        return "uncorrected ECC error"
    if event.labels.get("kind") == "corrected":
        jump = DIMM_JUMP if "dimm" in event.labels else JUMP
        return "corrected errors jumped" if event.count >= jump else ""
    if event.labels.get("severity") in ("nonfatal", "fatal"):
        return "PCI Express error"
    reasons = {"machine_check_exceptions_total": "machine check", "device_recoveries_total": "reset"}
    reasons |= dict.fromkeys(("throttle_seconds_total", "throttle_events_total"), "throttled")
    return reasons.get(event.reading, "")


def numbers(run: Run) -> dict[str, Reading]:
    """Return the readings of a poll that are numbers a device can have, by key."""
    return {r.key: r for r in run.readings if is_number(r)}


def is_number(reading: Reading) -> bool:
    """Return whether a reading is a number that a device can have."""
    return isinstance(reading.value, (int, float)) and abs(reading.value) < LARGEST


def _is_judged(reading: Reading) -> bool:
    """Whether a rise of this counter is an event; idle and capped time rises at every poll and is judged by no rule."""
    kind = READINGS.get(reading.name)
    return kind is not None and kind.event and reading.labels.get("reason", "hw_slowdown") in HARMFUL


def _flags(facts: Facts) -> dict[str, tuple[Reading, str]]:
    """Return an event's name → (reading, value as text) for `FLAGS` and `WORDS`."""
    words = {r.name: (r, " ".join(r.labels.values())) for r in facts.values() if r.name in WORDS}
    return {k: (r, _text(r)) for k, r in facts.items() if r.name in FLAGS} | words


def _conditions(facts: Facts, event: partial[Event]) -> list[Event]:
    """Return an event for each condition that holds in a poll; `event` gives device, kind, time and count."""
    found = {**_slow_link(facts), **_hot(facts)}
    value = partial(_value, facts)
    pressure = value("pressure_ratio", resource="memory", kind="full")
    if pressure is not None and pressure >= PRESSURE:
        found["memory-pressure"] = (
            f"all tasks waited for memory {pressure:.0%} of the last minute (limit {PRESSURE:.0%})"
        )
    events = [event(name=name, detail=text) for name, text in found.items()]
    for reason, words in HARMFUL.items():
        # Where the time is counted, the counter tells it better.
        if value("throttle_active", reason=reason) and value("throttle_seconds_total", reason=reason) is None:
            text = f"{words} holds the clocks down ({reason})"
            held = event(name=f"throttle {reason}", detail=text, reading="throttle_active")
            events.append(replace(held, labels={"reason": reason}))
    return events


def _slow_link(facts: Facts) -> dict[str, str]:
    """Return the conditions of a PCIe link under load, by name, in words."""
    found, load = {}, _value(facts, "utilization_ratio", engine="gpu") or 0.0
    words = ("PCIe link uses {:g} of {:g} lanes", "PCIe link runs at generation {:g} of {:g}")
    for what, text in zip(("width", "generation"), words, strict=True):
        now, best = _value(facts, f"pcie_{what}"), _value(facts, f"pcie_{what}_max")
        if load > LOAD and now and best and now < best:
            found[f"pcie-{what}"] = f"{text.format(now, best)} at {load:.0%} load"
    return found


def _hot(facts: Facts) -> dict[str, str]:
    """Return the condition "hot" in words where a temperature is at the device's own threshold."""
    found = {}
    for reading in (r for r in facts.values() if r.name == "temperature_celsius"):
        sensor = reading.labels.get("sensor", "")
        for threshold in (SENSOR_LIMITS.get(sensor, ""), f"{sensor}_crit"):
            limit = _value(facts, "temperature_threshold_celsius", threshold=threshold)
            if limit and float(reading.value) >= limit:
                found["hot"] = f"sensor {sensor} at {reading.value:g} °C (limit {limit:g} °C)"
    margin = _value(facts, "temperature_margin_celsius")
    least = _value(facts, "temperature_margin_threshold_celsius", threshold="slowdown")
    if margin is not None and least is not None and margin <= least:
        past = f"{least - margin:g} °C past its" if margin < least else "at its"
        found["hot"] = f"{past} throttle point (margin {margin:g} °C, limit {least:g} °C)"
    return found


def _value(facts: Facts, name: str, **labels: str) -> float | None:
    reading = facts.get(reading_key(name, labels))
    return None if reading is None else float(reading.value)


def _text(reading: Reading) -> str:
    number = float(reading.value)
    return str(int(number)) if number.is_integer() else f"{number:.6g}"
