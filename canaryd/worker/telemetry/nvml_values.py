"""Numbers and words of nvml.h (CUDA 13.3), and the checks that convert NVML's values to base units.

A check raises `Missing` for the driver's codes of a missing value. Field numbers are written out, because a package and
a driver of different versions must still understand each other.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from canaryd.model import EXCLUSIVE, PROHIBITED
from canaryd.worker.telemetry.nvml import INVALID, Missing, parse_count

ARCHITECTURES = (
    *("", "", "kepler", "maxwell", "pascal", "volta", "turing", "ampere", "ada", "hopper", "blackwell", "", ""),
    "rubin",
)
"""Words of nvmlDeviceArchitecture_t, by number."""
KINDS = ("corrected", "uncorrected")
"""Words of nvmlMemoryErrorType_t, by number."""
CACHES = {"l1": 0, "l2": 1, "register_file": 3, "texture": 4, "texture_shm": 5, "cbu": 6}
"""Cache → value of nvmlMemoryLocation_t. Only devices before Turing count these separately; later ones report the sum
as `SRAM`."""
DRAM, SRAM = 2, 7
SRAM_STATUS = (
    ("ecc_sram_threshold_exceeded", "bThresholdExceeded", {}),
    ("ecc_sram_uncorrected_total", "volatileUncParity", {"detection": "parity"}),
    ("ecc_sram_uncorrected_total", "volatileUncSecDed", {"detection": "sec_ded"}),
    ("ecc_sram_aggregate_uncorrected_total", "aggregateUncParity", {"detection": "parity"}),
    ("ecc_sram_aggregate_uncorrected_total", "aggregateUncSecDed", {"detection": "sec_ded"}),
    *(("ecc_sram_units_total", f"aggregateUncBucket{u}", {"unit": u.lower()}) for u in ("L2", "Sm", "Pcie", "Mcu")),
    ("ecc_sram_units_total", "aggregateUncBucketOther", {"unit": "other"}),
)
"""Name of a reading, member of nvmlEccSramErrorStatus_v1_t, and labels."""
BANKS = ("max", "high", "partial", "low", "none")
THRESHOLDS = ("shutdown", "slowdown", "memory_max", "gpu_max", "acoustic_min", "acoustic_current", "acoustic_max")
"""Words of nvmlTemperatureThresholds_t, by number."""
MARGINS = {"shutdown": 193, "slowdown": 194, "memory_max": 195, "gpu_max": 196}
"""Threshold → number of its field NVML_FI_DEV_TEMPERATURE_*_TLIMIT: from Ada on, thresholds are given as margins."""
THROTTLES = (
    *("gpu_idle", "applications_clocks", "sw_power_cap", "hw_slowdown", "sync_boost", "sw_thermal", "hw_thermal"),
    *("hw_power_brake", "display_clocks", "board_limit", "reliability"),
)
"""Words of nvmlClocksEventReason*, from bit 0 up."""
THROTTLED = {"sw_power_cap": 74, "sw_thermal": 75, "sync_boost": 76, "board_limit": 77, "reliability": 79}
"""Reason → number of its field NVML_FI_DEV_PERF_POLICY_*, the nanoseconds in which this reason reduced the clocks."""
HARDWARE_THROTTLED = ("hw_thermal", "hw_power_brake")
CLOCKS = ("graphics", "sm", "memory", "video")
"""Words of nvmlClockType_t, by number."""
LINK_ERRORS = ("replay", "recovery", "crc_flit", "crc_data", "ecc_data")
"""Words of nvmlNvLinkErrorCounter_t, by number; up to Hopper."""
LINK_STATE = 165
"""Number of the field NVML_FI_DEV_NVLINK_GET_STATE. The scope of the field is the number of the link."""
LINK_COUNTS = {"replay": (46, 108, 161), "recovery": (53, 114, 162), "crc_flit": (32, 96, 163)}
LINK_COUNTS |= {"crc_data": (39, 102, 0), "ecc_data": (148, 154, 0)}
"""NVML_FI_DEV_NVLINK_*_ERROR_COUNT_L0, *_L6, and NVML_FI_DEV_NVLINK_ERROR_DL_* with the link as scope; 0 for none."""
LINK_FIELDS = {"malformed": 206, "overrun": 207, "receive": 208, "integrity": 211, "discard": 212}
LINK_FIELDS |= {"recovery_failed": 214, "recovery": 215, "effective": 219}
"""NVML_FI_DEV_NVLINK_COUNT_*, from Blackwell on; symbol errors are left out: coding repairs them all the time."""
FABRIC_CALLS = (
    *(("nvmlDeviceGetGpuFabricInfoV", f"c_nvmlGpuFabricInfo_v{version}_t") for version in (3, 2)),
    ("nvmlDeviceGetGpuFabricInfo", "c_nvmlGpuFabricInfo_t"),
)
"""Calls about a GPU's fabric, each with its structure in pynvml, the newest first."""
JOINED = 3
"""NVML_GPU_FABRIC_STATE_COMPLETED, the last of nvmlGpuFabricState_t: not supported, not started, in progress."""
FABRIC_FAULTS = {
    "degraded_bandwidth": ("DEGRADED_BW", "FALSE"),
    "route_recovery": ("ROUTE_RECOVERY", "FALSE"),
    "route_unhealthy": ("ROUTE_UNHEALTHY", "FALSE"),
    "access_timeout_recovery": ("ACCESS_TIMEOUT_RECOVERY", "FALSE"),
    "incorrect_configuration": ("INCORRECT_CONFIGURATION", "NONE"),
}
"""Fault → its field in the fabric's health mask, and the field's value where there is no fault, as pynvml calls them
(NVML_GPU_FABRIC_HEALTH_MASK_*)."""
FABRIC_SUMMARIES = {"unhealthy": 2, "limited_capacity": 3}
"""Fault → value of NVML_GPU_FABRIC_HEALTH_SUMMARY_*."""
COMPUTE_MODES = ("default", f"{EXCLUSIVE}_thread", PROHIBITED, f"{EXCLUSIVE}_process")
RECOVERIES = (
    *("none", "reset", "reboot", "drain_p2p", "drain_and_reset", "recover_imex_domain", "bus_reset", "system_reboot"),
)
"""Words of nvmlDeviceGpuRecoveryAction_t, by number."""
SWITCHED, PROTECTIONS = ("off", "on"), ("none", "protected_pcie", "nvle")
"""Words of NVML_CC_SYSTEM_FEATURE_* and of NVML_CC_SYSTEM_MULTIGPU_*, by number."""
LEAST_MARGIN, HOTTEST = -100, 300
"""Degrees at or beyond which a value means "missing". NVML gave -256, 4294967040, and 0 for memory."""


