"""The judgement of telemetry: each rule from both sides and its way out, and that no rule is idle."""

import dataclasses
import itertools
import math
from datetime import datetime, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from canaryd.config.settings import TelemetryConfig
from canaryd.facts import LogRecord, Reading, Skipped
from canaryd.judge.telemetry import line_rules, memory_rules, xids
from canaryd.judge.telemetry import rules as telemetry_rules
from canaryd.judge.telemetry.events import (
    FLAGS,
    WORDS,
    changes,
    judged_values,
    log_event,
    triggers,
    within,
)
from canaryd.judge.telemetry.link_rules import replay_limit
from canaryd.judge.telemetry.readings import READINGS, split_key
from canaryd.judge.telemetry.rules import findings
from canaryd.judge.telemetry.signals import Poll, Signs, stale_after
from canaryd.model import Cause, Device, Event, Outcome, Reason, Run, State
from canaryd.store.store import Store
from canaryd.worker.telemetry import kernel_log
from tests.command import ROOT

NOW = 1_790_000_000.0
MINUTE, HOUR, DAY = 60.0, 3600.0, 86_400.0
POLICY = TelemetryConfig()
GPU = Device(uuid="GPU-a", backend="cuda", index=0, model="H200", torch_index=0, detail={"driver": "580.95"})
HEALTHY, DEGRADED, UNKNOWN, SUSPECT, FAULTY = State
H, E, U = Cause.HARDWARE, Cause.ENVIRONMENT, Cause.UNDETERMINED
NUMBERS = itertools.count()

QUIET = {
    "ecc_enabled{when=current}": 1,
    "ecc_enabled{when=pending}": 1,
    "ecc_errors_total{kind=uncorrected,location=dram}": 0,
    "ecc_errors_total{kind=corrected,location=dram}": 3,
    "ecc_aggregate_errors_total{kind=uncorrected,location=dram}": 7,
    "ecc_aggregate_errors_total{kind=corrected,location=dram}": 12_000,
    "ecc_sram_threshold_exceeded": 0,
    "row_remap_rows{cause=uncorrectable}": 2,
    "row_remap_pending": 0,
    "row_remap_failed": 0,
    "row_remap_banks{available=none}": 0,
    "retired_pages{cause=double_bit}": 1,
    "retired_pages{cause=single_bit}": 1,
    "retired_pages_pending": 0,
    "memory_bad_pages{status=pending}": 0,
    "temperature_celsius{sensor=core}": 60,
    "temperature_celsius{sensor=edge}": 60,
    "temperature_threshold_celsius{threshold=slowdown}": 90,
    "temperature_threshold_celsius{threshold=edge_crit}": 100,
    "temperature_margin_celsius": 30,
    "temperature_margin_threshold_celsius{threshold=slowdown}": -2,
    "energy_joules_total": 5000,
    "throttle_active{reason=hw_thermal}": 0,
    "throttle_active{reason=sw_power_cap}": 1,
    "throttle_seconds_total{reason=sw_power_cap}": 9000,
    "throttle_seconds_total{reason=sw_thermal}": 1,
    "pcie_generation": 1,
    "pcie_generation_max": 5,
    "pcie_width": 16,
    "pcie_width_max": 16,
    "pcie_replays_total": 4,
    "pcie_aer_errors_total{severity=fatal}": 0,
    "nvlink_up{link=3}": 1,
    "nvlink_errors_total{kind=crc_flit,link=3}": 5,
    "nvlink_errors_total{kind=recovery,link=3}": 0,
    "fabric_ready": 1,
    "utilization_ratio{engine=gpu}": 0.1,
    "persistence_mode": 1,
    "mig_enabled": 0,
    "recovery_action{action=none}": 1,
    "device_health{status=ok}": 1,
    "edac_errors_total{controller=mc0,dimm=A1,kind=uncorrected}": 0,
    "edac_errors_total{controller=mc0,dimm=A1,kind=corrected}": 2,
    "machine_check_exceptions_total": 0,
    "pressure_ratio{kind=full,resource=memory}": 0.01,
    "clock_source{source=tsc}": 1,
    "crash_records": 0,
}
"""What a healthy device with a life behind it says, idle and capped by software."""


def poll(ago=5.0, only=None, **changes):
    """Return a completed poll; `only` are readings that differ from a quiet device's, None takes one away."""
    facts = {k: v for k, v in {**QUIET, **(only or {})}.items() if v is not None}
    readings = []
    for key, value in facts.items():
        name, labels = split_key(key)
        readings.append(Reading(name=name, value=value, labels=labels))
    fields = {"probe": "nvidia_telemetry", "probe_version": 1, "seconds": 0.1, "outcome": Outcome.COMPLETED}
    fields |= {"id": f"poll-{next(NUMBERS):06d}", "device": "GPU-a", "readings": tuple(readings)}
    return Run(started=NOW - ago, **{**fields, **changes})


def failed(outcome, detail="", ago=5.0, **changes):
    return poll(ago, outcome=outcome, detail=detail, readings=(), **changes)


def event(kind, name="", ago=HOUR, *, lasted=0.0, **changes):
    """Return something that happened `ago` seconds before now for the last time."""
    if kind in ("counter", "counter-fell", "flag"):
        changes = dict(zip(("reading", "labels"), split_key(name), strict=True)) | changes
    if kind in ("xid", "sxid") and name.isdecimal():
        changes = {"code": int(name)} | changes
    return Event(device="GPU-a", kind=kind, name=name, first=NOW - ago - lasted, last=NOW - ago, **changes)


def rise(key, by=1.0, ago=HOUR, **changes):
    return event("counter", key, ago, count=by, detail=f"{key} rose by {by:g}", **changes)


def xid(code, ago=HOUR, fields=None, **changes):
    """Return an Xid as the kernel log tells it."""
    record = LogRecord(
        boot="b", sequence=1, at=NOW - ago, kind="xid", name=str(code), text=f"NVRM: Xid: {code}", fields=fields or {}
    )
    return dataclasses.replace(log_event(record, "GPU-a"), **changes)


def reset(ago):
    return event("reset", "driver or device", ago, before="energy_joules_total 9", after="energy_joules_total 0")


def width(ago):
    """Return a link that came down from 16 lanes to 8."""
    return event("flag", "pcie_width", ago, lasted=15.0, before="16", after="8")


def wiped():
    """Return a reset that cleared an uncorrected error."""
    name, labels = split_key(UE)
    return event("reset", "driver or device", before=f"{UE} 2", after=f"{UE} 0", reading=name, labels=labels)


def sxid(code, severity, ago=HOUR, detail="Link 30 LTSSM Fault Up"):
    """Return an SXid as the kernel log gives it."""
    fields = {"severity": severity}
    record = LogRecord(boot="b", sequence=1, at=NOW - ago, kind="sxid", name=str(code), text=detail, fields=fields)
    return log_event(record, "GPU-a")


def held_down(reason, ago=HOUR, **changes):
    """Return the condition that a reason holds the clocks down."""
    return event(
        "condition", f"throttle {reason}", ago, reading="throttle_active", labels={"reason": reason}, **changes
    )


def boot(ago, name="clean"):
    return event("boot", name, ago, detail="the machine was rebooted")


def sign(*events, only=None, completed=0, newest=0, passed=None, wrong=None, now=NOW, **changes):
    """Return signs: events, readings that differ from quiet ones, how long ago exact goldens passed or were missed."""
    done = poll(only=only) if completed == 0 else completed
    polls = {
        "nvidia_telemetry": Poll(
            period=15.0, newest=done if newest == 0 else newest, completed=done, failures=1, since=NOW - 30 * DAY
        )
    }
    fields = {"device": GPU, "polls": polls, "events": tuple(sorted(events, key=lambda e: e.last)), "policy": POLICY}
    fields |= {"last_pass": None if passed is None else NOW - passed, "now": now}
    fields |= {"last_mismatch": None if wrong is None else NOW - wrong}
    return Signs(**{**fields, **changes})


def told(signs):
    return sorted((f.rule, f.state, f.cause) for f in findings(signs))


def policy(**changes):
    return dataclasses.replace(POLICY, **changes)


UE, AGGREGATE_UE = (f"ecc_{k}errors_total{{kind=uncorrected,location=dram}}" for k in ("", "aggregate_"))
CE, AGGREGATE_CE = (f"ecc_{k}errors_total{{kind=corrected,location=dram}}" for k in ("", "aggregate_"))
SRAM_CE = "ecc_errors_total{kind=corrected,location=sram}"
DIMM_UE, DIMM_CE = (f"edac_errors_total{{controller=mc0,dimm=A1,kind={k}}}" for k in ("uncorrected", "corrected"))
THERMAL = "throttle_seconds_total{reason=hw_thermal}"
SLOW = "throttle_seconds_total{reason=hw_slowdown}"
AER = "pcie_aer_errors_total{{severity={}}}".format
LINK = "nvlink_errors_total{{kind={},link=3}}".format
FATAL_LINK = {"unit": "RLW_SRC_TRACK", "intr_info": "0x00000007", "error_status": "0x00000001"}
HARMLESS_LINK = {**FATAL_LINK, "error_status": "0x00000002"}
PLACE = {"gpc": "9", "tpc": "1", "sm": "0"}
OLD = poll(ago=HOUR)

