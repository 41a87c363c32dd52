"""Calls to NVML: one library handle, typed errors, handles of GPUs and MIG instances."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from canaryd.model import Device
from canaryd.worker.telemetry.interface import DeviceLost, NotHere, Unavailable
from canaryd.worker.telemetry.sysfs import Unreadable

Check = Callable[[Any], Any]
"""Function that takes a raw value and returns it in base units; it raises `Missing` for codes that mean "no value"."""


class Missing(Unreadable):
    """Raised if NVML did not give a value; `code` is NVML's error code."""


NOT_SUPPORTED, NOT_FOUND, FUNCTION_NOT_FOUND, GPU_IS_LOST, RESET_REQUIRED, UNKNOWN_ERROR = 3, 6, 13, 15, 16, 999
"""NVML error codes (nvmlReturn_t) after which another call is tried, or that show the state of the device."""
UNKNOWN_VERSION = (2, 25)
"""NVML error codes for a structure of a version that the driver does not know: invalid argument, version mismatch."""
LOST = (
    "GPU is lost: it no longer answers on its bus. Drain the node and reboot it; if it stays away, see to its seating"
)
OLD_PACKAGE = "this version of nvidia-ml-py does not know this call"
INVALID = "the driver gave no valid value"
REASONS = {
    NOT_SUPPORTED: "not supported by this device",
    4: "permission denied: run as root",
    10: "the driver did not answer in time",
    FUNCTION_NOT_FOUND: "the driver does not know this call",
    14: "the device's InfoROM is corrupted",
    RESET_REQUIRED: "the device must be reset before this can be read",
    UNKNOWN_ERROR: "the driver reports an unknown error (999)",
}
"""nvmlReturn_t of one call → reason why the reading is absent."""
NO_LIBRARY = "libnvidia-ml.so.1 is not here: no NVIDIA driver is installed"
NO_START = {
    4: "no permission to use the NVIDIA driver: run as root, or give this user access to /dev/nvidia*",
    9: "the NVIDIA driver is not loaded: load its kernel module (modprobe nvidia)",
    12: NO_LIBRARY,
    18: "the driver was upgraded but the old kernel module is still loaded: reboot or reload it",
}
"""nvmlReturn_t of nvmlInit → reason why NVML cannot be used."""
_nvml: ModuleType | None = None


def close() -> None:
    """Shut NVML down. A GPU without persistence mode is reset when no other process uses it."""
    global _nvml
    if _nvml is not None:
        nvml, _nvml = _nvml, None
        with contextlib.suppress(Exception):  # there is nothing left to let go of
            nvml.nvmlShutdown()


def library() -> ModuleType:
    """Return pynvml with NVML started; raise `Unavailable` if it cannot start."""
    global _nvml  # noqa: PLW0603 - the library's own state is global too
    if _nvml is None:
        try:
            nvml = importlib.import_module("pynvml")
        except Exception as error:
            text = f"nvidia-ml-py cannot be imported ({type(error).__name__}: {error}): install it beside canaryd"
            raise Unavailable(text) from error
        try:
            nvml.nvmlInit()
        except Exception as error:
            code = getattr(error, "value", 0)
            kind = NotHere if code in (9, 12) else Unavailable  # images carry the library to machines without a GPU
            raise kind(NO_START.get(code) or f"NVML does not start: {_said(error)}") from error
        _nvml = nvml
    return _nvml


def ask_nvml(nvml: ModuleType, name: str, *arguments: Any) -> Any:
    """Return the result of one NVML call; raise `Missing` with the reason, or `DeviceLost`."""
    call = getattr(nvml, name, None)
    if call is None:
        raise Missing(OLD_PACKAGE, FUNCTION_NOT_FOUND)
    try:
        return call(*arguments)
    except Exception as error:
        # pynvml answers a missing function in two ways: as an error code, and as NVMLLibraryMismatchError.
        code = getattr(error, "value", FUNCTION_NOT_FOUND if "Mismatch" in type(error).__name__ else 0)
        if code == GPU_IS_LOST and arguments:  # without one it is about the driver, and no device of ours
            raise DeviceLost(LOST) from error
        raise Missing(REASONS.get(code, f"NVML: {_said(error)}"), code) from error


def _said(error: Exception) -> str:
    code = getattr(error, "value", None)
    text = " ".join(str(error).split()) or type(error).__name__
    return text if code is None else f"{text} ({code})"


def device_count(nvml: ModuleType) -> int:
    """Return the number of GPUs that NVML counts; raise `Unavailable` if NVML does not give it."""
    try:
        return parse_count(ask_nvml(nvml, "nvmlDeviceGetCount"))
    except Missing as error:
        raise Unavailable(f"the driver does not count its GPUs: {error}") from error


