"""The readings that telemetry probes yield: one table for their names, units, labels and meaning.

The exposition, docs/metrics.md and the tests of every telemetry probe go by this table: a reading `x` is exported as
`canaryd_x`. A probe may yield nothing that is not in it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import NamedTuple


class Kind(NamedTuple):
    """What a reading of one name is."""

    type: str
    """"gauge", or "counter" for what only rises until something resets it."""
    labels: tuple[str, ...]
    help: str
    volatile: bool = False
    """Counters only: starts at 0 again when the driver is loaded or the device reset, which a fall therefore shows."""
    event: bool = False
    """Counters only: each rise is an event that is kept and judged."""


def _gauge(help_: str, *labels: str) -> Kind:
    return Kind("gauge", labels, help_)


def _counter(help_: str, *labels: str, volatile: bool = False, event: bool = False) -> Kind:
    return Kind("counter", labels, help_, volatile, event)


READINGS: Mapping[str, Kind] = {
    # Memory and caches of an accelerator.
    "ecc_enabled": _gauge(
        "1 while error correction is on; when is current (now) or pending (after the next reset).", "when"
    ),
    "ecc_errors_total": _counter(
        "Errors since the driver was loaded, by kind (corrected, uncorrected, deferred) and location.",
        *("kind", "location"),
        volatile=True,
        event=True,
    ),
    "ecc_aggregate_errors_total": _counter(
        "Errors over the device's life, by kind and location.", "kind", "location", event=True
    ),
    "ecc_sram_threshold_exceeded": _gauge("1 when the device itself says that its SRAM exceeds the RMA threshold."),
    "ecc_sram_uncorrected_total": _counter(
        "Uncorrected SRAM errors since the driver was loaded, by detection (parity, sec_ded); in ecc_errors_total too.",
        "detection",
        volatile=True,
    ),
    "ecc_sram_aggregate_uncorrected_total": _counter(
        "Uncorrected SRAM errors over the device's life, by detection; in ecc_aggregate_errors_total too.", "detection"
    ),
    "ecc_sram_units_total": _counter(
        "Uncorrected SRAM errors over the device's life, by unit (l2, sm, pcie, mcu, other); the same errors again.",
        "unit",
    ),
    "row_remap_rows": _gauge("Memory rows replaced by spare ones, by cause.", "cause"),
    "row_remap_pending": _gauge("1 while a replacement waits for a reset."),
    "row_remap_failed": _gauge("1 after a row could not be replaced."),
    "row_remap_banks": _gauge("Memory banks by how many spare rows they have left.", "available"),
    "retired_pages": _gauge("Memory pages taken out of use, by cause.", "cause"),
    "retired_pages_pending": _gauge("1 while a page waits for a reset to be taken out of use."),
    # Heat, power, clocks.
    "temperature_celsius": _gauge("Temperature by sensor.", "sensor"),
    "temperature_threshold_celsius": _gauge("Temperature at which the device acts, by threshold.", "threshold"),
    "temperature_margin_celsius": _gauge("Degrees left until the device slows itself down."),
    "temperature_margin_threshold_celsius": _gauge(
        "Margin at which the device acts, by threshold; negative where it acts past the end of its margin.", "threshold"
    ),
    "fan_ratio": _gauge("Fan speed over its maximum.", "fan"),
    "fan_rpm": _gauge("Fan speed in revolutions per minute.", "fan"),
    "power_watts": _gauge("Power drawn now."),
    "power_limit_watts": _gauge("Power limit by kind (enforced, default, min, max).", "limit"),
    "energy_joules_total": _counter("Energy drawn since the driver was loaded.", volatile=True),
    "throttle_active": _gauge("1 while the reason holds the clocks down.", "reason"),
    "throttle_seconds_total": _counter(
        "Time for which the reason held the clocks down.", "reason", volatile=True, event=True
    ),
    "throttle_events_total": _counter(
        "Times that a core (or package) slowed down for heat; the largest count of all.",
        "scope",
        volatile=True,
        event=True,
    ),
    "clock_hertz": _gauge("Clock by domain.", "domain"),
    "clock_max_hertz": _gauge("Highest clock by domain.", "domain"),
    "performance_state": _gauge("P-state: 0 is full speed."),
    # Links.
    "pcie_generation": _gauge("PCI Express generation in use; it falls when idle."),
    "pcie_generation_max": _gauge("PCI Express generation that device and slot can do."),
    "pcie_width": _gauge("PCI Express lanes in use."),
    "pcie_width_max": _gauge("PCI Express lanes that device and slot can do."),
    "pcie_replays_total": _counter("PCI Express packets sent again.", volatile=True, event=True),
    "pcie_aer_errors_total": _counter(
        "PCI Express errors that the port reported, by severity (correctable, nonfatal, fatal).",
        "severity",
        volatile=True,
        event=True,
    ),
    "nvlink_up": _gauge("1 while the link is up.", "link"),
    "nvlink_errors_total": _counter("Errors of a device-to-device link.", "kind", "link", volatile=True, event=True),
    "fabric_ready": _gauge("1 when the device has joined its NVLink fabric."),
    "fabric_fault": _gauge("1 while the driver reports the fault of the NVLink fabric.", "fault"),
    # Use and settings.
    "utilization_ratio": _gauge("Share of time in use, by engine.", "engine"),
    "memory_total_bytes": _gauge("Memory of the device."),
    "memory_used_bytes": _gauge("Memory in use."),
    "memory_reserved_bytes": _gauge("The part of the memory in use that the driver keeps for itself."),
    "persistence_mode": _gauge("1 while the driver stays initialised without a client."),
    "compute_mode": _gauge("Always 1; the label says who may use the device.", "mode"),
    "mig_enabled": _gauge("1 while the device is divided into instances."),
    "compute_processes": _gauge("Processes that compute on the device."),
    "compute_processes_memory_bytes": _gauge("Device memory that these processes hold."),
    "compute_process_age_seconds": _gauge("Seconds since the newest of these processes began, without canaryd's own."),
    "recovery_action": _gauge("Always 1; what the driver itself says must be done to recover.", "action"),
    "memory_bad_pages": _gauge("Memory pages that the driver has reserved as bad, by status.", "status"),
    "device_health": _gauge(
        "Always 1; what the device's own health check says (ok, warning, alarm, critical, unknown).", "status"
    ),
    "device_fault": _gauge("Always 1; the code of a fault that the device says it has.", "code"),
    "device_recoveries_total": _counter(
        "Times that the driver had to restart the device to free it.", volatile=True, event=True
    ),
    # What canaries give.
    "recorded_error_ratio": _gauge("Largest error of a float32 result over its bound, by kind of kernel.", "kind"),
    "kernel_seconds": _gauge("Time of one call, the mean over the kind's cases of their medians.", "kind"),
    "endpoint_first_token_seconds": _gauge("From a request to its first token.", "api"),
    "endpoint_token_seconds": _gauge("From one token to the next, on average.", "api"),
    "endpoint_prompt_tokens": _gauge("Tokens that the server counts in a prompt.", "api", "prompt"),
    "endpoint_start_time_seconds": _gauge("When the server started, since the epoch, where it says so."),
    "endpoint_nonfinite": _gauge("Log probabilities that are missing or not finite, in all answers together."),
    # The host.
    "edac_errors_total": _counter(
        "Memory errors that EDAC counted, by kind (corrected, uncorrected), controller and module.",
        *("kind", "controller", "dimm"),
        volatile=True,
        event=True,
    ),
    "edac_controllers": _gauge("Memory controllers that EDAC watches; without one, memory errors are not known."),
    "machine_check_exceptions_total": _counter(
        "Machine check exceptions since boot, all cores that are online.", volatile=True, event=True
    ),
    "cpu_cores": _gauge("Processors of the machine, by state (online, offline).", "state"),
    "load_average": _gauge("Tasks that run or wait, averaged over a minute."),
    "memory_available_bytes": _gauge("Memory available without swapping."),
    "swap_total_bytes": _gauge("Swap space."),
    "swap_used_bytes": _gauge("Swap space in use."),
    "pressure_ratio": _gauge(
        "Share of the last minute in which tasks waited for the resource: some of them, or all (full).",
        *("resource", "kind"),
    ),
    "clock_source": _gauge("Always 1; what the kernel measures time with.", "source"),
    "boot_time_seconds": _gauge("When the machine started, since the epoch."),
    "crash_records": _gauge("Records of a kernel crash that wait in pstore."),
}


ACRONYMS = {"cpu": "CPU", "ecc": "ECC", "edac": "EDAC", "nvlink": "NVLink", "pcie": "PCIe", "sram": "SRAM"}
"""Parts of names that people do not write in lower case."""


@functools.lru_cache(maxsize=4096)
def split_key(key: str) -> tuple[str, Mapping[str, str]]:
    """Return name and labels of a `Reading.key`: the inverse of `model.reading_key`."""
    name, _, inside = key.removesuffix("}").partition("{")
    return name, dict(pair.split("=", 1) for pair in inside.split(",") if "=" in pair)


@functools.lru_cache(maxsize=4096)
def in_words(key: str) -> str:
    """Return a `Reading.key` as people read it: "ECC errors (uncorrected, dram)", "NVLink up (link 3)"."""
    name, labels = split_key(key)
    words = " ".join(ACRONYMS.get(word, word) for word in name.removesuffix("_total").split("_"))
    values = ", ".join(f"{label} {value}" if re.search("[0-9]", value) else value for label, value in labels.items())
    return f"{words} ({values})" if values else words


def metric(name: str) -> str:
    """Return the name under which a reading is exported."""
    return f"canaryd_{name}"
