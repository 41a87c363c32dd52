"""Let a worker see only one device: set the variables of the vendors' runtimes before any of these is loaded.

The worker does this itself, because with `worker.command` only the worker knows the operator's environment. A process
that sees one device cannot open a context on another, and its device is number 0.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping

from canaryd.codec import from_json, to_json
from canaryd.model import TORCH, Device

ONLY = "CANARYD_ONLY"
"""Environment variable with the device that this worker tests, as JSON."""
NOTHING = "-1"
"""A number that no device has; CUDA and HIP then show no device (CUDA C++ Programming Guide, CUDA_VISIBLE_DEVICES)."""
CUDA, HIP, ROCR = "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"
LEVEL_ZERO, SYCL, ASCEND = "ZE_AFFINITY_MASK", "ONEAPI_DEVICE_SELECTOR", "ASCEND_RT_VISIBLE_DEVICES"
_narrowed = False
_before: dict[str, str | None] = {}
"""Variable → its value before this process narrowed its environment, or None if it was not set."""


def narrow() -> None:
    """Restrict this process by environment variables to the device in `ONLY`; do nothing if `ONLY` is not set."""
    global _narrowed  # noqa: PLW0603 - the environment is the process's own, too
    if text := os.environ.pop(ONLY, ""):
        found = narrowed(from_json(Device, json.loads(text)), os.environ)
        _before.update((name, os.environ.get(name)) for name in found)
        os.environ.update(found)
        _narrowed = bool(found)


def environment_of(device: Device) -> dict[str, str]:
    """Return the environment for a child process that sees only `device`, even if this process sees another set."""
    allowed = {**os.environ, **{name: value for name, value in _before.items() if value is not None}}
    own = {name for name, value in _before.items() if value is None}
    return {ONLY: json.dumps(to_json(device)), **{k: v for k, v in allowed.items() if k not in own}}


def is_narrowed() -> bool:
    """Return whether this process sees at most one device, which is then number 0."""
    return _narrowed


def narrowed(device: Device, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables (name → value) with which a process sees only `device`, or {} if they are not known.

    A restriction in `environment` comes from the operator and stays: a device that it excludes is not shown. Sources:
    CUDA C++ Programming Guide, "CUDA Environment Variables"; NVIDIA MIG User Guide, "CUDA Device Enumeration"; ROCm
    documentation, "GPU isolation techniques" (HIP counts the devices that ROCR leaves); Level Zero specification,
    ZE_AFFINITY_MASK; oneAPI DPC++, ONEAPI_DEVICE_SELECTOR; CANN, ASCEND_RT_VISIBLE_DEVICES.
    """
    _, index = device.torch_place
    if device.runtime != TORCH:
        # Its uuid is canaryd's own: the device keeps the number that the runtime gave it.
        return {CUDA: NOTHING, HIP: NOTHING} if device.unit == "cpu" else {}
    if device.backend == "cpu":
        return {CUDA: NOTHING, HIP: NOTHING}
    if device.backend == "cuda":
        return {CUDA: _of_cuda(device, index, environment.get(CUDA))}
    if device.backend == "rocm":
        # HIP reads CUDA's variable where its own is not set (ROCm/clr, rocdevice.cpp).
        return _layers(index, {HIP: environment.get(HIP) or environment.get(CUDA), ROCR: environment.get(ROCR)})
    if device.backend == "xpu":
        selected = re.fullmatch(r"level_zero:(\d+(?:,\d+)*)", environment.get(SYCL, "level_zero:0"))
        if selected is None:
            return {}  # a choice by other words: which numbers it leaves is not known
        chosen = selected[1] if SYCL in environment else None
        found = _layers(index, {SYCL: chosen, LEVEL_ZERO: environment.get(LEVEL_ZERO)})
        return {n: f"level_zero:{v}" if n == SYCL else v for n, v in found.items()}
    if device.backend == "npu":
        return _layers(index, {ASCEND: environment.get(ASCEND)})
    return {}


def _of_cuda(device: Device, index: int, allowed: str | None) -> str:
    """Return CUDA's name for a device: the uuid, or the entry at `index` in the operator's list if it has no uuid."""
    if device.parent:
        return device.uuid if allowed is None or any(_names(word, device) for word in _words(allowed)) else NOTHING
    if not device.weak_identity:
        return device.uuid
    return _nth(index, allowed)


def _names(word: str, device: Device) -> bool:
    """Return whether `word`, an entry of CUDA's variable, means this MIG instance or its GPU; uuids can be short."""
    if word.isdigit():
        return int(word) == device.index
    places = "/".join(device.detail.get(name, "") for name in ("gpu_instance_id", "compute_instance_id"))
    known = (device.uuid, device.parent, f"MIG-{device.parent}/{places}")  # the last as drivers before 470 name it
    return len(word) > len("GPU-") and any(name.lower().startswith(word.lower()) for name in known)


def _layers(index: int, layers: Mapping[str, str | None]) -> dict[str, str]:
    """Return variable → number or uuid, such that the process sees only the device that now has the number `index`.

    `layers`: variable → its present value, from the top layer down.
    """
    found: dict[str, str] = {}
    *upper, lowest = layers
    for name in upper:
        allowed = layers[name]
        if allowed is None:
            continue
        word = _nth(index, allowed)
        if not word.isdigit():
            return {**found, name: word}
        found[name], index = "0", int(word)
    return {**found, lowest: _nth(index, layers[lowest])}


def _nth(index: int, allowed: str | None) -> str:
    """Return the entry of device `index` in `allowed`, a list of visible devices; `NOTHING` if the list is shorter."""
    if allowed is None:
        return str(index)
    words = _words(allowed)
    return words[index] if index < len(words) else NOTHING


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]