def identify(nvml: ModuleType, index: int) -> tuple[Any, str]:
    """Return (handle, uuid) of the GPU with this NVML number; raise `DeviceLost` if the driver cannot give them.

    Raises `Unavailable` for other errors, such as a missing permission.
    """
    try:
        handle = ask_nvml(nvml, "nvmlDeviceGetHandleByIndex", index)
        uuid = str(ask_nvml(nvml, "nvmlDeviceGetUUID", handle)).strip()
    except Missing as error:
        raise (DeviceLost if error.code in (RESET_REQUIRED, UNKNOWN_ERROR) else Unavailable)(str(error)) from error
    if not uuid:
        raise DeviceLost("the driver gives no uuid of it")
    return handle, uuid


def device_handle(nvml: ModuleType, device: Device) -> Any:
    """Return the handle of a GPU or a MIG instance; raise `Unavailable` if it does not answer or is gone."""
    handle = _gpu_handle(nvml, device)
    if not device.parent:
        return handle
    for _, instance in instance_handles(nvml, handle):
        if ask_text(nvml, "nvmlDeviceGetUUID", instance) == device.uuid:
            return instance
    raise Unavailable(f"MIG instance {device.uuid} is no longer there: its GPU was partitioned again")


def _gpu_handle(nvml: ModuleType, device: Device) -> Any:
    """Return a GPU's handle, found by its last PCI address, or else by asking all GPUs for their uuid.

    NVML's own search by uuid fails if any GPU is lost (nvml.h). A lost GPU gives no uuid any more. `DeviceLost` is
    raised if the GPU with the number of this device is lost, or if all GPUs that do not answer are lost. Of a GPU that
    fails in another way it is raised only where a sibling answers: else driver or library may have failed.
    """
    uuid, bus_id = device.parent or device.uuid, device.detail.get("bus_id", "")
    there = ""
    if bus_id:
        try:
            handle = ask_nvml(nvml, "nvmlDeviceGetHandleByPciBusId", bus_id)
            if ask_nvml(nvml, "nvmlDeviceGetUUID", handle) == uuid:
                return handle
        except Missing as error:
            if error.code != NOT_FOUND:
                there = f"the GPU at {bus_id} does not answer: {error}"
    silent: dict[int, Unavailable] = {}
    count = device_count(nvml)
    for index in range(count):
        try:
            handle, found = identify(nvml, index)
        except Unavailable as error:
            silent[index] = error
        else:
            if found == uuid:
                return handle
    own, lost = silent.get(device.index), [error for error in silent.values() if str(error) == LOST]
    if own in lost or (lost and len(lost) == len(silent)):
        raise DeviceLost(LOST)
    if isinstance(own, DeviceLost) and len(silent) < count:
        raise own
    if silent and not there:
        why = "; ".join(dict.fromkeys(map(str, silent.values())))
        there = f"GPU {uuid} is not among those that answer; of others the driver says: {why}"
    raise Unavailable(there or f"GPU {uuid} is no longer there: the driver does not list it")


def instance_handles(nvml: ModuleType, handle: Any) -> Iterator[tuple[int, Any]]:
    """Yield (number, handle) of each MIG instance of a GPU; yield nothing if the GPU is not divided."""
    try:
        divided = ask_nvml(nvml, "nvmlDeviceGetMigMode", handle)[0] == 1
        places = ask_nvml(nvml, "nvmlDeviceGetMaxMigDeviceCount", handle) if divided else 0
    except Missing:
        return
    for number in range(places):
        try:
            yield number, ask_nvml(nvml, "nvmlDeviceGetMigDeviceHandleByIndex", handle, number)
        except Missing:
            continue  # an empty place


def ask_text(nvml: ModuleType, name: str, *arguments: Any) -> str:
    """Return a text from NVML, or "" if it gives none."""
    try:
        given = ask_nvml(nvml, name, *arguments)
    except Missing:
        return ""
    text = (given.decode(errors="replace") if isinstance(given, bytes) else str(given)).strip()
    return "" if text.upper() in ("N/A", "[N/A]", "UNKNOWN", "0") else text


def parse_count(raw: Any) -> int:
    """Return a number that cannot be negative; raise `Missing` for the values with which NVML and DCGM say "none"."""
    value = int(raw)
    if value < 0 or value == 0xFFFFFFFF or 0x7FFFFFF0 <= value <= 0x7FFFFFFF or value >= 0x7FFFFFFFFFFFFFF0:
        raise Missing(INVALID)
    return value