SCENARIOS = {
    "quiet": lambda: (sign(), []),
    "no probe and no event": lambda: (sign(polls={}), []),
    # telemetry-stale
    "one failed poll says nothing": lambda: (sign(newest=failed(Outcome.TIMED_OUT)), []),
    "polls that hang": lambda: (
        sign(completed=poll(ago=121), newest=failed(Outcome.TIMED_OUT)), [("telemetry-stale", UNKNOWN, U)],
    ),
    "stale, but for less than two minutes": lambda: (
        sign(completed=poll(ago=119), newest=failed(Outcome.TIMED_OUT)), [],
    ),
    "no library": lambda: (
        sign(completed=None, newest=failed(Outcome.SKIPPED, "libnvidia-ml.so.1 is not here")),
        [("telemetry-stale", UNKNOWN, E)],
    ),
    "the probe itself is wrong": lambda: (
        sign(completed=None, newest=failed(Outcome.ERRORED, "Traceback\nValueError: no")),
        [("telemetry-stale", UNKNOWN, Cause.HARNESS)],
    ),
    "never polled, but for a short time": lambda: (
        sign(polls={"p": Poll(period=15.0, newest=None, completed=None, since=NOW - 60)}), [],
    ),
    "an old poll after a restart of canaryd": lambda: (
        sign(polls={"p": Poll(period=15.0, newest=None, completed=OLD, since=NOW - 60)}), [],
    ),
    "nobody polls": lambda: (
        sign(completed=OLD), [("telemetry-stale", UNKNOWN, Cause.HARNESS)],
    ),
    # gpu-lost
    "the driver says lost": lambda: (
        sign(newest=failed(Outcome.SKIPPED, "GPU is lost", reason=Reason.DEVICE_LOST)), [("gpu-lost", SUSPECT, H)],
    ),
    "lost for long is not stale as well": lambda: (
        sign(completed=OLD, newest=failed(Outcome.SKIPPED, "GPU is lost", reason=Reason.DEVICE_LOST)),
        [("gpu-lost", SUSPECT, H)],
    ),
    "another GPU is lost": lambda: (
        sign(newest=failed(Outcome.SKIPPED, "GPU GPU-a is not among those that answer; of others: GPU is lost")), [],
    ),
    "lost words": lambda: (sign(newest=failed(Outcome.ERRORED, "ConnectionError: connection lost")), []),
    "off the bus": lambda: (sign(event("off-bus", ago=DAY), xid(79, DAY)), [("gpu-lost", SUSPECT, H)]),
    "off the bus, rebooted, no pass yet": lambda: (
        sign(xid(79, DAY), boot(HOUR), passed=2 * HOUR), [("gpu-lost", SUSPECT, H)],
    ),
    "off the bus, rebooted and passed": lambda: (sign(xid(79, DAY), boot(HOUR), passed=60), []),
    "off the bus, reset and passed": lambda: (sign(xid(79, DAY), reset(HOUR), passed=60), [("gpu-lost", SUSPECT, H)]),
    "off the bus again after a reboot": lambda: (
        sign(xid(79, 9 * DAY), boot(8 * DAY), event("amdgpu", "lost", DAY), boot(HOUR), passed=60),
        [("gpu-lost", FAULTY, H)],
    ),
    "off the bus again after a month": lambda: (
        sign(xid(79, 31 * DAY), boot(30.5 * DAY), xid(79, DAY), boot(HOUR), passed=60), [],
    ),
    "off the bus with another": lambda: (
        sign(xid(79, DAY), beside={"cuda:1": [xid(79, DAY)]}), [("gpu-lost", SUSPECT, U)],
    ),
    "off the bus an hour after another": lambda: (
        sign(xid(79, DAY), beside={"cuda:1": [xid(79, DAY + HOUR)]}), [("gpu-lost", SUSPECT, U)],
    ),
    "off the bus more than an hour after another": lambda: (
        sign(xid(79, DAY), beside={"cuda:1": [xid(79, DAY + HOUR + 1)]}), [("gpu-lost", SUSPECT, H)],
    ),
    "off the bus again after a reboot, each time with another": lambda: (
        sign(xid(79, 9 * DAY), boot(8 * DAY), xid(79, DAY), beside={"cuda:1": [xid(79, 9 * DAY), xid(79, DAY)]}),
        [("gpu-lost", SUSPECT, U)],
    ),
    "off the bus again after a reboot, once with another": lambda: (
        sign(xid(79, 9 * DAY), boot(8 * DAY), xid(79, DAY), beside={"cuda:1": [xid(79, 9 * DAY)]}),
        [("gpu-lost", SUSPECT, H)],
    ),
    "off the bus with another, and twice alone": lambda: (
        sign(
            xid(79, 9 * DAY), boot(8 * DAY), xid(79, 5 * DAY), boot(4 * DAY), xid(79, DAY),
            beside={"cuda:1": [xid(79, 9 * DAY)]},
        ),
        [("gpu-lost", FAULTY, H)],
    ),
    "only another is off the bus": lambda: (sign(beside={"cuda:1": [xid(79, DAY)]}), []),
    "Xid 79 graded by the configuration": lambda: (sign(xid(79), policy=policy(xids={"79": "none"})), []),
    # memory of an accelerator
    "row remap failed": lambda: (sign(only={"row_remap_failed": 1}), [("row-remap-failed", FAULTY, H)]),
    "row remap failed, and then the driver hangs": lambda: (
        sign(completed=poll(ago=DAY, only={"row_remap_failed": 1}), newest=failed(Outcome.TIMED_OUT)),
        [("row-remap-failed", FAULTY, H), ("telemetry-stale", UNKNOWN, U)],
    ),
    "SRAM threshold": lambda: (sign(only={"ecc_sram_threshold_exceeded": 1}), [("sram-threshold", FAULTY, H)]),
    "row remap pending": lambda: (sign(only={"row_remap_pending": True}), [("row-remap-pending", DEGRADED, H)]),
    "row remap pending in a poll that is too old": lambda: (
        sign(completed=poll(ago=2 * HOUR, only={"row_remap_pending": 1}), newest=failed(Outcome.TIMED_OUT)),
        [("telemetry-stale", UNKNOWN, U)],
    ),
    "a bank without spare rows": lambda: (
        sign(only={"row_remap_banks{available=none}": 1}), [("row-remap-exhausted", DEGRADED, H)],
    ),
    "511 remapped rows": lambda: (sign(only={"row_remap_rows{cause=uncorrectable}": 511}), []),
    "512 remapped rows": lambda: (
        sign(only={"row_remap_rows{cause=uncorrectable}": 512}), [("row-remap-exhausted", FAULTY, H)],
    ),
    "62 retired pages": lambda: (sign(only={"retired_pages{cause=single_bit}": 61}), []),
    "63 retired pages": lambda: (sign(only={"retired_pages{cause=single_bit}": 62}), [("retired-pages", FAULTY, H)]),
    "14 pages with double-bit errors": lambda: (sign(only={"retired_pages{cause=double_bit}": 14}), []),
    "15 pages with double-bit errors": lambda: (
        sign(only={"retired_pages{cause=double_bit}": 15}), [("retired-pages", DEGRADED, H)],
    ),
    "a page waits for a reset": lambda: (
        sign(only={"retired_pages_pending": 1}), [("retired-pages-pending", DEGRADED, H)],
    ),
    "bad pages of amdgpu": lambda: (
        sign(only={"memory_bad_pages{status=pending}": 2}), [("memory-bad-pages", DEGRADED, H)],
    ),
    # uncorrected-error
    "an uncorrected error": lambda: (sign(rise(UE), rise(AGGREGATE_UE)), [("uncorrected-error", SUSPECT, H)]),
    "an uncorrected error of old": lambda: (sign(rise(AGGREGATE_UE, ago=31 * DAY)), []),
    "uncorrected at first sight": lambda: (sign(only={UE: 1}), [("uncorrected-error", SUSPECT, H)]),
    "uncorrected, then reset": lambda: (
        sign(rise(UE, ago=2 * HOUR), reset(HOUR)), [("uncorrected-error", SUSPECT, H)],
    ),
    "uncorrected, then a pass without a reset": lambda: (
        sign(rise(UE), passed=60), [("uncorrected-error", SUSPECT, H)],
    ),
    "uncorrected, then a pass, then a reset": lambda: (
        sign(rise(UE, ago=3 * HOUR), reset(HOUR), passed=2 * HOUR), [("uncorrected-error", SUSPECT, H)],
    ),
    "uncorrected, then a reset and a pass": lambda: (sign(rise(UE, ago=2 * HOUR), reset(HOUR), passed=60), []),
    "uncorrected, then a reboot and a pass": lambda: (sign(rise(UE, ago=2 * HOUR), boot(HOUR), passed=60), []),
    "uncorrected, then a reset, a mismatch and a pass": lambda: (
        sign(rise(UE, ago=2 * HOUR), reset(HOUR), wrong=120, passed=60), [("uncorrected-error", SUSPECT, H)],
    ),
    "a reset that wiped out an uncorrected error": lambda: (
        sign(wiped()),
        [("uncorrected-error", SUSPECT, H)],
    ),
    "a reset that wiped out an uncorrected error, and a pass": lambda: (
        sign(wiped(), passed=60), [],
    ),
    "uncorrected, and rebooted before the next poll": lambda: (
        sign(rise(AGGREGATE_UE, ago=HOUR, lasted=120), boot(HOUR + 60)), [("uncorrected-error", SUSPECT, H)],
    ),
    "uncorrected, and rebooted before the next poll, and a pass": lambda: (
        sign(rise(AGGREGATE_UE, ago=HOUR, lasted=120), boot(HOUR + 60), passed=60), [],
    ),
    "uncorrected, rebooted before the next poll, and again since": lambda: (
        sign(rise(AGGREGATE_UE, ago=HOUR, lasted=120), boot(HOUR + 60), passed=60, only={UE: 1}),
        [("uncorrected-error", SUSPECT, H)],
    ),
    "Xid 94": lambda: (sign(xid(94)), [("uncorrected-error", SUSPECT, H)]),
    "Xid 94, reset and passed": lambda: (sign(xid(94), reset(120), passed=60), []),
    "amdgpu's uncorrected error": lambda: (
        sign(event("amdgpu", "ras-uncorrected")), [("uncorrected-error", SUSPECT, H)],
    ),
    # corrected-errors-rising
    "99 corrected errors": lambda: (sign(rise(CE, 99)), []),
    "100 corrected errors where there were none": lambda: (
        sign(rise(CE, 100)), [("corrected-errors-rising", DEGRADED, H)],
    ),
    "volatile and aggregate are the same errors": lambda: (
        sign(rise(CE, 999), rise(AGGREGATE_CE, 999), rise(AGGREGATE_CE, 3000, ago=9 * DAY)), [],
    ),
    "two locations add up": lambda: (
        sign(rise(CE, 500), rise(SRAM_CE, 500), rise(CE, 3000, ago=9 * DAY)),
        [("corrected-errors-rising", DEGRADED, H)],
    ),
    "1000 in a day": lambda: (
        sign(rise(AGGREGATE_CE, 1000), rise(AGGREGATE_CE, 90_000, ago=9 * DAY)),
        [("corrected-errors-rising", DEGRADED, H)],
    ),
    "1000 the day before yesterday": lambda: (sign(rise(CE, 1000, ago=25.5 * HOUR)), []),
    "1000 a day ago, held for an hour": lambda: (
        sign(rise(CE, 900, ago=24.5 * HOUR), rise(CE, 100, ago=0.9 * HOUR)),
        [("corrected-errors-rising", DEGRADED, H)],
    ),
    "a step": lambda: (
        sign(rise(CE, 120), *(rise(CE, 12, ago=d * DAY) for d in range(2, 29))),
        [("corrected-errors-rising", DEGRADED, H)],
    ),
    "no step": lambda: (sign(rise(CE, 120), *(rise(CE, 12.5, ago=d * DAY) for d in range(2, 29))), []),
    # the host
    "9 corrected errors of a module": lambda: (sign(rise(DIMM_CE, 9)), []),
    "10 corrected errors of a module": lambda: (sign(rise(DIMM_CE, 10)), [("dimm-errors-rising", DEGRADED, H)]),
    "5 corrected errors of two modules each": lambda: (
        sign(rise(DIMM_CE, 5), rise(DIMM_CE.replace("A1", "B1"), 5)), [],
    ),
    "the same by log and by counter": lambda: (sign(rise(DIMM_CE, 5), event("edac", "corrected", count=5.0)), []),
    "uncorrected memory": lambda: (sign(rise(DIMM_UE)), [("host-uncorrected-error", SUSPECT, H)]),
    "uncorrected memory by the log": lambda: (
        sign(event("edac", "uncorrected")), [("host-uncorrected-error", SUSPECT, H)],
    ),
    "uncorrected memory at first sight": lambda: (sign(only={DIMM_UE: 1}), [("host-uncorrected-error", SUSPECT, H)]),
    "uncorrected memory, EDAC loaded again and passed": lambda: (
        sign(rise(DIMM_UE), reset(120), passed=60), [("host-uncorrected-error", SUSPECT, H)],
    ),
    "uncorrected memory, rebooted and passed": lambda: (sign(rise(DIMM_UE), boot(120), passed=60), []),
    "machine check by the log": lambda: (sign(event("mce", "uncorrected")), [("machine-check", SUSPECT, H)]),
    "machine check by its counter": lambda: (
        sign(rise("machine_check_exceptions_total")), [("machine-check", SUSPECT, H)],
    ),
    "machine check, rebooted and passed": lambda: (sign(event("mce", "uncorrected"), boot(120), passed=60), []),
    "9 corrected machine checks": lambda: (sign(event("mce", "corrected", count=9.0)), []),
    "10 corrected machine checks": lambda: (
        sign(event("mce", "corrected", count=5.0), event("mce", "logged", count=5.0)), [("machine-check", DEGRADED, H)],
    ),
    # Xids
    "Xid 31": lambda: (sign(xid(31)), [("xid-application", HEALTHY, U)]),
    "Xid 31, exact pass": lambda: (sign(xid(31), passed=60), [("xid-application", HEALTHY, Cause.SOFTWARE)]),
    "Xid 31, exact mismatch": lambda: (sign(xid(31), wrong=60), [("xid-application", SUSPECT, U)]),
    "Xid 31, exact mismatch before": lambda: (sign(xid(31), wrong=2 * HOUR), [("xid-application", HEALTHY, U)]),
    "Xid 31 a day ago": lambda: (sign(xid(31, DAY + 1)), []),
    "a burst of Xid 31": lambda: (sign(xid(31, count=500.0)), [("xid-application", HEALTHY, U)]),
    "Xid 31 on two occasions": lambda: (sign(xid(31, 5 * HOUR), xid(31)), [("xid-application", HEALTHY, U)]),
    "Xid 31 on three occasions": lambda: (
        sign(xid(31, 9 * HOUR), xid(31, 5 * HOUR), xid(31)), [("xid-repeated", DEGRADED, U)],
    ),
    "Xid 31 on three occasions, two in one hour": lambda: (
        sign(event("xid", "31", 5 * HOUR, lasted=MINUTE, count=2.0), xid(31)), [("xid-repeated", DEGRADED, U)],
    ),
    "Xid 31 less than a minute apart": lambda: (
        sign(event("xid", "31", 5 * HOUR, lasted=59.0, count=2.0), xid(31)), [("xid-application", HEALTHY, U)],
    ),
    "Xid 31 on three occasions in three days": lambda: (
        sign(xid(31, 49 * HOUR), xid(31, 25 * HOUR), xid(31)), [("xid-application", HEALTHY, U)],
    ),
    "Xid 13 twice at one place": lambda: (
        sign(xid(13, 5 * HOUR, PLACE), xid(13, HOUR, PLACE)), [("xid-repeated", DEGRADED, U)],
    ),
    "Xid 13 at two places": lambda: (
        sign(xid(13, 5 * HOUR, PLACE), xid(13, HOUR, {**PLACE, "tpc": "2"})), [("xid-application", HEALTHY, U)],
    ),
    "Xid 13, many lines at one place": lambda: (
        sign(event("xid", "13", HOUR, lasted=30, count=9.0, before="GPC 9 TPC 1", after="GPC 9 TPC 1")),
        [("xid-application", HEALTHY, U)],
    ),
    "Xid 45 with every killed process": lambda: (
        sign(xid(45, 9 * HOUR), xid(45, 5 * HOUR), xid(45)), [("xid-application", HEALTHY, U)],
    ),
    "Xid 69, an application's own fault, ever again": lambda: (
        sign(xid(69, 9 * HOUR), xid(69, 5 * HOUR), xid(69)), [("xid-application", HEALTHY, U)],
    ),
    "Xid 43 asks for nothing": lambda: (sign(xid(43)), []),
    "Xid 31 that the configuration silences": lambda: (sign(xid(31), policy=policy(xids={"31": "none"})), []),
    "Xid 31 that the configuration takes for RMA": lambda: (
        sign(xid(31), policy=policy(xids={"31": "rma"})), [("xid-inspect", FAULTY, H)],
    ),
    "Xid 64": lambda: (sign(xid(64, DAY)), [("xid-recovery", SUSPECT, H)]),
    "Xid 64, reset": lambda: (sign(xid(64, DAY), reset(HOUR), passed=2 * HOUR), [("xid-recovery", SUSPECT, H)]),
    "Xid 64, reset and passed": lambda: (sign(xid(64, DAY), reset(HOUR), passed=60), []),
    "Xid 64 again after a reset": lambda: (
        sign(xid(64, DAY), reset(HOUR), xid(64, 60)), [("xid-recovery", SUSPECT, H)],
    ),
    "Xid 64 again after two resets": lambda: (
        sign(xid(64, DAY), reset(5 * HOUR), xid(64, 4 * HOUR), boot(HOUR), xid(64, 60)),
        [("xid-recurring", FAULTY, H)],
    ),
    "Xid 64 with another device's within an hour": lambda: (
        sign(xid(64, DAY), beside={"cuda:1": [xid(64, DAY + HOUR)]}), [("xid-recovery", SUSPECT, U)],
    ),
    "Xid 64 with another device's Xid 62": lambda: (
        sign(xid(64, DAY), beside={"cuda:1": [xid(62, DAY)]}), [("xid-recovery", SUSPECT, H)],
    ),
    "Xid 64 again after two resets, with another device's once": lambda: (
        sign(
            xid(64, DAY), reset(5 * HOUR), xid(64, 4 * HOUR), boot(HOUR), xid(64, 60),
            beside={"cuda:1": [xid(64, DAY)]},
        ),
        [("xid-recovery", SUSPECT, H)],
    ),
    "Xid 64 again after two resets, always with another device's": lambda: (
        sign(
            xid(64, DAY), reset(5 * HOUR), xid(64, 4 * HOUR), boot(HOUR), xid(64, 60),
            beside={"cuda:1": [xid(64, DAY), xid(64, 4 * HOUR), xid(64, 60)]},
        ),
        [("xid-recovery", SUSPECT, U)],
    ),
    "Xid 95": lambda: (sign(xid(95, DAY)), [("uncorrected-error", SUSPECT, H)]),
    "one memory error under four codes": lambda: (
        sign(*(xid(code, DAY) for code in (48, 171, 94, 95)), rise(UE, ago=DAY)), [("uncorrected-error", SUSPECT, H)],
    ),
    "memory errors again after two resets, under other codes": lambda: (
        sign(xid(48, DAY), reset(5 * HOUR), xid(94, 4 * HOUR), boot(HOUR), xid(95, 60)),
        [("uncorrected-error", FAULTY, H)],
    ),
    "Xid 95 that the configuration grades": lambda: (
        sign(xid(95), policy=policy(xids={"95": "reboot"})), [("xid-recovery", SUSPECT, H)],
    ),
    "contained memory errors again after a reset": lambda: (
        sign(xid(94, DAY), reset(HOUR), xid(94, 60)), [("uncorrected-error", SUSPECT, H)],
    ),
    "contained memory errors again after two resets, with clean tests": lambda: (
        sign(xid(94, 9 * DAY), reset(8 * DAY), xid(94, 5 * DAY), reset(4 * DAY), xid(94, DAY), reset(HOUR), passed=60),
        [("uncorrected-error", FAULTY, H)],
    ),
    "half of the lanes since a reset": lambda: (
        sign(reset(HOUR), width(HOUR), only={"pcie_width": 8}), [("pcie-width", DEGRADED, E)],
    ),
    "half of the lanes since no reset, at rest": lambda: (sign(width(HOUR), only={"pcie_width": 8}), []),
    "half of the lanes since a reset, and all of them again": lambda: (sign(reset(HOUR), width(HOUR)), []),
    "half of the lanes since a reset, of a link that narrows at rest": lambda: (
        sign(width(DAY), reset(HOUR), width(HOUR), only={"pcie_width": 8}), [],
    ),
    "Xid 119 again after two resets is the driver's": lambda: (
        sign(xid(119, DAY), reset(5 * HOUR), xid(119, 4 * HOUR), reset(HOUR), xid(119, 60)),
        [("xid-recovery", SUSPECT, U)],
    ),
    "Xid 168 wants a reboot": lambda: (sign(xid(168), reset(120), passed=60), [("xid-recovery", SUSPECT, H)]),
    "Xid 168, rebooted and passed": lambda: (sign(xid(168), boot(120), passed=60), []),
    "Xid 145, fatal": lambda: (sign(xid(145, fields=FATAL_LINK)), [("xid-recovery", SUSPECT, U)]),
    "Xid 145, harmless": lambda: (sign(xid(145, fields=HARMLESS_LINK)), []),
    "Xid 154 wants a reset": lambda: (sign(xid(154, fields={"action": "reset"})), [("xid-recovery", SUSPECT, U)]),
    "Xid 154 has wanted a reset": lambda: (
        sign(xid(154, 2 * HOUR, {"action": "drain-and-reset"}), xid(154, HOUR, {"action": "none"})), [],
    ),
    "Xid 54": lambda: (sign(xid(54, 29.9 * DAY)), [("xid-inspect", SUSPECT, E)]),
    "Xid 54 a month ago": lambda: (sign(xid(54, 30.1 * DAY)), []),
    "Xid 999": lambda: (sign(xid(999)), [("xid-unknown", DEGRADED, U)]),
    "Xid 999 a day ago": lambda: (sign(xid(999, DAY + 1)), []),
    "Xid 92": lambda: (sign(xid(92)), [("xid-noted", HEALTHY, H)]),
    "Xid 92 a day ago": lambda: (sign(xid(92, DAY + 1)), []),
    "Xid 157, a part without a spare": lambda: (sign(xid(157)), [("xid-noted", HEALTHY, H)]),
    "Xid 161, a memory channel without a spare": lambda: (sign(xid(161)), [("xid-noted", HEALTHY, H)]),
    "fatal SXid": lambda: (sign(sxid(20034, "fatal")), [("sxid", DEGRADED, H)]),
    "SXid": lambda: (sign(sxid(12028, "non-fatal", detail="fatal")), [("sxid", HEALTHY, H)]),
    "SXid of unknown severity": lambda: (sign(sxid(12028, "unknown")), [("sxid", HEALTHY, H)]),
    "SXid a day ago": lambda: (sign(sxid(20034, "fatal", DAY + 1)), []),
    # heat, power, links
    "held down for 59 s": lambda: (sign(rise(THERMAL, 59.0, ago=60)), []),
    "held down for 60 s": lambda: (sign(rise(THERMAL, 60.0, ago=60)), [("throttled", DEGRADED, E)]),
    "held down twice over by one cause": lambda: (sign(rise(THERMAL, 40.0, ago=60), rise(SLOW, 40.0, ago=60)), []),
    "held down an hour ago": lambda: (sign(rise(THERMAL, 600.0, ago=HOUR + 1)), []),
    "held down by software's power cap": lambda: (
        sign(rise("throttle_seconds_total{reason=sw_power_cap}", 3000.0, ago=60)), [],
    ),
    "held down, seen poll by poll": lambda: (
        sign(held_down("hw_power_brake", 60, count=60.0)), [("throttled", DEGRADED, E)],
    ),
    "processors slow down 9 times": lambda: (sign(rise("throttle_events_total{scope=package}", 9.0, ago=60)), []),
    "processors slow down 10 times": lambda: (
        sign(rise("throttle_events_total{scope=package}", 10.0, ago=60)), [("throttled", DEGRADED, E)],
    ),
    "processors slow down, and each has a line": lambda: (
        sign(event("thermal", "core", 60, count=64.0), only={"throttle_events_total{scope=core}": 1}), [],
    ),
    "processors slow down 10 times by the log": lambda: (
        sign(event("thermal", "core", 60, count=10.0)), [("throttled", DEGRADED, E)],
    ),
    **{
        f"{name} for {seconds} s, {ago:g} s ago": lambda n=name, s=seconds, a=ago, w=wanted: (
            sign(event("condition", n, a, count=float(s))), [(n, DEGRADED, E)] * w,
        )
        for name in telemetry_rules.CONDITIONS
        for seconds, ago, wanted in ((60, HOUR, 1), (59, 60, 0), (999, HOUR + 1, 0))
    },
    "310 replays in ten minutes": lambda: (sign(rise("pcie_replays_total", 310, ago=60)), []),
    "320 replays in ten minutes": lambda: (
        sign(rise("pcie_replays_total", 320, ago=60)), [("pcie-replays", DEGRADED, H)],
    ),
    "320 replays in twenty minutes": lambda: (sign(rise("pcie_replays_total", 320, ago=60, lasted=1200.0)), []),
    "320 correctable errors": lambda: (sign(rise(AER("correctable"), 320, ago=60)), [("pcie-replays", DEGRADED, H)]),
    "320 replays two hours ago": lambda: (sign(rise("pcie_replays_total", 320, ago=2 * HOUR)), []),
    "fatal PCI Express error": lambda: (sign(rise(AER("fatal"), ago=DAY)), [("pcie-aer", SUSPECT, H)]),
    "fatal PCI Express error, reset and passed": lambda: (sign(rise(AER("fatal"), ago=DAY), reset(120), passed=60), []),
    "fatal PCI Express error, with a reset": lambda: (sign(reset(DAY), rise(AER("fatal"), ago=DAY, lasted=15)), []),
    "fatal PCI Express error, 9 minutes after a reset": lambda: (
        sign(reset(DAY), event("aer", "fatal", DAY - 9 * MINUTE)), [],
    ),
    "fatal PCI Express error, 11 minutes after a reset": lambda: (
        sign(reset(DAY), event("aer", "fatal", DAY - 11 * MINUTE)), [("pcie-aer", SUSPECT, H)],
    ),
    "fatal PCI Express error of the port above": lambda: (
        sign(event("aer", "fatal port", fields={"below": "0000:65:00.0"})), [("pcie-aer", SUSPECT, U)],
    ),
    "fatal PCI Express error, its own and of the port above": lambda: (
        sign(event("aer", "fatal port", fields={"below": "0000:65:00.0"}), event("aer", "fatal")),
        [("pcie-aer", SUSPECT, H)],
    ),
    "fatal PCI Express error with another device's within an hour": lambda: (
        sign(event("aer", "fatal"), beside={"cuda:1": [event("aer", "fatal", 2 * HOUR)]}), [("pcie-aer", SUSPECT, U)],
    ),
    "fatal PCI Express error an hour and a second after another device's": lambda: (
        sign(event("aer", "fatal"), beside={"cuda:1": [event("aer", "fatal", 2 * HOUR + 1)]}),
        [("pcie-aer", SUSPECT, H)],
    ),
    "fatal PCI Express error with another device's that was only training": lambda: (
        sign(event("aer", "fatal"), beside={"cuda:1": [reset(HOUR + MINUTE), event("aer", "fatal")]}),
        [("pcie-aer", SUSPECT, H)],
    ),
    "nonfatal PCI Express error": lambda: (sign(event("aer", "nonfatal")), [("pcie-aer", DEGRADED, H)]),
    "nonfatal PCI Express error two days ago": lambda: (sign(event("aer", "nonfatal", 2 * DAY)), []),
    "NVLink recovers": lambda: (sign(rise(LINK("recovery"), ago=60)), [("nvlink-errors", DEGRADED, H)]),
    "NVLink recovered two hours ago": lambda: (sign(rise(LINK("recovery"), ago=2 * HOUR)), []),
    "NVLink, 99 CRC errors a second": lambda: (sign(rise(LINK("crc_flit"), 5940, ago=60)), []),
    "NVLink, 100 CRC errors a second": lambda: (
        sign(rise(LINK("crc_flit"), 6000, ago=60)), [("nvlink-errors", DEGRADED, H)],
    ),
    "NVLink down since a day": lambda: (
        sign(event("flag", "nvlink_up{link=3}", DAY, before="1", after="0"), only={"nvlink_up{link=3}": 0}),
        [("nvlink-down", DEGRADED, U)],
    ),
    "NVLink down and up within an hour": lambda: (
        sign(event("flag", "nvlink_up{link=3}", 60, before="1", after="1", count=2.0)), [("nvlink-down", DEGRADED, U)],
    ),
    "NVLink down and up a day ago": lambda: (
        sign(event("flag", "nvlink_up{link=3}", DAY, before="1", after="1", count=2.0)), [],
    ),
    "NVLink came up": lambda: (sign(event("flag", "nvlink_up{link=3}", 60, before="0", after="1")), []),
    "a link that never was up": lambda: (sign(only={"nvlink_up{link=3}": 0, "fabric_ready": 0}), []),
    "the fabric is left": lambda: (
        sign(event("flag", "fabric_ready", DAY, before="1", after="0"), only={"fabric_ready": 0}),
        [("nvlink-down", DEGRADED, U)],
    ),
    "NVLink could not recover": lambda: (sign(rise(LINK("recovery_failed"), ago=60)), [("nvlink-errors", DEGRADED, H)]),
    "NVLink could not recover, within a night that nobody watched": lambda: (
        sign(rise(LINK("recovery_failed"), ago=60, lasted=8 * HOUR)), [("nvlink-errors", DEGRADED, H)],
    ),
    "NVLink could not recover two hours ago": lambda: (sign(rise(LINK("recovery_failed"), ago=HOUR + 1)), []),
    # gaps: what came at an unknown time is shared out evenly
    "1 replay a minute, in a night that nobody watched": lambda: (
        sign(rise("pcie_replays_total", 480, ago=60, lasted=8 * HOUR)), [],
    ),
    "40 replays a minute, in a night that nobody watched": lambda: (
        sign(rise("pcie_replays_total", 8 * 60 * 40, ago=60, lasted=8 * HOUR)), [("pcie-replays", DEGRADED, H)],
    ),
    "500 corrected errors a day, for three days that nobody watched": lambda: (
        sign(rise(CE, 1500, ago=60, lasted=3 * DAY)), [],
    ),
    "1100 corrected errors a day, for three days that nobody watched": lambda: (
        sign(rise(CE, 3300, ago=60, lasted=3 * DAY)), [("corrected-errors-rising", DEGRADED, H)],
    ),
    "4 corrected errors of a module a day, for three days": lambda: (
        sign(rise(DIMM_CE, 12, ago=60, lasted=3 * DAY)), [],
    ),
    "held down for 30 s a day, for three days": lambda: (sign(rise(THERMAL, 90.0, ago=60, lasted=3 * DAY)), []),
    "held down for 70 s an hour, for a night": lambda: (
        sign(rise(THERMAL, 560.0, ago=60, lasted=8 * HOUR)), [("throttled", DEGRADED, E)],
    ),
    "processors slow down once an hour, for a night": lambda: (
        sign(rise("throttle_events_total{scope=core}", 12.0, ago=60, lasted=12 * HOUR)), [],
    ),
    "NVLink recovered once in a night": lambda: (sign(rise(LINK("recovery"), ago=60, lasted=8 * HOUR)), []),
    "NVLink, 6000 CRC errors in a night": lambda: (sign(rise(LINK("crc_flit"), 6000, ago=60, lasted=8 * HOUR)), []),
    "an uncorrected error in a night": lambda: (
        sign(rise(UE, ago=60, lasted=8 * HOUR)), [("uncorrected-error", SUSPECT, H)],
    ),
    "a burst of CRC errors, and single ones after it": lambda: (
        sign(rise(LINK("crc_flit"), 60_000, ago=3000, lasted=59.0), rise(LINK("crc_flit"), 1, ago=5)),
        [("nvlink-errors", DEGRADED, H)],
    ),
    "hot for 15 s, four times in an hour": lambda: (
        sign(event("condition", "hot", 600, lasted=2715.0, count=60.0)), [],
    ),
    "hot for two hours, ten seconds of each minute": lambda: (
        sign(event("condition", "hot", 600, lasted=2 * HOUR, count=1200.0)), [("hot", DEGRADED, E)],
    ),
    # after a reset, links train
    **{
        f"{name}, {after / MINUTE:g} minutes after a {what.__name__}": lambda k=key, n=by, a=after, w=what, r=rule: (
            sign(rise(k, n, ago=60, lasted=15.0), w(60 + a)), [(r, DEGRADED, H)] * (a > 600),
        )
        for name, key, by, rule in (
            ("link recovers", LINK("recovery"), 1, "nvlink-errors"),
            ("link could not recover", LINK("recovery_failed"), 1, "nvlink-errors"),
            ("CRC errors", LINK("crc_flit"), 60_000, "nvlink-errors"),
            ("replays", "pcie_replays_total", 320, "pcie-replays"),
            ("correctable errors", AER("correctable"), 320, "pcie-replays"),
        )
        for after, what in ((540.0, reset), (540.0, boot), (660.0, reset))
    },
    "link errors in a gap with a reboot": lambda: (
        sign(rise(LINK("recovery"), 2, 5, lasted=700), rise("pcie_replays_total", 330, 5, lasted=700), boot(100)), [],
    ),
    "the fabric is late after a reboot": lambda: (
        sign(event("flag", "fabric_ready", 50, before="1", after="0"), boot(100), only={"fabric_ready": 0}), [],
    ),
    "the fabric was late after a reboot": lambda: (
        sign(event("flag", "fabric_ready", 900, lasted=600.0, before="1", after="1", count=2.0), boot(1000)), [],
    ),
    "the fabric is away since a reboot": lambda: (
        sign(event("flag", "fabric_ready", 650, before="1", after="0"), boot(700), only={"fabric_ready": 0}),
        [("nvlink-down", DEGRADED, U)],
    ),
    "MIG turns links off": lambda: (
        sign(
            event("flag", "nvlink_up{link=3}", DAY, before="1", after="0"),
            only={"nvlink_up{link=3}": 0, "mig_enabled": 1},
        ),
        [],
    ),
    "MIG turned links off, and is off again": lambda: (
        sign(
            event("flag", "nvlink_up{link=3}", 900, lasted=900.0, before="1", after="1", count=2.0),
            event("flag", "mig_enabled", 900, lasted=900.0, before="0", after="0", count=2.0),
        ),
        [],
    ),
    # clocks that are wrong
    "Xid 79 read while the clock said 1970": lambda: (
        sign(dataclasses.replace(xid(79), first=20 * DAY, last=20 * DAY)), [("gpu-lost", SUSPECT, H)],
    ),
    "Xid 79 dated in the future": lambda: (sign(xid(79, -DAY)), [("gpu-lost", SUSPECT, H)]),
    "a rise since 1970 is one of now": lambda: (
        sign(dataclasses.replace(rise("pcie_replays_total", 320, 60), first=20 * DAY)), [("pcie-replays", DEGRADED, H)],
    ),
    "a poll from half a minute ahead": lambda: (sign(completed=poll(-30)), []),
    "a poll from tomorrow": lambda: (
        sign(
            polls={
                "p": Poll(period=15.0, newest=None, completed=poll(-DAY, only={"crash_records": 1}), since=NOW + DAY)
            }
        ),
        [("telemetry-stale", UNKNOWN, Cause.HARNESS)],
    ),
    "a poll from tomorrow tells what lasts": lambda: (
        sign(completed=poll(-DAY, only={"row_remap_failed": 1, "crash_records": 1})),
        [("row-remap-failed", FAULTY, H), ("telemetry-stale", UNKNOWN, Cause.HARNESS)],
    ),
    # the driver's advice, settings, the host
    "the driver wants a reset": lambda: (
        sign(only={"recovery_action{action=none}": None, "recovery_action{action=reset}": 1}),
        [("recovery-action", SUSPECT, U)],
    ),
    "the driver wants what we do not know": lambda: (
        sign(only={"recovery_action{action=none}": None, "recovery_action{action=unknown(9)}": 1}),
        [("recovery-action", DEGRADED, U)],
    ),
    **{
        f"device health {word}": lambda w=word, s=state: (
            sign(only={"device_health{status=ok}": None, f"device_health{{status={w}}}": 1}),
            [("device-health", s, U)] if s else [],
        )
        for word, state in (("warning", DEGRADED), ("Alarm", DEGRADED), ("critical", SUSPECT), ("unknown", None))
    },
    "the driver restarted the device": lambda: (
        sign(rise("device_recoveries_total", 2)), [("device-recovered", DEGRADED, U)],
    ),
    "the driver restarted the device two days ago": lambda: (sign(rise("device_recoveries_total", ago=2 * DAY)), []),
    "persistence off": lambda: (sign(only={"persistence_mode": 0}), [("persistence-off", HEALTHY, E)]),
    "no persistence known": lambda: (sign(only={"persistence_mode": None}), []),
    "ECC off": lambda: (
        sign(only={"ecc_enabled{when=current}": 0, "ecc_enabled{when=pending}": 0}), [("ecc-off", HEALTHY, E)],
    ),
    "ECC will change": lambda: (sign(only={"ecc_enabled{when=pending}": 0}), [("ecc-off", HEALTHY, E)]),
    "tsc given up": lambda: (
        sign(
            event("flag", "clock_source", 9 * DAY, before="tsc", after="hpet"),
            only={"clock_source{source=tsc}": None, "clock_source{source=hpet}": 1},
        ),
        [("clock-source", DEGRADED, E)],
    ),
    "tsc given up, rebooted": lambda: (
        sign(
            event("flag", "clock_source", 9 * DAY, before="tsc", after="hpet"), boot(2 * DAY),
            only={"clock_source{source=tsc}": None, "clock_source{source=hpet}": 1},
        ),
        [],
    ),
    "tsc given up and taken again": lambda: (sign(event("clock", "unstable", 2 * HOUR)), []),
    "tsc marked unstable": lambda: (sign(event("clock", "unstable", 60)), [("clock-source", DEGRADED, E)]),
    "never had tsc": lambda: (sign(only={"clock_source{source=tsc}": None, "clock_source{source=kvm-clock}": 1}), []),
    "unclean reboot": lambda: (sign(boot(HOUR, "unclean")), [("unclean-reboot", HEALTHY, U)]),
    "unclean reboot two days ago, clean one now": lambda: (sign(boot(2 * DAY, "unclean"), boot(HOUR)), []),
    "crash records": lambda: (sign(only={"crash_records": 2}), [("unclean-reboot", HEALTHY, U)]),
    **{
        f"line {' '.join(line)}, {ago:g} s ago": lambda i=line, a=ago: (
            sign(event(i[0], i[1] or "whatever", a, fields={"below": "0000:65:00.0 0000:66:00.0"})),
            [(f"kernel-{i[0]}", *line_rules.LINES[i][:2])] if a <= DAY else [],
        )
        for line in line_rules.LINES
        for ago in (HOUR, DAY + 1)
    },
    "a kind of line that nobody judges": lambda: (sign(event("amdgpu", "ras-corrected"), event("news", "x")), []),
    "the driver changed": lambda: (
        sign(event("change", "driver", before="570.1", after="580.2")), [("changed", HEALTHY, Cause.NONE)],
    ),
    "a counter for life fell": lambda: (sign(event("counter-fell", AGGREGATE_CE)), [("changed", HEALTHY, Cause.NONE)]),
    "counters of links were cleared": lambda: (
        sign(event("counter-fell", "nvlink_errors_total")), [("changed", HEALTHY, Cause.NONE)],
    ),
    "a counter started anew with the machine": lambda: (
        sign(event("counter-fell", "machine_check_exceptions_total", 60, lasted=300.0), boot(100)), [],
    ),
    "changes of two days ago": lambda: (
        sign(event("change", "driver", 2 * DAY), event("counter-fell", AGGREGATE_CE, 2 * DAY)), [],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(name):
    """What is seen yields exactly these findings, with state and cause."""
    signs, expected = SCENARIOS[name]()
    assert told(signs) == sorted(expected), [f.message for f in findings(signs)]


def failing():
    return any(told(signs) != sorted(expected) for signs, expected in (build() for build in SCENARIOS.values()))


@pytest.mark.parametrize("rule", telemetry_rules.RULES, ids=lambda r: r.__name__)
def test_no_rule_is_idle(monkeypatch, rule):
    """Switching off any one rule makes a scenario fail."""
    monkeypatch.setattr(telemetry_rules, "RULES", tuple(r for r in telemetry_rules.RULES if r is not rule))
    assert failing()


@pytest.mark.parametrize(("table", "key"), [(t, k) for t in (memory_rules.FLAGS, telemetry_rules.HEALTH) for k in t])
def test_no_entry_is_idle(monkeypatch, table, key):
    """Nor is any entry of a table that a rule goes by."""
    monkeypatch.delitem(table, key)
    assert failing()


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_finding_says_something_and_no_more_than_it_must(name):
    """Texts are single short sentences without empty places; the evidence names whose advice a class of action is."""
    for finding in findings(SCENARIOS[name]()[0]):
        for text in filter(None, (finding.message, finding.action, *finding.evidence)):
            assert "\n" not in text
            assert ".." not in text
            assert "None" not in text
            assert text.strip() == text
            assert text.endswith(".") or ": " in text[-80:], text
        assert finding.message
        assert len(finding.message) <= 120, finding.message
        assert len(finding.action) <= 90, finding.action
        assert all(0 < len(text) < 400 for text in finding.evidence)
        for text in (t for t in finding.evidence if t.startswith("Recommended: ")):
            advisers = ("NVIDIA", "DCGM", "AMD", "canaryd", "gpud", "telemetry.xids")
            assert any(a in text for a in advisers), text
        if finding.state is not HEALTHY:
            assert finding.action
            assert (
                any("lear" in text for text in finding.evidence)
                or "exhausted" in finding.rule
                or (finding.rule == "retired-pages")
            ), finding


def test_every_rule_is_in_the_table_of_the_documentation():
    """What a finding is called, an operator can look up."""
    table = (ROOT / "docs" / "telemetry.md").read_text()
    named = {f.rule for build in SCENARIOS.values() for f in findings(build()[0])}
    assert {rule for rule in named if f"`{rule}`" not in table} == set()


def message(signs, rule):
    """Return all that a finding says."""
    found = next(f for f in findings(signs) if f.rule == rule)
    return "\n".join((found.message, found.action, *found.evidence))


def test_an_xid_of_an_application_tells_what_exact_goldens_said():
    """That is what tells a broken device from a broken application."""
    assert "Wait for the exact test" in message(sign(xid(31)), "xid-application")
    passed = message(sign(xid(31), passed=60), "xid-application")
    assert "Exact tests passed 59 minutes after it." in passed
    assert "Check the application first." in passed
    unreached = dataclasses.replace(sign(xid(31)), device=dataclasses.replace(GPU, torch_index=None))
    assert "torch does not reach the device" in message(unreached, "xid-application")
    failed_after = message(sign(xid(31), wrong=60), "xid-application")
    assert "An exact test failed 59 minutes after it." in failed_after
    assert "Check the device first." in failed_after
    repeated = message(sign(xid(31, 9 * HOUR), xid(31, 5 * HOUR), xid(31), passed=60), "xid-repeated")
    assert "NVIDIA's workflow for Xid 31" in repeated
    assert "Check the application first." in repeated


def test_a_suspicion_tells_how_far_its_way_out_is():
    """Before the reset it asks for one, after it for a pass alone."""
    before = message(sign(xid(64)), "xid-recovery")
    assert "Drain the device and reset it." in before
    assert "Clears after a reset and then a clean exact test." in before
    after = message(sign(xid(64), reset(60)), "xid-recovery")
    assert "Run an exact test: canaryd check --device cuda:0" in after
    assert "There was a reset since." in after
    assert "Clears after a reboot and then a clean exact test." in message(sign(xid(168), reset(60)), "xid-recovery")
    assert "There was a reset since." in message(sign(wiped()), "uncorrected-error")


def test_an_uncorrected_error_is_named_once():
    """Volatile and aggregate counter of one error are one place in words."""
    assert message(sign(rise(UE), rise(AGGREGATE_UE), only={UE: 1}), "uncorrected-error").count("dram") == 1
    assert "Kernel log: NVRM: Xid: 95." in message(sign(xid(95)), "uncorrected-error")


def test_stale_telemetry_names_the_reason():
    """The newest failure says why, whether in its detail, in a skipped part or at the end of a traceback."""
    for newest, words in (
        (failed(Outcome.TIMED_OUT), "a call into the driver hung"),
        (
            failed(Outcome.SKIPPED, "permission denied: run as root\nmore"),
            "Reason: permission denied: run as root.",
        ),
        (failed(Outcome.SKIPPED, skipped=(Skipped(case="", reason="no driver"),)), "no driver"),
        (failed(Outcome.ERRORED, "Traceback\n  File\nKeyError: 'x'"), "KeyError: 'x'"),
    ):
        assert words in message(sign(completed=None, newest=newest), "telemetry-stale")


def test_an_nvlink_error_is_decoded_by_the_driver():
    """The words of the message, not the code, say what Xid 145 asks for."""
    text = message(sign(xid(145, fields=FATAL_LINK)), "xid-recovery")
    assert "NVIDIA's table for Xid 144 to 150: RLW_SRC_TRACK, fatal" in text
    assert "driver unknown" not in text


def test_the_limit_of_replays_is_dcgms():
    """31 a minute for generation 5 with 16 lanes, by the bit error rate."""
    assert [replay_limit(5, 16), replay_limit(4, 16), replay_limit(3, 8), replay_limit(1, 1)] == [31, 16, 4, 1]


def test_every_name_that_a_rule_reads_is_a_reading():
    """A rule that asks for a reading which no probe may yield would never speak."""
    names = {*FLAGS, *WORDS, *memory_rules.ECC, *(split_key(k)[0] for k in QUIET)}
    assert names <= READINGS.keys()
    flags = ((flag.reading, flag.labels) for flag in memory_rules.FLAGS.values())
    for name, labels in (*map(split_key, QUIET), *flags):
        assert set(labels) == set(READINGS[name].labels), name


# --- Events -----------------------------------------------------------------------------------------------------------


def between(before=None, after=None, seconds=15.0):
    """Return what happened between two polls as (kind, name) → event."""
    events = changes(poll(5 + seconds, only=before), poll(5, only=after))
    assert {e.last for e in events} <= {NOW - 5}
    return {(e.kind, e.name): e for e in events}


def test_a_counter_that_rises_is_an_event_and_one_that_stays_is_none():
    """With the rise as count, and the values before and after."""
    assert between() == {}
    found = between(after={CE: 5})
    assert list(found) == [("counter", CE)]
    assert (found["counter", CE].count, found["counter", CE].before, found["counter", CE].after) == (2, "3", "5")


def test_a_counter_that_nobody_judges_is_no_event():
    """Energy, and time in which software capped the power, rise at every poll."""
    assert between(after={"energy_joules_total": 6000, "throttle_seconds_total{reason=sw_power_cap}": 9015}) == {}


def test_a_gap_is_no_rise():
    """A counter that could not be read in one of two polls says nothing, however far it moved."""
    assert between(before={CE: None}) == {}
    assert between(after={CE: None}) == {}
    assert between(before={"nvlink_up{link=3}": None}) == {}


def test_counters_that_fall_show_a_reset():
    """One event however many fell; what the counter shows now has risen from 0; an uncorrected error is named first."""
    found = between({UE: 2, CE: 9, "energy_joules_total": 5000}, {UE: 0, CE: 4, "energy_joules_total": 1})
    assert set(found) == {("reset", "driver or device"), ("counter", CE)}
    assert found["counter", CE].count == 4
    assert found["reset", "driver or device"].before == f"{UE} 2"
    assert (found["reset", "driver or device"].reading, found["reset", "driver or device"].labels) == split_key(UE)
    assert "ECC errors (uncorrected, dram) fell from 2 to 0" in found["reset", "driver or device"].detail


def test_a_rise_came_between_two_polls_and_a_reset_is_dated_by_the_newer():
    """So that a rule can share out what came while nobody looked."""
    found = between({"energy_joules_total": 5000}, {"energy_joules_total": 1, CE: 5}, seconds=8 * HOUR)
    assert (found["counter", CE].first, found["counter", CE].last) == (NOW - 5 - 8 * HOUR, NOW - 5)
    assert found["reset", "driver or device"].first == NOW - 5
    hot = between({}, {"temperature_celsius{sensor=core}": 90}, seconds=8 * HOUR)["condition", "hot"]
    assert hot.last - hot.first == hot.count == 45


@pytest.mark.parametrize(
    ("start", "end", "share"),
    [(-10, 200, 100), (0, 100, 100), (25, 50, 25), (-10, 10, 10), (90, 200, 10), (100, 200, 0), (-9, 0, 0)],
)
def test_a_rise_is_shared_out_evenly(start, end, share):
    """What came within a window, if it came at an even rate; a moment is in or out."""
    long = Event(device="d", kind="counter", name="x", first=0.0, last=100.0, count=100.0)
    assert within(long, start, end) == share
    moment = dataclasses.replace(long, first=100.0)
    assert within(moment, start, end) == (100 if start < 100 <= end else 0)


LINKS = {LINK(kind): 9 for kind in ("crc_flit", "crc_data", "replay")}


@pytest.mark.parametrize(
    ("before", "after", "found"),
    [
        # Cleared by hand while energy goes on: no reset, and no rise of the new value.
        (LINKS, dict.fromkeys(LINKS, 2), [("counter-fell", "nvlink_errors_total")]),
        ({"pcie_replays_total": 9}, {"pcie_replays_total": 2}, [("counter-fell", "pcie_replays_total")]),
        # No energy and no ECC count to tell: most of what counts must fall, and more than one.
        (
            {"pcie_replays_total": 9, CE: 0, "energy_joules_total": None},
            {"pcie_replays_total": 2, CE: 0, "energy_joules_total": None},
            [("counter-fell", "pcie_replays_total")],
        ),
        (
            {**LINKS, "energy_joules_total": None, CE: 0},
            {**dict.fromkeys(LINKS, 0), "pcie_replays_total": 0, THERMAL: 0, "energy_joules_total": None, CE: 0},
            [("reset", "driver or device")],
        ),
        # Either alone tells.
        ({}, {"energy_joules_total": 1}, [("reset", "driver or device")]),
        ({}, {CE: 0}, [("reset", "driver or device")]),
    ],
)
def test_only_what_nothing_else_clears_shows_a_reset(before, after, found):
    """`nvidia-smi nvlink -re` and a counter at its end must not end a suspicion."""
    assert list(between(before, after)) == found


SUMS = ("throttle_events_total{scope=core}", "machine_check_exceptions_total")


@pytest.mark.parametrize(
    ("cores", "values", "kinds"),
    [
        ((64, 63), (5600, 5000), ["counter-fell"]),
        ((63, 64), (5000, 5600), []),
        ((64, 64), (5000, 5600), ["counter"]),
        ((64, 63), (5000, 5600), ["counter"]),
        ((None, None), (5000, 5600), ["counter"]),
    ],
)
@pytest.mark.parametrize("key", SUMS)
def test_a_processor_that_goes_or_comes_is_neither_reset_nor_rise(key, cores, values, kinds):
    """Its counts leave and come back; that the machine was started again, its boot tells."""
    before, after = ({key: v, "cpu_cores{state=online}": n} for v, n in zip(values, cores, strict=True))
    assert [kind for kind, _ in between(before, after)] == kinds


def test_a_reboot_of_the_host_is_told_by_its_boot_alone():
    """Even where all that it counts falls at once."""
    keys = (*SUMS, DIMM_CE, DIMM_UE)
    assert {kind for kind, _ in between(dict.fromkeys(keys, 9), dict.fromkeys(keys, 1))} == {"counter-fell"}


def test_a_counter_for_life_that_falls_is_no_reset():
    """It says that the board was replaced or its record cleared."""
    found = between({AGGREGATE_CE: 12_000}, {AGGREGATE_CE: 3})
    assert list(found) == [("counter-fell", AGGREGATE_CE)]


@pytest.mark.parametrize(
    ("before", "after", "name", "values"),
    [
        ({}, {"row_remap_pending": 1}, "row_remap_pending", ("0", "1")),
        ({}, {"nvlink_up{link=3}": False}, "nvlink_up{link=3}", ("1", "0")),
        ({}, {"pcie_width_max": 8}, "pcie_width_max", ("16", "8")),
        ({}, {"pcie_width": 8}, "pcie_width", ("16", "8")),
        (
            {},
            {"recovery_action{action=none}": None, "recovery_action{action=reset}": 1},
            "recovery_action",
            ("none", "reset"),
        ),
        ({}, {"clock_source{source=tsc}": None, "clock_source{source=hpet}": 1}, "clock_source", ("tsc", "hpet")),
    ],
)
def test_a_flag_that_changes_is_an_event(before, after, name, values):
    """With what it was before and what it is now."""
    found = between(before, after)
    assert list(found) == [("flag", name)]
    assert (found["flag", name].before, found["flag", name].after) == values


@pytest.mark.parametrize(
    ("facts", "name"),
    [
        ({"pcie_width": 8, "pcie_generation": 5, "utilization_ratio{engine=gpu}": 0.6}, "pcie-width"),
        ({"pcie_generation": 3, "utilization_ratio{engine=gpu}": 0.6}, "pcie-generation"),
        ({"temperature_celsius{sensor=core}": 90}, "hot"),
        ({"temperature_celsius{sensor=edge}": 100}, "hot"),
        ({"temperature_margin_celsius": -2}, "hot"),
        ({"throttle_active{reason=hw_thermal}": 1}, "throttle hw_thermal"),
        ({"pressure_ratio{kind=full,resource=memory}": 0.1}, "memory-pressure"),
    ],
)
def test_a_condition_that_holds_is_an_event_for_as_long(facts, name):
    """Its count is the time since the poll before, at most three periods of 15 s, and none when the clock went back."""
    assert between({}, facts)["condition", name].count == 15
    assert between({}, facts, seconds=9000)["condition", name].count == 45
    assert not [kind for kind, _ in between({}, facts, seconds=-60) if kind == "condition"]


@pytest.mark.parametrize(
    "facts",
    [
        {"pcie_generation": 3, "utilization_ratio{engine=gpu}": 0.5},
        {"pcie_generation": 3, "utilization_ratio{engine=gpu}": None},
        {"pcie_width": 8, "utilization_ratio{engine=gpu}": 0.5},  # a link may rest when the device does
        {"pcie_width": 8, "utilization_ratio{engine=gpu}": None},
        {"pcie_width": 0, "pcie_generation": 5, "utilization_ratio{engine=gpu}": 0.9},
        {"temperature_celsius{sensor=core}": 89},
        {"temperature_margin_celsius": -1},
        {"throttle_active{reason=sw_thermal}": 1},  # its time is counted, which is better
        {"throttle_active{reason=gpu_idle}": 1},
        {"pressure_ratio{kind=full,resource=memory}": 0.09},
    ],
)
def test_a_condition_that_does_not_hold_is_no_event(facts):
    """At the last value before each limit."""
    assert not [kind for kind, _ in between({}, facts) if kind == "condition"]


def test_what_is_watched_changes_with_flags_and_judged_counters_alone():
    """Temperatures, energy and idle time move at every poll and are no reason to store one."""
    quiet = judged_values(poll())
    assert hash(quiet) == hash(
        judged_values(poll(only={"temperature_celsius{sensor=core}": 61, "energy_joules_total": 9}))
    )
    assert quiet == judged_values(poll(only={"throttle_seconds_total{reason=sw_power_cap}": 9999}))
    for facts in (
        {CE: 4},
        {"row_remap_pending": 1},
        {"clock_source{source=tsc}": None, "clock_source{source=hpet}": 1},
    ):
        assert quiet != judged_values(poll(only=facts))


def test_a_condition_lasts_through_polls_until_it_has_been_away_for_settle(tmp_path):
    """A width that flaps at every poll makes one finding that holds: from the polls, through the store, to the rule."""
    store = Store.open(tmp_path / "state", now=lambda: NOW)
    busy = {"utilization_ratio{engine=gpu}": 0.9, "pcie_generation": 5}
    polls = [poll(4000 - 15 * i, only={**busy, "pcie_width": 8 if i % 2 else 16}) for i in range(200)]
    seen = []
    for before, after in itertools.pairwise(polls):
        store.add_events(changes(before, after))
        signs = sign(completed=after, events=tuple(store.events()), now=after.started + 1)
        seen.append([f.rule for f in findings(signs)])
    start = seen.index(["pcie-width"])
    assert 6 <= start <= 9
    assert all(rules == ["pcie-width"] for rules in seen[start:])
    last = max(e.last for e in store.events())
    for away, expected in ((POLICY.settle, ["pcie-width"]), (POLICY.settle + 1, [])):
        later = sign(completed=poll(NOW - last - away), events=tuple(store.events()), now=last + away)
        assert [f.rule for f in findings(later)] == expected
    store.close()


def test_the_place_of_an_xid_outlives_merging(tmp_path):
    """Two Xid 13 at one place ten minutes apart are still two occasions there when the store has merged them."""
    store = Store.open(tmp_path / "state", now=lambda: NOW)
    top = NOW // HOUR * HOUR - HOUR
    store.add_events([xid(13, NOW - top - t, PLACE) for t in (100, 700)])
    assert len(store.events()) == 1
    assert told(sign(events=tuple(store.events()))) == [("xid-repeated", DEGRADED, U)]
    store.close()


def line(text, ago):
    """Return the event of a line as the driver prints it."""
    fields = kernel_log.classify(text)._asdict()
    return log_event(LogRecord(boot="b", sequence=1, at=NOW - ago, **fields), "GPU-a")


def test_what_is_graded_apart_is_kept_apart(tmp_path):
    """A harmless line after a fatal one of the same code and hour hides nothing."""
    store = Store.open(tmp_path / "state", now=lambda: NOW)
    top = NOW // HOUR * HOUR - HOUR
    switch = "nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 20034, {}, Link 30 LTSSM Fault Up"
    link = "NVRM: Xid (PCI:0008:06:00): 145, RLW_SRC_TRACK {} XC0 i0 Link 00 (0x00000007 {} 0x0 0x0 0x0)"
    lines = [switch.format("Fatal"), switch.format("Non-fatal"), link.format("Fatal", "0x00000001")]
    lines += [link.format("Non-fatal", "0x00000002")] * 2
    for second, text in enumerate(lines):
        store.add_events([line(text, NOW - top - second)])
    kept = store.events()
    assert [(e.name, e.count) for e in kept] == [
        ("20034 fatal", 1),
        ("20034 non-fatal", 1),
        ("145 RLW_SRC_TRACK fatal reset", 1),
        ("145 RLW_SRC_TRACK non-fatal none", 2),
    ]
    assert told(sign(events=tuple(kept))) == sorted(
        [("sxid", DEGRADED, H), ("sxid", HEALTHY, H), ("xid-recovery", SUSPECT, U)]
    )
    assert told(sign(events=tuple(kept), policy=policy(xids={"145": "none"}))) == sorted(
        [("sxid", DEGRADED, H), ("sxid", HEALTHY, H)]
    )
    assert triggers([kept[2]]) == "Xid 145"
    store.close()


def test_a_line_of_the_kernel_log_keeps_its_fields():
    """From the text of the log through the event to the grade, whatever the values hold."""
    text = "NVRM: Xid (PCI:0008:06:00): 145, RLW_SRC_TRACK Fatal XC0 i0 Link 00 (0x00000007 0x00000001 0x0 0x0 0x0)"
    record = kernel_log.classify(text)
    made = log_event(LogRecord(boot="b", sequence=1, at=5.0, **record._asdict()), "GPU-a")
    assert (made.device, made.kind, made.first, made.last, made.count) == ("GPU-a", "xid", 5, 5, 1)
    assert (made.name, made.code) == ("145 RLW_SRC_TRACK fatal reset", 145)
    assert made.detail.startswith("NVRM: Xid (PCI:0008:06:00): 145")
    fields = made.fields
    assert (fields["unit"], fields["intr_info"], fields["error_status"]) == (
        "RLW_SRC_TRACK",
        "0x00000007",
        "0x00000001",
    )
    odd = log_event(
        LogRecord(boot="b", sequence=1, at=5.0, kind="aer", text="{a=b}", fields={"x": "1, {y=2}"}), "GPU-a"
    )
    assert (odd.detail, odd.fields) == ("{a=b}", {"x": "1, {y=2}"})
    action = (
        "NVRM: Xid (PCI:0000:01:00): 154, GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)"
    )
    record = kernel_log.classify(action)
    made = log_event(LogRecord(boot="b", sequence=1, at=NOW - 60, **record._asdict()), "GPU-a")
    assert "Restart the machine.\n" in message(sign(made), "xid-recovery")
    assert "Recommended: reboot (NVIDIA's Xid catalogue)." in message(sign(made), "xid-recovery")


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (rise(UE), "uncorrected ECC error"),
        (rise(DIMM_UE), "uncorrected ECC error"),
        (event("edac", "uncorrected"), "uncorrected ECC error"),
        (rise(CE, 100), "corrected errors jumped"),
        (rise(CE, 99), ""),
        (rise(DIMM_CE, 10), "corrected errors jumped"),
        (rise(DIMM_CE, 9), ""),
        (event("edac", "corrected"), ""),
        (xid(31), "Xid 31"),
        (xid(63), "Xid 63"),
        (xid(999), "Xid 999"),
        (xid(79), ""),
        (xid(38), ""),
        (event("mce", "logged"), "machine check"),
        (event("mce", "corrected"), ""),
        (rise("machine_check_exceptions_total"), "machine check"),
        (event("change", "driver", before="1", after="2"), "driver changed"),
        (event("change", "device", before="found", after="gone"), ""),
        (reset(1), "reset"),
        (boot(1), "reboot"),
        (rise(THERMAL), "throttled"),
        (rise("throttle_events_total{scope=core}"), "throttled"),
        (rise("device_recoveries_total"), "reset"),
        (held_down("hw_thermal"), "throttled"),
        (event("condition", "hot"), "throttled"),
        (event("thermal", "core"), "throttled"),
        (event("condition", "pcie-width"), ""),
        (rise(AER("fatal")), "PCI Express error"),
        (rise(AER("correctable")), ""),
        (rise("pcie_replays_total"), ""),
        (event("amdgpu", "ring-timeout"), "amdgpu ring-timeout"),
        (event("amdgpu", "ras-corrected"), ""),
        (event("intel", "hang"), "Intel hang"),
        (event("oom", "system"), ""),
    ],
)
def test_what_calls_for_exact_goldens(made, reason):
    """Design, section 4: an Xid or machine check, a jump in corrected errors, heat, a change."""
    assert triggers([made]) == reason


