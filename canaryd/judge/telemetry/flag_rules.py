"""Rules for readings that a device or its driver sets: flags, lifetime counts with a limit, advice, settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

from canaryd.judge.findings import finding
from canaryd.judge.laws import together_with
from canaryd.judge.telemetry.signals import DRAIN_AND_RESET, HELD, RECOVERY, RETURN, Signs
from canaryd.model import Cause, Finding, Part, Remedy, State

MOST_RETIRED, MANY_DOUBLE_BIT = 63, 15
"""Retired pages: DCGM's limit, and its softer limit for those with double-bit errors (DcgmGPUHardwareLimits.h)."""
MOST_REMAPPED = 512
"""Rows remapped for uncorrectable errors: NVIDIA's RMA policy, and DCGM's limit."""
ADVICE = {"recovery_action": "driver-advice", "device_health": "driver-advice"}
"""Reading of what the driver itself advises → the rule that tells it."""
HEALTH = {"warning": State.DEGRADED, "alarm": State.DEGRADED, "critical": State.SUSPECT}
"""Health that Ascend's driver reports → state; any other word shows nothing."""
FAILED, WORN = ("memory-failed", State.FAULTY, Cause.HARDWARE), ("memory-worn", State.DEGRADED, Cause.HARDWARE)
NOTE = ("noted", State.HEALTHY, Cause.ENVIRONMENT)


class Flag(NamedTuple):
    """A reading that says something of the device by itself."""

    rule: str
    state: State
    cause: Cause
    reading: str
    message: str
    """`{:g}` stands for the reading's value."""
    action: str
    source: str
    """Whose advice it is, or why it matters."""
    labels: Mapping[str, str] = MappingProxyType({})
    least: float = 1
    """The sum at which it counts; 0: it counts where one of the readings is 0."""
    remedy: Remedy | None = None
    age: float = 0.0
    """Age in seconds up to which a poll still shows it; 0 stands for `telemetry.settle`."""
    parts: tuple[Part, ...] = ()
    """The shared parts that it is about where other devices report it too; () where it is each device's own."""

    def shown(self, signs: Signs) -> float | None:
        """Return the sum of the readings where it counts, else None."""
        age = self.age or (0.0 if self.state is State.HEALTHY else signs.policy.settle)
        found = [float(r.value) for r in signs.readings(self.reading, age) if self.labels.items() <= r.labels.items()]
        return sum(found) if (sum(found) >= self.least if self.least else 0 in found) else None