def link_field(kind: str, link: int) -> tuple[int, int] | None:
    """Return (field number, scope) for a link's state ("up") or one of `LINK_ERRORS`; None if there is no field."""
    if kind == "up":
        return LINK_STATE, link
    first, later, scoped = LINK_COUNTS[kind]
    if link < 12:
        return (first + link, 0) if link < 6 else (later + link - 6, 0)
    return (scoped, link) if scoped else None


def pci_address(pci: Any) -> str:
    """Return the address in an nvmlPciInfo_t in the form "0000:65:00.0"."""
    return f"{pci.domain:04x}:{pci.bus:02x}:{pci.device:02x}.0"


def capability(pair: tuple[int, int]) -> str:
    """Return a compute capability such as (9, 0) as the text "9.0"."""
    return f"{pair[0]}.{pair[1]}"


def hexadecimal(raw: Any) -> str:
    """Return a number in the form "0x6500"."""
    return f"{parse_count(raw):#x}"


def cuda_version(version: int) -> str:
    """Return a CUDA version such as 12040 as "12.4" (CUDA_VERSION: 1000 major + 10 minor)."""
    return f"{version // 1000}.{version % 1000 // 10}"


def per(divisor: int, raw: Any) -> float:
    """Return `raw`, a number of small units, divided by `divisor`, the number of small units in a larger one."""
    return parse_count(raw) / divisor


thousandths, seconds = partial(per, 1000), partial(per, 10**9)
fan_ratio = partial(per, 100)
"""Converts per cent of the fan's nominal top speed to a ratio, which can exceed 1."""


def hertz(raw: Any) -> int:
    """Convert megahertz to hertz."""
    return parse_count(raw) * 1_000_000


def share(raw: Any) -> float:
    """Convert per cent of time to a ratio."""
    if not 0 <= int(raw) <= 100:
        raise Missing(INVALID)
    return int(raw) / 100


def degrees(raw: Any) -> int:
    """Return a temperature in degrees Celsius; raise `Missing` for a code that means "missing"."""
    value = int(raw)
    if not 0 < value < HOTTEST:
        raise Missing(INVALID)
    return value


def margin(raw: Any) -> int:
    """Return the degrees below a limit, negative above the limit; the driver can give an unsigned number."""
    value = int(raw)
    value -= 1 << 32 if value > 0x7FFFFFFF else 0
    if not LEAST_MARGIN < value < HOTTEST:
        raise Missing(INVALID)
    return value


def flag(raw: Any) -> int:
    """Return 0 or 1; raise `Missing` for anything else."""
    if int(raw) not in (0, 1):
        raise Missing(f"the driver gave {int(raw)}, wanted 0 or 1")
    return int(raw)


def is_up(raw: Any) -> int:
    """Return 1 for an enabled feature, else 0 (NVML_FEATURE_DISABLED is 0)."""
    return int(raw != 0)


def performance_state(raw: Any) -> int:
    """Return the P-state, 0 to 15; raise `Missing` if the driver does not know it."""
    if not 0 <= int(raw) <= 15:  # NVML_PSTATE_UNKNOWN is 32
        raise Missing("the driver does not know the state")
    return int(raw)


def word(words: tuple[str, ...], raw: Any) -> str:
    """Return the name of an enumeration's value, or "unknown(N)" for an unlisted number."""
    value = parse_count(raw)
    return (words[value] if value < len(words) else "") or f"unknown({value})"


def hardware_throttle_fields(driver: str) -> dict[str, int]:
    """Return reason → field number for the time in which hardware reduced the clocks; {} if the numbers are uncertain.

    The numbers depend on the driver version: nvidia-ml-py 12.575.51 and 13.580.65 have 252 and 253, 13.580.82 and later
    have 270 and 271, older ones have neither. With the wrong numbers a driver gives other data, so drivers in between
    are not asked.
    """
    major, _, rest = driver.partition(".")
    minor = rest.partition(".")[0]
    version = (int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else (0, 0)
    if version >= (580, 82):
        return dict(zip(HARDWARE_THROTTLED, (270, 271), strict=True))
    return dict(zip(HARDWARE_THROTTLED, (252, 253), strict=True)) if (575, 51) <= version <= (580, 65) else {}