def test_triggers_are_named_once_and_three_at_most():
    """The reason is stored with the run, so it stays short."""
    assert triggers([]) == ""
    assert triggers([xid(31), xid(31), reset(1)]) == "Xid 31, reset"
    assert triggers([xid(c) for c in (13, 31, 63, 64, 95)]) == "Xid 13, Xid 31, Xid 63"


def test_a_poll_is_fresh_for_five_periods_and_two_minutes():
    """One missed poll on a busy machine must not flap."""
    assert (stale_after(15), stale_after(60)) == (120, 300)


# --- Properties -------------------------------------------------------------------------------------------------------

NAMES = [
    *QUIET,
    *(name for _, name in line_rules.LINES),
    *telemetry_rules.CONDITIONS,
    "throttle hw_thermal",
    "fatal port",
    "79",
    "13",
    "154",
    "x{",
    "",
    "driver",
]
KINDS = [
    *("counter", "reset", "boot", "change", "flag", "condition", "counter-fell", "xid", "sxid", "mce", "edac", "aer"),
    *("port", "unplaced"),
    *("pcie", "off-bus", "oom", "nvme", "thermal", "amdgpu", "intel", "driver", "hang", "clock", "lockup", "?"),
]
AGES = st.floats(-DAY, 40 * DAY)
EVENTS = st.builds(
    lambda kind, name, ago, lasted, count, words, facts: event(
        kind, name, ago, lasted=lasted, count=count, before=words[0], after=words[1], detail=words[2], **facts
    ),
    st.sampled_from(KINDS),
    st.sampled_from(NAMES) | st.integers(0, 200).map(str) | st.text(max_size=9),
    AGES,
    st.floats(0, HOUR),
    st.floats(0, 1e6),
    st.tuples(*[st.sampled_from(["", "0", "1", "tsc", f"{UE} 2"]) | st.text(max_size=9)] * 3),
    st.fixed_dictionaries(
        {},
        optional={
            "code": st.none() | st.integers(-1, 10**6) | st.sampled_from([13, 79, 94, 154]),
            "reading": st.sampled_from(["", *READINGS]) | st.text(max_size=9),
            "labels": st.dictionaries(st.text(max_size=9), st.text(max_size=9), max_size=3),
            "fields": st.dictionaries(
                st.sampled_from(["action", "severity", "unit", "intr_info", "gpc"]),
                st.sampled_from(["reset", "fatal", "0x1"]) | st.text(max_size=9),
                max_size=3,
            ),
        },
    ),
)
VALUES = st.integers() | st.floats() | st.text(max_size=3) | st.booleans()
READING = st.builds(
    lambda key, value: Reading(name=split_key(key)[0], value=value, labels=split_key(key)[1]),
    st.sampled_from([*QUIET, *READINGS]) | st.text(max_size=9),
    VALUES,
)
RUNS = st.builds(
    lambda ago, outcome, readings, detail: poll(ago, outcome=outcome, readings=tuple(readings), detail=detail),
    AGES,
    st.sampled_from(Outcome),
    st.lists(READING, max_size=9),
    st.sampled_from(["", "GPU is lost", "Traceback\nx"]) | st.text(max_size=9),
)
POLLS = st.builds(
    Poll,
    period=st.floats(0.1, 1e4),
    newest=st.none() | RUNS,
    completed=st.none() | RUNS,
    failures=st.integers(0, 9),
    since=st.floats(0, NOW),
)