RMA_POLICY = "Recommended: RMA (NVIDIA's RMA policy: the field diagnostic decides on the return)."
CHECK_FABRIC = "Check Fabric Manager, and the links of the device (nvidia-smi nvlink -s)."
RECOVERING = "Wait until the driver no longer reports it."
FABRIC = {
    "degraded_bandwidth": ("The bandwidth of the NVLink fabric is degraded.", CHECK_FABRIC),
    "route_recovery": ("The NVLink fabric is recovering a route.", RECOVERING),
    "route_unhealthy": ("A route of the NVLink fabric is unhealthy.", CHECK_FABRIC),
    "access_timeout_recovery": ("The NVLink fabric is recovering from an access that took too long.", RECOVERING),
    "incorrect_configuration": ("The NVLink fabric is configured wrongly.", "See the section Fabric of nvidia-smi -q."),
    "unhealthy": ("The NVLink fabric is unhealthy.", CHECK_FABRIC),
    "limited_capacity": ("The NVLink fabric has limited capacity.", CHECK_FABRIC),
}
"""Fault of the fabric → message and action."""
# Some flags never fall on the same part: those hold for `HELD`, so that a driver that hangs later does not lift the
# finding.
FLAGS = (
    Flag(
        *(*FAILED, "row_remap_failed"),
        "A memory row could not be replaced by a spare one.",
        *(RETURN, RMA_POLICY),
        age=HELD,
    ),
    Flag(
        *(*FAILED, "ecc_sram_threshold_exceeded"),
        "The device counts more uncorrectable SRAM errors than its threshold allows.",
        *(RETURN, RMA_POLICY),
        age=HELD,
    ),
    Flag(
        *(*FAILED, "row_remap_rows"),
        f"{{:g}} memory rows were replaced after uncorrectable errors (limit {MOST_REMAPPED}).",
        RETURN,
        "Recommended: RMA (NVIDIA's RMA policy and DCGM's limit: the field diagnostic decides on the return).",
        labels={"cause": "uncorrectable"},
        least=MOST_REMAPPED,
        age=HELD,
    ),
    Flag(
        *(*FAILED, "retired_pages"),
        f"{{:g}} memory pages are retired (limit {MOST_RETIRED}).",
        *(RETURN, "Recommended: RMA (DCGM's limit)."),
        least=MOST_RETIRED,
        age=HELD,
    ),
    Flag(
        *(*WORN, "retired_pages"),
        f"{{:g}} memory pages are retired after double-bit errors (limit {MANY_DOUBLE_BIT}).",
        *("Return the device if more than one page a week follows.", "Limit: DCGM's softer one."),
        labels={"cause": "double_bit"},
        least=MANY_DOUBLE_BIT,
        age=HELD,
    ),
    Flag(
        *(*WORN, "row_remap_banks"),
        "Memory banks without a spare row: {:g}.",
        *("Plan to return the device.", "A bad row there cannot be replaced (canaryd's own rule)."),
        labels={"available": "none"},
        age=HELD,
    ),
    Flag(
        *(*WORN, "row_remap_pending"),
        "A bad memory row will be replaced at the next reset.",
        *(DRAIN_AND_RESET, "Recommended: reset (NVIDIA's memory error management)."),
        remedy=Remedy.RESET,
    ),
    Flag(
        *(*WORN, "retired_pages_pending"),
        "A bad memory page will be retired at the next reset.",
        *(DRAIN_AND_RESET, "Recommended: reset (NVIDIA's page retirement)."),
        remedy=Remedy.RESET,
    ),
    Flag(
        *(*WORN, "memory_bad_pages"),
        "Bad memory pages wait to be taken out of use.",
        *("Drain the device and reload its driver.", "Recommended: reset (AMD)."),
        labels={"status": "pending"},
        remedy=Remedy.DRIVER,
    ),
    Flag(
        *(*NOTE, "persistence_mode"),
        "Persistence mode is off, so canaryd keeps a handle of the device open.",
        "Run nvidia-persistenced, or nvidia-smi -pm 1.",
        "Without the handle each poll would re-initialise the device and clear its error counters."
        " To upgrade the driver, run canaryd release: it closes the handle.",
        least=0,
    ),
    Flag(
        *(*NOTE, "ecc_enabled"),
        "Error correction (ECC) is off, or will be after a reset.",
        *("Turn it on: nvidia-smi -e 1, then reset the device.", "Without it a flipped bit in memory goes unnoticed."),
        least=0,
    ),
    Flag(
        *("noted", State.HEALTHY, Cause.UNDETERMINED, "crash_records"),
        "Kernel crash records in /sys/fs/pstore: {:g}.",
        *("Read them, then delete them.", "They may say why the machine restarted."),
    ),
    *(
        Flag(
            *("fabric-fault", State.DEGRADED, Cause.UNDETERMINED, "fabric_fault"),
            *(*said, "Source: NVIDIA's driver."),
            labels={"fault": fault},
            parts=(Part.FABRIC,),
        )
        for fault, said in FABRIC.items()
    ),
)


def may_be_shared(signs: Signs) -> bool:
    """Return whether a device reports what several devices may report together."""
    return any(flag.parts and flag.shown(signs) is not None for flag in FLAGS)


def flags(signs: Signs) -> Iterator[Finding]:
    """The device or its driver says something of itself: it needs a reset or a return, or a setting is odd."""
    for flag in FLAGS:
        if (total := flag.shown(signs)) is not None:
            clears = "Clears when the device no longer reports it."
            others = [n for n, of in signs.reporting.items() if flag.parts and flag.shown(of) is not None]
            yield finding(
                *(*flag[:3], flag.message.format(total), flag.action, flag.source, clears),
                company=together_with(others),
                parts=flag.parts if others else (),
                remedy=flag.remedy,
            )


def driver_advice(signs: Signs) -> Iterator[Finding]:
    """The driver itself advises an action to recover, or says that the device is not well."""
    advice, health = (signs.word(name, signs.policy.settle) for name in ADVICE)
    if advice not in ("", "none"):
        grade, action = RECOVERY.get(advice, ("reset", "Drain the device and follow the driver's advice."))
        yield finding(
            *("driver-advice", State.SUSPECT if advice in RECOVERY else State.DEGRADED, Cause.UNDETERMINED),
            f"The NVIDIA driver asks for recovery: {advice.replace('_', ' ')}.",
            action,
            f"Recommended: {grade} (NVIDIA's driver).",
            "Clears when the driver no longer asks for it.",
            remedy=Remedy(grade),
        )
    if state := HEALTH.get(health.lower()):
        codes = sorted(c for r in signs.readings("device_fault", signs.policy.settle) for c in r.labels.values())
        faults = f" (fault {', '.join(codes)})" if codes else ""
        yield finding(
            *("driver-advice", state, Cause.UNDETERMINED),
            f"The driver reports the device's health as {health}{faults}.",
            "Look up the fault with the vendor." if codes else "See the reason: npu-smi info -t health",
            "Source: the vendor's own check.",
            "Clears when the driver reports ok.",
        )
