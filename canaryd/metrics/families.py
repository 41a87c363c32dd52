"""All metrics of canaryd, and the conversion of evidence to series.

`render` turns a snapshot of the evidence into bytes whenever the evidence changes; a scrape only sends prepared bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest

from canaryd import __version__
from canaryd.facts import Reading
from canaryd.judge.recordings.drift import Drift
from canaryd.judge.telemetry.readings import READINGS, metric
from canaryd.judge.telemetry.signals import Poll
from canaryd.metrics.exposition import OF_DEVICE, OF_PROBE, Exposition, Family, Page
from canaryd.model import Cause, Device, Outcome, Run, State, Verdict

STACK_KEYS = ("torch", "cuda", "cudnn", "driver", "blas", "onednn", "instruction_set", "kernel")
"""Parts of a software stack that `canaryd_stack_info` shows. Its label `stack` depends on more parts than these."""


FAMILIES: Mapping[str, Family] = {
    "canaryd_build_info": Family("gauge", ("version",), "Always 1; the labels say which canaryd runs."),
    "canaryd_device_present": Family("gauge", OF_DEVICE, "1 while the device is found, 0 while it is missing."),
    "canaryd_device_info": Family(
        "gauge",
        (*OF_DEVICE, "name", "backend", "serial", "bus_id", "identity", "parent"),
        "Always 1; identity is weak where the device label may name another part later; parent is the device "
        "that an instance belongs to.",
    ),
    "canaryd_devices_expected": Family(
        "gauge", (), "Accelerators that the configuration expects; absent when it does not say."
    ),
    "canaryd_device_state": Family(
        "gauge", (*OF_DEVICE, "state"), "1 for the state that the device is in, 0 for every other state."
    ),
    "canaryd_device_cause": Family(
        "gauge", (*OF_DEVICE, "cause"), "1 for the cause of the state that the device is in, 0 for every other cause."
    ),
    "canaryd_finding": Family(
        "gauge",
        (*OF_DEVICE, "rule", "state", "cause"),
        "Always 1; one series for each rule with a finding now; state healthy is a note.",
    ),
    "canaryd_device_verdict_timestamp_seconds": Family(
        "gauge", OF_DEVICE, "When the device was last judged, since the epoch; absent before the first verdict."
    ),
    "canaryd_device_state_since_timestamp_seconds": Family(
        "gauge", OF_DEVICE, "When the device entered its state, since the epoch; absent before the first verdict."
    ),
    "canaryd_device_acknowledged": Family(
        "gauge", OF_DEVICE, "1 while an operator's acknowledgement of the device's state is in force, 0 otherwise."
    ),
    "canaryd_device_acknowledged_timestamp_seconds": Family(
        "gauge", OF_DEVICE, "When the acknowledgement in force was given, since the epoch; absent if there is none."
    ),
    "canaryd_stack_info": Family(
        "gauge",
        (*OF_DEVICE, "stack", *STACK_KEYS),
        "Always 1; the software under the newest runs, one series for each distinct stack.",
    ),
    "canaryd_probe_period_seconds": Family("gauge", OF_PROBE, "Probe interval in seconds."),
    "canaryd_probe_runs_total": Family(
        "counter", (*OF_PROBE, "outcome"), "Test runs by how their process ended, whether results were right or not."
    ),
    "canaryd_probe_mismatches_total": Family("counter", OF_PROBE, "Wrong results among canaryd_probe_trials_total."),
    "canaryd_probe_trials_total": Family("counter", OF_PROBE, "Results that were compared with a known right answer."),
    "canaryd_probe_duration_seconds": Family(
        "gauge", OF_PROBE, "Wall time of the newest run, the worker's start excluded."
    ),
    "canaryd_probe_last_success_timestamp_seconds": Family(
        "gauge",
        OF_PROBE,
        "Start of the newest run that completed with every bit right, or of the newest poll that completed.",
    ),
    "canaryd_golden_fingerprint": Family(
        "gauge",
        (*OF_PROBE, "stack"),
        "An integer below 2^53 that healthy devices of one model share where probe and stack are equal; the stack "
        "label covers the probe's version too, and for recorded results the model and its settings.",
    ),
    "canaryd_recordings": Family(
        "gauge",
        (*OF_PROBE, "reading", "status"),
        "Cases without a known right answer, by status in the newest run: known bits, unknown bits, or still learning.",
    ),
    "canaryd_drift_ratio": Family(
        "gauge",
        (*OF_PROBE, "reading"),
        "Largest distance of a result from the nearest known one, divided by its tolerance; 0 while the bits are "
        "known, +Inf where a bit-stable case gave other bits.",
    ),
    "canaryd_recording_token_agreement": Family(
        "gauge",
        (*OF_PROBE, "reading"),
        "Smallest share of tokens before the first that differs from the nearest known answer.",
    ),
    "canaryd_recording_first_difference": Family(
        "gauge", (*OF_PROBE, "reading"), "Earliest token that differs, from 0 on; absent where none does."
    ),
    "canaryd_fault_rate_upper_bound": Family(
        "gauge", OF_PROBE, "Upper bound (95 %) of wrong results per compared result."
    ),
    "canaryd_budget_share_ratio": Family(
        "gauge", (), "Largest share of a device's time in an hour that tests may use: budget.share."
    ),
    "canaryd_budget_spent_seconds_total": Family(
        "counter",
        (*OF_DEVICE, "purpose"),
        "Device time that workers took since the daemon started (of a CPU: over all cores); purpose is round, "
        "forced (for the age of evidence), retest (later ones), or doubt (first retests, and tests after events).",
    ),
    "canaryd_budget_skipped_total": Family(
        "counter",
        (*OF_DEVICE, "reason"),
        "Postponed tests since the daemon started, by reason; each reason counts once per test.",
    ),
    "canaryd_budget_withheld": Family(
        "gauge", (*OF_DEVICE, "reason"), "Always 1; why a due test on the device is postponed now."
    ),
    "canaryd_drill_device_state": Family(
        "gauge", (*OF_DEVICE, "state"), "Like canaryd_device_state, from injected faults only; absent without a drill."
    ),
    "canaryd_drill_runs_total": Family("counter", OF_PROBE, "Runs with an injected fault; counted nowhere else."),
    "canaryd_drill_mismatches_total": Family("counter", OF_PROBE, "Wrong results of drills; counted nowhere else."),
    "canaryd_xid_errors_total": Family(
        "counter", (*OF_DEVICE, "xid"), "Xid messages of the NVIDIA driver in the kernel log, by code."
    ),
    "canaryd_sxid_errors_total": Family(
        "counter", (*OF_DEVICE, "sxid"), "SXid messages of NVSwitches in the kernel log, by code; on the host's device."
    ),
    "canaryd_kernel_log_events_total": Family(
        "counter", (*OF_DEVICE, "kind", "name"), "Other lines of the kernel log that concern a device's health."
    ),
    "canaryd_stack_changes_total": Family(
        "counter",
        (*OF_DEVICE, "component"),
        "Changes of driver, firmware, place or software that were found, by component.",
    ),
    "canaryd_readings_absent": Family(
        "gauge", OF_PROBE, "Readings that the device does not provide; canaryd check --json lists them with the reason."
    ),
    **{metric(name): Family(kind.type, (*OF_DEVICE, *kind.labels), kind.help) for name, kind in READINGS.items()},
    "canaryd_kernel_log_readable": Family("gauge", (), "1 while the kernel log is read, 0 while it cannot be."),
    "canaryd_kernel_log_lost_records_total": Family(
        "counter", (), "Records of the kernel log that were lost before they were read, since the daemon started."
    ),
    "canaryd_device_handles_held": Family(
        "gauge", (), "1 while canaryd keeps devices open between polls because persistence mode is off."
    ),
    "canaryd_released": Family("gauge", (), "1 while `canaryd release` keeps canaryd away from every device."),
    "canaryd_store_problem": Family("gauge", (), "1 while results cannot be written to disk, 0 otherwise."),
    "canaryd_workers_abandoned_total": Family(
        "counter", (), "Workers that survived SIGKILL and were abandoned, since the daemon started."
    ),
    "canaryd_config_last_reload_successful": Family("gauge", (), "1 if the configuration was read without problems."),
    "canaryd_config_last_reload_success_timestamp_seconds": Family(
        "gauge", (), "When the configuration in use was read, since the epoch."
    ),
}
"""Every metric that `render` can write, in this order. docs/metrics.md lists the same metrics; a test compares both."""


XIDS = ("13", "31", "43", "45", "48", "62", "63", "64", "74", "79", "92", "94", "95", "119", "120", "140", "143", "154")
"""Xids (NVIDIA's error numbers) with a series that starts at 0 on every NVIDIA device, so that `increase()` sees the
first such error. Series of other Xids start with their first error."""
COMPONENTS = ("bus_id", "driver", "serial", "torch", "vbios")
"""Components whose counter of changes starts at 0 on every device, so that `increase()` sees the first change."""

Counters = Mapping[tuple[str, frozenset[tuple[str, str]]], float]
"""The store's persistent counters: (name, label items) → count."""
Labels = tuple[str, str, str]
"""The values of the labels `OF_DEVICE`."""


@dataclass(frozen=True, kw_only=True)
class DeviceView:
    """All data about one device that the page shows."""

    device: Device
    present: bool
    verdict: Verdict | None
    """The device's verdict; None appears on the page as state unknown and cause undetermined."""
    drill_verdict: Verdict | None = None
    last_runs: Mapping[str, Run]
    """Probe → its newest run."""
    last_success: Mapping[str, float]
    """Probe → start (epoch s) of its newest run that found nothing wrong."""
    fault_rate: Mapping[str, float]
    """Probe → upper bound of the fraction of its compared results that are wrong."""
    fingerprints: Mapping[tuple[str, str], int]
    """(probe, stack label) → fingerprint, which a float holds exactly. Only values with equal keys are comparable."""
    periods: Mapping[str, float] = field(default_factory=dict)
    """Probe planned for the device → seconds between two runs. The probe's counters are 0 before its first run, so that
    `increase()` sees a first mismatch."""
    stacks: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Stack id → software that the newest run of each instruction set used."""
    acknowledged: bool = False
    """Whether an operator's acknowledgement covers the present state."""
    acknowledged_at: float | None = None
    """Time (epoch s) of the acknowledgement in force, or None if there is none."""
    polls: Mapping[str, Poll] = field(default_factory=dict)
    """Telemetry probe → its polls."""
    drifts: Sequence[Drift] = ()
    """Distances of the newest recordings from their baselines."""
    spent: Mapping[str, float] = field(default_factory=dict)
    """Purpose → seconds of device time used; empty for an endpoint, which has no budget."""
    skipped: Mapping[str, int] = field(default_factory=dict)
    """Reason → number of postponed tests; empty for an endpoint."""
    withheld: str = ""
    """The reason why a due test is postponed now, or "" if none is."""
    readings: Sequence[Reading] = ()
    """Readings of fresh polls and the newest runs. A reading is ignored if it is no metric or has other labels than its
    metric."""


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The evidence at one moment."""

    values: Mapping[str, float]
    """Metric without labels → its value; one that is left out does not appear."""
    devices: Sequence[DeviceView]
    counters: Counters


def page_of(snapshot: Snapshot) -> Exposition:
    """Return `snapshot` as a page for scrapes, followed by the metrics `process_*` of this process as they are now."""
    return Exposition(render(snapshot) + generate_latest(_PROCESS))


def render(snapshot: Snapshot) -> bytes:
    """Return `snapshot` in the text format.

    A missing device keeps its series of presence, identity and verdict, because an alarm must not end when the part is
    gone. Counters of devices that are not in the snapshot are left out.
    """
    page = Page(FAMILIES)
    page.add("canaryd_build_info", 1, __version__)
    for name, value in snapshot.values.items():
        page.add(name, value)
    counted: dict[str, set[str]] = {}
    tallies: dict[str, list[tuple[str, dict[str, str], float]]] = {}
    for (name, items), count in snapshot.counters.items():
        of = dict(items)
        if "probe" in of:
            counted.setdefault(of.get("device", ""), set()).add(of["probe"])
        else:
            tallies.setdefault(of.get("device", ""), []).append((name, of, count))
    for view in snapshot.devices:
        device = view.device
        labels = (device.uuid, str(device.index), device.model)
        identity = "weak" if device.weak_identity else "strong"
        page.add("canaryd_device_present", view.present, *labels)
        page.add(
            "canaryd_device_info",
            1,
            *labels,
            device.name,
            device.backend,
            device.detail.get("serial", ""),
            device.detail.get("bus_id", ""),
            identity,
            device.parent,
        )
        _add_verdict(page, view, labels)
        if view.present:
            _add_tallies(page, device, tallies.get(device.uuid, []), labels)
            _add_telemetry(page, view, snapshot.counters, labels)
            _add_budget(page, view, labels)
            probes = counted.get(device.uuid, set()).union(
                view.periods, view.last_runs, view.last_success, view.fault_rate
            )
            _add_evidence(page, view, sorted(probes - view.polls.keys()), snapshot.counters, labels)
    return page.text()


def _add_verdict(page: Page, view: DeviceView, labels: Labels) -> None:
    verdict = view.verdict
    page.add_set("canaryd_device_state", verdict.state if verdict else State.UNKNOWN, *labels)
    page.add_set("canaryd_device_cause", verdict.cause if verdict else Cause.UNDETERMINED, *labels)
    if verdict:
        for rule, state, cause in sorted({(f.rule, f.state.value, f.cause.value) for f in verdict.findings}):
            page.add("canaryd_finding", 1, *labels, rule, state, cause)
        page.add("canaryd_device_verdict_timestamp_seconds", verdict.decided, *labels)
        page.add("canaryd_device_state_since_timestamp_seconds", verdict.since, *labels)
    page.add("canaryd_device_acknowledged", view.acknowledged, *labels)
    if view.acknowledged_at is not None:
        page.add("canaryd_device_acknowledged_timestamp_seconds", view.acknowledged_at, *labels)


def _add_tallies(
    page: Page, device: Device, tallies: Sequence[tuple[str, Mapping[str, str], float]], labels: Labels
) -> None:
    """Add the counters of events in `tallies`: (name, labels, count). An entry with damaged labels is left out.

    The counters of `XIDS` and `COMPONENTS` start at 0, so that `increase()` sees the first event.
    """
    xids = dict.fromkeys(XIDS, 0.0) if device.backend == "cuda" and not device.parent else {}
    components = {key: 0.0 for key in COMPONENTS if key in device.detail}
    for name, of, count in tallies:
        if name == "xid_errors" and "xid" in of:
            xids[of["xid"]] = count
        elif name == "sxid_errors" and "sxid" in of:
            page.add("canaryd_sxid_errors_total", count, *labels, of["sxid"])
        elif name == "kernel_log_events" and {"kind", "name"} <= of.keys():
            page.add("canaryd_kernel_log_events_total", count, *labels, of["kind"], of["name"])
        elif name == "stack_changes" and "component" in of:
            components[of["component"]] = count
    for xid, count in sorted(xids.items()):
        page.add("canaryd_xid_errors_total", count, *labels, xid)
    for component, count in sorted(components.items()):
        page.add("canaryd_stack_changes_total", count, *labels, component)


def _add_telemetry(page: Page, view: DeviceView, counters: Counters, labels: Labels) -> None:
    for probe, poll in sorted(view.polls.items()):
        _add_outcomes(page, view.device, probe, counters, labels)
        page.add("canaryd_probe_period_seconds", poll.period, *labels, probe)
        page.add("canaryd_readings_absent", len(poll.completed.absent) if poll.completed else 0, *labels, probe)
        if poll.newest:
            page.add("canaryd_probe_duration_seconds", poll.newest.seconds, *labels, probe)
        if poll.completed:
            page.add("canaryd_probe_last_success_timestamp_seconds", poll.completed.started, *labels, probe)
    for reading in {r.key: r for r in view.readings}.values():  # two series of one name would cost the whole page
        kind = READINGS.get(reading.name)
        if kind and reading.labels.keys() == {*kind.labels} and isinstance(reading.value, (int, float)):
            page.add(
                metric(reading.name), float(reading.value), *labels, *(reading.labels[label] for label in kind.labels)
            )


def _add_budget(page: Page, view: DeviceView, labels: Labels) -> None:
    for purpose, seconds in view.spent.items():
        page.add("canaryd_budget_spent_seconds_total", seconds, *labels, purpose)
    for reason, count in view.skipped.items():
        page.add("canaryd_budget_skipped_total", count, *labels, reason)
    if view.withheld:
        page.add("canaryd_budget_withheld", 1, *labels, view.withheld)


def _add_outcomes(page: Page, device: Device, probe: str, counters: Counters, labels: Labels) -> None:
    for outcome in Outcome:
        of = {"device": device.uuid, "probe": probe, "outcome": outcome.value}
        runs = counters.get(("probe_runs", frozenset(of.items())), 0)
        page.add("canaryd_probe_runs_total", runs, *labels, probe, outcome.value)


def _add_evidence(page: Page, view: DeviceView, probes: Sequence[str], counters: Counters, labels: Labels) -> None:
    if view.drill_verdict:
        page.add_set("canaryd_drill_device_state", view.drill_verdict.state, *labels)
    for stack_id, stack in sorted(view.stacks.items()):
        page.add("canaryd_stack_info", 1, *labels, stack_id, *(stack.get(key, "") for key in STACK_KEYS))
    for probe in probes:
        of = {"device": view.device.uuid, "probe": probe}
        _add_outcomes(page, view.device, probe, counters, labels)
        for name in ("probe_mismatches", "probe_trials", "drill_runs", "drill_mismatches"):
            page.add(f"canaryd_{name}_total", counters.get((name, frozenset(of.items())), 0), *labels, probe)
        if probe in view.periods:
            page.add("canaryd_probe_period_seconds", view.periods[probe], *labels, probe)
        if probe in view.last_runs:
            page.add("canaryd_probe_duration_seconds", view.last_runs[probe].seconds, *labels, probe)
        if probe in view.last_success:
            page.add("canaryd_probe_last_success_timestamp_seconds", view.last_success[probe], *labels, probe)
        if probe in view.fault_rate:
            page.add("canaryd_fault_rate_upper_bound", view.fault_rate[probe], *labels, probe)
    for drift in view.drifts:
        for status, count in drift.status.items():
            page.add("canaryd_recordings", count, *labels, drift.probe, drift.reading, status)
        if drift.status["known"] or drift.status["unknown"]:
            page.add("canaryd_drift_ratio", drift.ratio, *labels, drift.probe, drift.reading)
            page.add("canaryd_recording_token_agreement", drift.agreement, *labels, drift.probe, drift.reading)
        if drift.first is not None:
            page.add("canaryd_recording_first_difference", drift.first, *labels, drift.probe, drift.reading)
    for (probe, stack_id), fingerprint in sorted(view.fingerprints.items()):
        page.add("canaryd_golden_fingerprint", fingerprint, *labels, probe, stack_id)


_PROCESS = CollectorRegistry()
ProcessCollector(registry=_PROCESS)