@given(
    st.lists(EVENTS, max_size=12),
    st.dictionaries(st.text(max_size=3), POLLS, max_size=3),
    st.none() | AGES,
    st.none() | AGES,
)
def test_no_soup_of_signs_raises(events, polls, passed, wrong):
    """Whatever devices, drivers and a clock that was set give, there is an answer, and it can be printed."""
    for finding in findings(sign(*events, polls=polls, passed=passed, wrong=wrong)):
        assert finding.rule
        assert finding.message


@given(RUNS, RUNS)
def test_no_soup_of_readings_raises(before, after):
    """Two polls of anything give events whose count is a number above 0, and something hashable to watch."""
    for made in changes(before, after):
        assert 0 < made.count < math.inf
    hash(judged_values(after))
    assert changes(before, dataclasses.replace(before, started=before.started)) == []


@given(
    st.dictionaries(
        st.sampled_from(["temperature_celsius{sensor=core}", "utilization_ratio{engine=gpu}", "energy_joules_total"]),
        st.floats(0, 0.5),
    ),
    st.sets(st.sampled_from(sorted(QUIET))),
    st.floats(0, 119),
    st.none() | AGES,
)
def test_an_all_quiet_machine_yields_nothing_worse_than_healthy(moved, missing, ago, passed):
    """Whatever of the readings of a healthy device is missing, and however it is loaded."""
    facts = {**moved, **dict.fromkeys(missing)}
    before, after = poll(ago + 15, only=facts), poll(ago, only=facts)
    events = changes(before, after)
    assert {f.state for f in findings(sign(*events, completed=after, passed=passed))} <= {HEALTHY}


@given(st.integers(-1, 400), AGES)
def test_every_xid_is_forgotten_in_the_end(code, ago):
    """No code holds a device for longer than the watch, whatever the catalogue says of it."""
    made = dataclasses.replace(xid(31, ago), name=str(code), code=code)
    later = sign(made, now=made.last + 30 * DAY + 1, polls={})
    assert told(later) == []
    worst = max((f.state.severity for f in findings(sign(made, polls={}))), default=0)
    assert worst <= SUSPECT.severity
    assert worst == 0 or xids.explain(code).grade != "none"


def test_a_message_says_when_and_not_how_long_ago():
    """It is stored, and read long after it was written."""
    text = message(sign(event("off-bus", "driver", HOUR, detail="GPU is lost")), "gpu-lost")
    assert f"{datetime.fromtimestamp(NOW - HOUR, tz=timezone.utc):%Y-%m-%d %H:%M:%S} UTC" in text
    assert " ago" not in text
