"""A node that shows everything there is: the largest page that canaryd may have to serve."""

from __future__ import annotations

import itertools
import math

from canaryd.engine import budget
from canaryd.facts import Comparison, Exactness, Reading
from canaryd.judge.recordings.drift import Drift
from canaryd.judge.telemetry.readings import READINGS
from canaryd.judge.telemetry.signals import Poll
from canaryd.metrics.families import COMPONENTS, FAMILIES, XIDS, DeviceView, Snapshot
from canaryd.model import Cause, Device, Finding, Outcome, Run, State, Verdict

NOW = 1_790_000_000.0
PROBES = (
    *("exact_attention", "exact_canary", "exact_integer", "exact_matmul", "model_canary"),
    *("exact_units", "host_transfer", "memory_sweep", "recorded_kernels"),
)
KERNELS = (
    *("gemm", "sdpa", "rmsnorm", "layernorm", "silu", "swiglu", "gelu", "rope", "softmax", "quantised", "fp8"),
    *("exp", "exp2", "log", "rsqrt", "erf", "sin", "cos"),
)
FORMATS = ("float32", "bfloat16", "float16")
RULES = 8
"""Findings at once on a device: more than a device in trouble has."""
VALUES = {
    "when": ("current", "pending"),
    "location": ("sram", "dram", "l2", "register_file"),
    "detection": ("parity", "sec_ded"),
    "unit": ("l2", "sm", "pcie", "mcu", "other"),
    "available": ("max", "high", "partial", "low", "none"),
    "sensor": ("core", "memory", "hotspot"),
    "threshold": ("shutdown", "slowdown", "memory_max", "gpu_max", "acoustic_min", "acoustic_current", "acoustic_max"),
    "fan": ("0", "1"),
    "limit": ("enforced", "default", "min", "max"),
    "reason": (
        *("gpu_idle", "applications_clocks", "sw_power_cap", "hw_slowdown", "sync_boost", "sw_thermal", "hw_thermal"),
        *("hw_power_brake", "display_clocks", "board_limit", "reliability"),
    ),
    "scope": ("core", "package"),
    "domain": ("graphics", "sm", "memory", "video"),
    "severity": ("correctable", "nonfatal", "fatal"),
    "link": tuple(map(str, range(18))),
    "engine": ("gpu", "memory", "encoder", "decoder", "jpeg", "ofa"),
    "dtype": FORMATS,
    "path": ("decode", "forced"),
    "batch": ("1", "8"),
    "prompt": tuple(f"prompt{i}" for i in range(4)),
    "cause": ("corrected", "uncorrected"),
}
"""Label → every value that telemetry or a canary gives it on one GPU."""
KINDS = {
    "ecc_errors_total": ("corrected", "uncorrected"),
    "ecc_aggregate_errors_total": ("corrected", "uncorrected"),
    "nvlink_errors_total": ("replay", "recovery", "crc_flit", "crc_data", "ecc_data"),
    "recorded_error_ratio": KERNELS,
    "kernel_seconds": KERNELS,
}
"""Reading → every value of its label `kind`."""
ELSEWHERE = (
    *("edac", "machine_check", "ras", "cpu_cores", "load", "memory_available", "swap", "pressure", "clock_source"),
    *("boot_time", "crash", "endpoint", "memory_bad_pages", "device_", "temperature_margin_threshold"),
)
"""How readings begin that no NVIDIA GPU gives."""


def readings() -> list[Reading]:
    """Return every reading that a GPU may give, with every value of every label."""
    found = []
    for name, kind in READINGS.items():
        if not name.startswith(ELSEWHERE):
            choices = [KINDS[name] if label == "kind" else VALUES.get(label, ("x",)) for label in kind.labels]
            for values in itertools.product(*choices):
                labels = dict(zip(kind.labels, values, strict=True))
                found.append(Reading(name=name, value=1e9 / (7 + len(found)), labels=labels))
    return found


def device(index: int, instance: int = 0, parent: str = "") -> Device:
    """Return a GPU, or an instance of one."""
    detail = {"bus_id": f"00000000:{index:02x}:00.0", "driver": "580.95.05", "vbios": "96.00.A5.00.01", "torch": "2.13"}
    return Device(
        uuid=f"{'MIG' if parent else 'GPU'}-{index:08x}-1f2e-4d3c-8b5a-{instance:012x}",
        backend="cuda",
        index=index,
        model="NVIDIA H100 80GB HBM3" + (" MIG 1g.10gb" if parent else ""),
        detail=detail | ({"instance": str(instance)} if parent else {"serial": f"165{index:010d}"}),
        parent=parent,
    )


