"""Polls, events and signs as tests of the telemetry's judgement make them."""

import dataclasses
import itertools

from canaryd.config.settings import TelemetryConfig
from canaryd.facts import LogRecord, Reading
from canaryd.judge.telemetry.events import log_event
from canaryd.judge.telemetry.readings import split_key
from canaryd.judge.telemetry.rules import findings
from canaryd.judge.telemetry.signals import Poll, Signs
from canaryd.model import Cause, Device, Event, Outcome, Run, State
from canaryd.worker.telemetry import kernel_log

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
    "fabric_fault{fault=degraded_bandwidth}": 0,
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


def reset(ago, **changes):
    fell = {"before": "energy_joules_total 9", "after": "energy_joules_total 0"}
    return event("reset", "driver or device", ago, **fell, **changes)


def wiped():
    """Return a reset that cleared an uncorrected error."""
    name, labels = split_key(UE)
    return event("reset", "driver or device", before=f"{UE} 2", after=f"{UE} 0", reading=name, labels=labels)


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
    fields |= {"siblings": ("cuda:1",), "last_pass": None if passed is None else NOW - passed, "now": now}
    fields |= {"last_mismatch": None if wrong is None else NOW - wrong}
    return Signs(**{**fields, **changes})


def told(signs):
    return sorted((f.rule, f.state, f.cause) for f in findings(signs))


def policy(**changes):
    return dataclasses.replace(POLICY, **changes)


UE, AGGREGATE_UE = (f"ecc_{k}errors_total{{kind=uncorrected,location=dram}}" for k in ("", "aggregate_"))
CE, AGGREGATE_CE = (f"ecc_{k}errors_total{{kind=corrected,location=dram}}" for k in ("", "aggregate_"))
DIMM_UE, DIMM_CE = (f"edac_errors_total{{controller=mc0,dimm=A1,kind={k}}}" for k in ("uncorrected", "corrected"))
THERMAL = "throttle_seconds_total{reason=hw_thermal}"
AER = "pcie_aer_errors_total{{severity={}}}".format
LINK = "nvlink_errors_total{{kind={},link=3}}".format
FATAL_LINK = {"unit": "RLW_SRC_TRACK", "intr_info": "0x00000007", "error_status": "0x00000001"}
PLACE = {"gpc": "9", "tpc": "1", "sm": "0"}


def message(signs, rule):
    """Return all that a finding says."""
    found = next(f for f in findings(signs) if f.rule == rule)
    return "\n".join((found.message, found.action, *found.evidence))


def line(text, ago):
    """Return the event of a line as the driver prints it."""
    fields = kernel_log.classify(text)._asdict()
    return log_event(LogRecord(boot="b", sequence=1, at=NOW - ago, **fields), "GPU-a")
