"""A stand-in for AMD's amdsmi 7.0: its names, fields and units, two invented devices, and ways to misbehave.

STAND_IN chooses the way: works, import (as without libamd_smi.so), init, unsupported, nonsense. STAND_IN_LOG names a
file that is told of the start and the end.
"""

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


def amdsmi_get_energy_count(handle):
    return _answer({"energy_accumulator": 1000000, "counter_resolution": 15.3, "timestamp": 1})