CONFIGURED = {"canaryd_devices_expected": 16, "canaryd_budget_share_ratio": 0.005}
VALUES_OF_NODE = {name: 0 for name, kind in FAMILIES.items() if not kind.labels and name not in CONFIGURED} | {
    "canaryd_config_last_reload_successful": 1,
    "canaryd_config_last_reload_success_timestamp_seconds": NOW - 3600,
}
"""What a page says without labels, but for what the configuration says."""


def view(part: Device, text: str = "") -> tuple[DeviceView, dict]:
    """Return all there is to say of a device that fails, with `text` wherever anything free can stand; its counters."""
    stack = {
        "torch": "2.13.0+cu130",
        "cuda": "13.0",
        "cudnn": "9.14",
        "driver": "580.95.05",
        "kernel": "6.1.0-40-amd64",
    }
    runs = {
        probe: Run(
            id=f"019a0000000{n}-0000ab",
            device=part.uuid,
            probe=probe,
            probe_version=1,
            started=NOW - 60,
            seconds=2.5,
            outcome=Outcome.COMPLETED,
            stack=stack,
            detail=text,
            trigger=text,
            comparisons=(
                Comparison(case=f"case {text}", shape="", seed=1, exactness=Exactness.UNIVERSAL, wrong_trials=1),
            ),
        )
        for n, probe in enumerate(PROBES)
    }
    stack_id = runs[PROBES[0]].stack_id
    findings = tuple(
        Finding(rule=f"rule-{n}", state=State.SUSPECT, cause=Cause.HARDWARE, message=f"{n} {text}", repro=text)
        for n in range(RULES)
    )
    kinds = [("model_canary", dtype) for dtype in FORMATS] + [("recorded_kernels", kind) for kind in KERNELS]
    status = {"known": 3, "unknown": 1, "learning": 0}
    verdict = Verdict(
        device=part.uuid, state=State.SUSPECT, cause=Cause.HARDWARE, findings=findings, decided=NOW, since=NOW - 900
    )
    shown = DeviceView(
        device=part,
        present=True,
        verdict=verdict,
        drill_verdict=Verdict(
            device=part.uuid, state=State.FAULTY, cause=Cause.HARDWARE, findings=(), decided=NOW, since=NOW, drill=True
        ),
        last_runs=runs,
        last_success=dict.fromkeys(PROBES, NOW - 3600),
        fault_rate=dict.fromkeys(PROBES, 2.5e-7),
        fingerprints={(probe, stack_id): 2**52 + n for n, probe in enumerate(PROBES)},
        periods=dict.fromkeys(PROBES, 3600.0),
        stacks={stack_id: stack},
        acknowledged=True,
        acknowledged_at=NOW - 86_400.0,
        drifts=[
            Drift(probe=probe, reading=kind, status=status, ratio=math.inf, agreement=0.25, first=10)
            for probe, kind in kinds
        ],
        polls={"nvidia_telemetry": Poll(period=15.0, newest=runs[PROBES[0]], completed=runs[PROBES[0]])},
        spent=dict.fromkeys(budget.PURPOSES, 12345.678),
        skipped=dict.fromkeys(budget.REASONS, 7),
        withheld="heat",
        readings=[*readings(), Reading(name="made_up", value=text)],
    )
    counters: dict = {}
    for name, labels in (
        *((n, {"probe": p}) for n in ("probe_mismatches", "probe_trials", "drill_runs") for p in PROBES),
        *(("xid_errors", {"xid": code}) for code in XIDS),
        *(("sxid_errors", {"sxid": code}) for code in ("20034", "22013")),
        *(("kernel_log_events", {"kind": "aer", "name": name}) for name in ("correctable", "nonfatal", "fatal")),
        *(("stack_changes", {"component": name}) for name in COMPONENTS),
    ):
        counters[name, frozenset({"device": part.uuid, **labels}.items())] = 12345.0
    return shown, counters


def node(gpus: int = 16, instances: int = 0, text: str = "") -> Snapshot:
    """Return a node of `gpus` GPUs, each divided into `instances`, all of them in trouble."""
    views: list[DeviceView] = []
    counters: dict = {}
    for index in range(gpus):
        whole = device(index)
        for part in (whole, *(device(index, n + 1, whole.uuid) for n in range(instances))):
            shown, counted = view(part, text)
            views.append(shown)
            counters |= counted
    return Snapshot(values=VALUES_OF_NODE | CONFIGURED, devices=views, counters=counters)
