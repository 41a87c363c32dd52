"""A stand-in for AMD's amdsmi 7.0: its names, fields and units, two invented devices, and ways to misbehave.

STAND_IN chooses the way: works, import (as without libamd_smi.so), init, unsupported, nonsense. STAND_IN_LOG names a
file that is told of the start and the end.
"""

import enum
import os
from pathlib import Path

WAY = os.environ.get("STAND_IN", "works")
print("amdsmi: chatter on standard output")
if WAY == "import":
    print("Unable to find libamd_smi.so library try installing amd-smi-lib from your package manager")
    raise KeyError("libamd_smi.so")

__version__ = "26.0.2"
NOT_SUPPORTED = "AMDSMI_STATUS_NOT_SUPPORTED"
HANDLES = ("first", "second")


class AmdSmiLibraryException(Exception):
    pass


class AmdSmiGpuBlock(enum.IntEnum):
    UMC = 1
    SDMA = 2
    GFX = 4


class AmdSmiRasErrState(enum.IntEnum):
    NONE = 0
    DISABLED = 1
    ENABLED = 6


class AmdSmiTemperatureType(enum.IntEnum):
    EDGE = 0
    HOTSPOT = 1
    VRAM = 2


class AmdSmiTemperatureMetric(enum.IntEnum):
    CURRENT = 0
    CRITICAL = 5


class AmdSmiClkType(enum.IntEnum):
    GFX = 1
    MEM = 4


def _log(text):
    if "STAND_IN_LOG" in os.environ:
        with Path(os.environ["STAND_IN_LOG"]).open("a") as log:
            log.write(text + "\n")


def _answer(value):
    print("amdsmi: more chatter")
    if WAY == "unsupported":
        raise AmdSmiLibraryException(NOT_SUPPORTED)
    if WAY == "nonsense":
        return _nonsense(value)
    return value


def _nonsense(value):
    if isinstance(value, dict):
        answers = ("N/A", 0xFFFFFFFFFFFFFFFF, None, -5, 0xFFFFFFFF, float("nan"), [], True)
        return {key: answers[place % len(answers)] for place, key in enumerate(value)}
    return {list: "N/A", int: 0xFFFFFFFFFFFFFFFF}.get(type(value))


def amdsmi_init():
    if WAY == "init":
        raise AmdSmiLibraryException("AMDSMI_STATUS_DRIVER_NOT_LOADED")
    _log("init")


def amdsmi_shut_down():
    _log("shut down")


def amdsmi_get_processor_handles():
    return list(HANDLES)


def amdsmi_get_gpu_device_bdf(handle):
    return {"first": "0000:05:00.0", "second": "0000:26:00.0"}[handle]


def amdsmi_get_gpu_board_info(handle):
    return _answer(
        {
            "model_number": "102-G00000-0B",
            "product_serial": "692300000001",
            "fru_id": "N/A",
            "product_name": "AMD Instinct MI300X OAM",
            "manufacturer_name": "AMD",
        }
    )


def amdsmi_get_gpu_asic_info(handle):
    return _answer({"market_name": "AMD Instinct MI300X", "asic_serial": "0x00C0FFEE00C0FFEE"})


def amdsmi_get_gpu_ecc_status(handle, block):
    return _answer(AmdSmiRasErrState.DISABLED if block is AmdSmiGpuBlock.SDMA else AmdSmiRasErrState.ENABLED)


def amdsmi_get_gpu_ecc_count(handle, block):
    corrected = 65535 if block is AmdSmiGpuBlock.UMC else 0  # also the greatest number of 16 bits, and meant
    return _answer({"correctable_count": corrected, "uncorrectable_count": 1, "deferred_count": 2})


def amdsmi_get_gpu_bad_page_info(handle):
    return _answer(
        [{"value": place, "page_address": 4096 * place, "page_size": 4096, "status": place % 2} for place in range(3)]
    )


def amdsmi_get_temp_metric(handle, sensor, metric):
    if sensor is AmdSmiTemperatureType.EDGE:
        raise AmdSmiLibraryException(NOT_SUPPORTED)  # no such sensor on this part
    degrees = 52 if metric is AmdSmiTemperatureMetric.CURRENT else 100
    return _answer(degrees if sensor is AmdSmiTemperatureType.HOTSPOT else degrees * 1000)


def amdsmi_get_violation_status(handle):
    return _answer(
        {
            "active_prochot_thrm": False,
            "active_ppt_pwr": True,
            "active_socket_thrm": False,
            "active_vr_thrm": "N/A",
            "active_hbm_thrm": False,
        }
    )


def amdsmi_get_power_info(handle):
    return _answer({"current_socket_power": 140, "average_socket_power": "N/A", "power_limit": 750000000})


def amdsmi_get_power_cap_info(handle):
    return _answer(
        {
            "power_cap": 750000000,
            "default_power_cap": 750000000,
            "dpm_cap": 2100,
            "min_power_cap": 0,
            "max_power_cap": 750000000,
        }
    )


def amdsmi_get_energy_count(handle):
    return _answer({"energy_accumulator": 1000000, "counter_resolution": 15.3, "timestamp": 1})


def amdsmi_get_clock_info(handle, kind):
    return _answer({"clk": 132 if kind is AmdSmiClkType.GFX else 900, "min_clk": 100, "max_clk": 2100})


def amdsmi_get_gpu_activity(handle):
    return _answer({"gfx_activity": 37, "umc_activity": 12, "mm_activity": "N/A"})


def amdsmi_get_gpu_vram_usage(handle):
    return _answer({"vram_total": 196592, "vram_used": 283})
