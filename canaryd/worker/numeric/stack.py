"""The accelerators that this Python interpreter can use, and the versions of the software that results depend on."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.metadata
import os
import platform
import re
import socket
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from canaryd.facts import beginning
from canaryd.model import NO_CUDA, NO_CUDA_CODE, SHARED, Device
from canaryd.worker.numeric.tensors import overrides, torch, visible_cores, why_no_torch


def discover() -> tuple[list[Device], dict[str, str], str | None, str | None]:
    """Return (devices, facts about the software, torch's version or None, reason why torch is missing or None)."""
    host = cpu()
    if torch is None:
        return [host], {}, None, why_no_torch
    cuda = _cuda()
    facts = stack(host, "") | ({} if cuda else _why_no_cuda())
    return [host, *cuda, *_mps(host), *_xpu()], facts, str(torch.__version__), None


def cpu() -> Device:
    """Return the host's processors together as one device.

    Its uuid is derived from /etc/machine-id and the model name, which are the same for every user of the machine. It
    identifies the installation and not the silicon, so the identity is weak. The processor's own number (PPIN), where
    the kernel shows it, is recorded too.
    """
    info = _read("/proc/cpuinfo")
    model = _field(info, "model name") or _field(info, "Model") or platform.processor() or platform.machine()
    machine = _read("/etc/machine-id").strip() or socket.gethostname()
    digest = hashlib.sha256(f"canaryd cpu {machine} {model}".encode()).hexdigest()
    ppin = _read("/sys/devices/system/cpu/cpu0/topology/ppin").strip()
    detail = {
        "architecture": platform.machine(),
        "sockets": str(len(set(re.findall(r"^physical id\s*:\s*(\d+)", info, re.MULTILINE))) or 1),
        "cores": _ranges(visible_cores()),
        "microcode": _field(info, "microcode") or "not given",
        "virtual": "yes" if "hypervisor" in _flags(info) else "no",
    }
    if ppin and int(ppin, 0):
        detail["serial"] = ppin
    return Device(
        uuid="CPU-" + "-".join((digest[:8], digest[8:12], digest[12:16], digest[16:20], digest[20:32])),
        backend="cpu",
        index=0,
        model=" ".join(model.split()),
        torch_index=None if torch is None else 0,
        weak_identity=True,
        instruction_sets=_instruction_sets(info),
        detail=detail,
    )


def _instruction_sets(info: str) -> tuple[str, ...]:
    """Return the instruction sets to test: "native" (torch's choice), "avx2" if there is AVX-512, and "baseline"."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return ("native", "baseline")
    return ("native", "avx2", "baseline") if "avx512f" in _flags(info) else ("native", "baseline")


def _flags(info: str) -> set[str]:
    return set((_field(info, "flags") or "").split())


def _cuda() -> list[Device]:
    if not torch.cuda.is_available():
        return []
    backend = "rocm" if torch.version.hip else "cuda"
    found = []
    every = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    counts = Counter(str(getattr(props, "uuid", "")) for props in every)
    made: Counter[str] = Counter()
    for index, props in enumerate(every):
        # Older torches do not give the place: zeros in its stead would be the place of another device.
        place = hasattr(props, "pci_bus_id")
        bus = f"{props.pci_domain_id:04x}:{props.pci_bus_id:02x}:00.0" if place else ""
        uuid = str(getattr(props, "uuid", ""))
        shared = counts[uuid] > 1  # partitions of one card may share its uuid, and its place: none may be lost
        name = f"GPU-{uuid.removeprefix('GPU-')}"
        if shared or not uuid:
            name = f"GPU-at-{socket.gethostname()}-{bus or index}"
            made[name] += 1
            name += f"-{made[name]}" if made[name] > 1 else ""
        detail = {
            **({"bus_id": bus} if bus else {}),
            **({SHARED: uuid} if shared and uuid else {}),
            "memory_bytes": str(props.total_memory),
            "capability": f"{props.major}.{props.minor}",
            "multiprocessors": str(props.multi_processor_count),
        }
        weak = shared or not uuid
        of_torch: dict[str, Any] = {"backend": backend, "index": index, "torch_index": index, "model": props.name}
        found.append(Device(uuid=name, weak_identity=weak, detail=detail, **of_torch))
    return found


def _why_no_cuda() -> dict[str, str]:
    """Return torch's own reason why it finds no NVIDIA or AMD GPU, with its code; {} if it finds one."""
    try:
        torch.cuda.init()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the reason
        found = re.search(r"Error ([0-9]+):", str(error))  # as CUDA numbers it
        return {NO_CUDA: beginning(str(error), 300), NO_CUDA_CODE: found[1] if found else ""}
    return {}


def _mps(host: Device) -> list[Device]:
    if not torch.backends.mps.is_available():
        return []
    uuid = host.uuid.replace("CPU-", "MPS-")
    return [Device(uuid=uuid, backend="mps", index=0, torch_index=0, model=host.model, weak_identity=True)]


def _xpu() -> list[Device]:
    xpu = getattr(torch, "xpu", None)
    if xpu is None or not xpu.is_available():
        return []
    found = []
    for index in range(xpu.device_count()):
        props = xpu.get_device_properties(index)
        uuid = str(getattr(props, "uuid", ""))
        found.append(
            Device(
                uuid=f"XPU-{uuid}" if uuid else f"XPU-at-{socket.gethostname()}-{index}",
                backend="xpu",
                index=index,
                torch_index=index,
                model=props.name,
                weak_identity=not uuid,
                detail={"memory_bytes": str(props.total_memory)},
            )
        )
    return found


CHOOSERS = (
    *("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "HSA_CU_MASK", "ROC_GLOBAL_CU_MASK"),
    *("TORCH_BLAS_PREFER_CUBLASLT", "TORCH_BLAS_PREFER_HIPBLASLT", "DISABLE_ADDMM_CUDA_LT", "DISABLE_ADDMM_HIP_LT"),
    *("CUBLASLT_WORKSPACE_SIZE", "HIPBLASLT_WORKSPACE_SIZE", "TORCH_CUBLASLT_UNIFIED_WORKSPACE"),
    *("ROCBLAS_TENSILE_LIBPATH", "HIPBLASLT_TENSILE_LIBPATH", "ROCBLAS_DEFAULT_ATOMICS_MODE"),
    "TORCH_CUDNN_SDPA_AVOID_RECOMPILE",
    *("TORCH_DISABLE_NATIVE_JIT", "TORCH_NATIVE_SKIP_VERSION_CHECK", "TORCH_PYTHON_NATIVE_USER_GRAPH_ORDER_FN"),
)
"""Environment variables that make a library choose another kernel for the same product; the last bits can differ."""

KERNEL_PACKAGES = ("apache-tvm-ffi", "nvidia-cutlass-dsl", "nvmath-python", "triton")
"""Packages that torch uses to replace some of its CUDA kernels, if they are installed in a version that torch knows.

Source: pytorch 2.13, torch/_native/cutedsl_utils.py, triton_utils.py and ops: RMS norm, topk, scatter_add, products.
"""


def _common(device: Device) -> dict[str, str]:
    facts = {"python": platform.python_version(), "kernel": platform.release(), "machine": platform.machine()}
    confidential = device.detail.get("confidential_computing", "off")  # it encrypts copies, which makes them slower
    return facts if confidential == "off" else facts | {"confidential_computing": confidential}


def surroundings(device: Device) -> dict[str, str]:
    """Return what affects results or speed of every runtime: interpreter, kernel, microcode, confidential computing."""
    return _common(device) | ({"microcode": cpu().detail["microcode"]} if device.unit == "cpu" else {})


def stack(device: Device, instruction_set: str) -> dict[str, str]:
    """Return the versions of the software that a result on `device` can depend on; equal stacks give equal mappings."""
    facts = _common(device)
    if torch is None:
        return facts
    facts["torch"] = str(torch.__version__)
    facts["torch_git"] = str(getattr(torch.version, "git_version", "") or "not given")[:12]
    config = torch.__config__.show()
    for name, pattern in (
        ("blas", r"BLAS_INFO=(\w+)"),
        ("mkl", r"Math Kernel Library Version ([\w.-]+)"),
        ("onednn", r"MKL-DNN v([\d.]+)"),
    ):
        match = re.search(pattern, config)
        facts[name] = match.group(1) if match else "none"
    if forced := overrides():
        facts["overrides"] = _listed(forced)
    if chosen := {name: os.environ[name] for name in CHOOSERS if os.environ.get(name)}:
        facts["kernel_choice"] = _listed(chosen)
    if device.backend == "cpu":
        facts["instruction_set"] = instruction_set or "native"
        facts["cpu_capability"] = torch.backends.cpu.get_cpu_capability()
        facts["int8_pairs"] = "may saturate" if int8_pairs_saturate() else "exact"
        facts["visible_cores"] = str(len(visible_cores()))
        facts["threads"] = str(torch.get_num_threads())
        facts["microcode"] = device.detail.get("microcode", "not given")
    if device.backend in ("cuda", "rocm"):
        facts["cuda"] = str(torch.version.cuda or torch.version.hip)
        facts["cudnn"] = str(cudnn_version())
        facts["cublas"] = library_version(_read("/proc/self/maps"), "libcublas.so", "cublasGetProperty")
        if device.backend == "rocm":
            facts["rocm"] = _read("/opt/rocm/.info/version").strip() or "not given"
        match = re.search(r"Kernel Module\s+(?:for \w+\s+)?([\d.]+)", _read("/proc/driver/nvidia/version"))
        facts["driver"] = match.group(1) if match else _read("/sys/module/amdgpu/version").strip() or "not given"
        facts["capability"] = device.detail.get("capability", "not given")
        facts["multiprocessors"] = device.detail.get("multiprocessors", "not given")
        facts["cublas_workspace"] = os.environ.get("CUBLAS_WORKSPACE_CONFIG", "unset")
        if hasattr(torch, "_native"):
            facts["kernel_packages"] = _listed({name: _installed(name) for name in KERNEL_PACKAGES})
    return facts


def _installed(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def cudnn_version() -> int | None:
    """Return the number of cuDNN's version, or None without cuDNN.

    If torch was built with a newer cuDNN, or cuDNN has no kernels for a visible device, torch raises an error at the
    first call of a process, but answers every later call (pytorch, torch/backends/cudnn/__init__.py, _init).
    """
    for _ in range(2):
        with contextlib.suppress(RuntimeError):
            found: int | None = torch.backends.cudnn.version()
            return found
    return None


def library_version(maps: str, name: str, function: str) -> str:
    """Return the version of an NVIDIA library that this process has loaded, or "not given" if it has loaded none.

    Torch can have been built with another version. `maps` is the text of /proc/self/maps. `function` is the library's
    function that takes a libraryPropertyType (0, 1, 2: major, minor, patch level) and the address for the result, as in
    the cuBLAS documentation, cublasGetProperty.
    """
    path = next((line.split(maxsplit=5)[-1] for line in maps.splitlines() if f"/{name}" in line), "")
    if not path:
        return "not given"
    parts = []
    try:
        ask = getattr(ctypes.CDLL(path), function)
        for part in range(3):
            number = ctypes.c_int(-1)
            ask(part, ctypes.byref(number))
            parts.append(str(number.value))
    except (OSError, AttributeError):
        return "not given"
    return ".".join(parts)


def _listed(variables: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in sorted(variables.items()))


def int8_pairs_saturate() -> str:
    """Return the reason why u8 x s8 products can saturate on this CPU with this instruction set, or "" if they cannot.

    Without VNNI or AMX the kernels add pairs of products in saturating 16-bit arithmetic: with full-range operands the
    result of a healthy processor then differs from the exact one by design.
    """
    if limited := os.environ.get("ONEDNN_MAX_CPU_ISA"):
        return f"ONEDNN_MAX_CPU_ISA={limited} selects kernels that saturate full-range int8 pairs by design"
    if not _flags(_read("/proc/cpuinfo")) & {"avx512_vnni", "avx_vnni", "amx_int8"}:
        return "this processor has no VNNI or AMX: kernels saturate full-range int8 pairs by design"
    return ""


def environment() -> dict[str, str]:
    """Return the host's name, the load of the last minute and the boot id; a value that is unknown is left out."""
    load = f"{os.getloadavg()[0]:.2f}" if hasattr(os, "getloadavg") else ""
    boot = _read("/proc/sys/kernel/random/boot_id").strip()
    return {k: v for k, v in {"hostname": socket.gethostname(), "load_1m": load, "boot_id": boot}.items() if v}


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def _field(info: str, name: str) -> str | None:
    match = re.search(rf"^{re.escape(name)}\s*:\s*(.*)$", info, re.MULTILINE)
    return match.group(1).strip() if match else None


def _ranges(numbers: tuple[int, ...]) -> str:
    parts: list[list[int]] = []
    for n in numbers:
        if parts and parts[-1][-1] == n - 1:
            parts[-1][1:] = [n]
        else:
            parts.append([n])
    return ",".join("-".join(map(str, part)) for part in parts)


def float8(device: Device, name: str) -> str:
    """Return the name of the FP8 format that a device multiplies in place of `name`.

    AMD CDNA 3 (gfx942, the MI300 family) multiplies the "fnuz" variants. Other names are returned unchanged. Source:
    pytorch, aten/src/ATen/native/cuda/ScaledBlas.cpp, `_scaled_mm_is_fnuz`.
    """
    if device.backend == "rocm" and device.detail.get("capability") == "9.4" and name.startswith("float8"):
        return f"{name.removesuffix('fn')}fnuz"
    return name


def capability(device: Device) -> tuple[int, int]:
    """Return the compute capability of a CUDA device as (major, minor); (0, 0) for everything else."""
    if device.backend != "cuda":
        return 0, 0
    major, _, minor = device.detail.get("capability", "0.0").partition(".")
    return int(major), int(minor)


def built_for_others(device: Device, error: BaseException) -> str:
    """Return a sentence that a library, e.g. torch, has no kernels for a device; it includes `error` and a remedy."""
    wanted = f"compute capability {found}" if (found := device.detail.get("capability")) else "this device"
    text = beginning((str(error).splitlines() or [""])[0], 90)
    of_torch = torch is not None and device.backend == "cuda"
    listed = [name for name in torch.cuda.get_arch_list() if name.startswith("sm_")] if of_torch else []
    own = f"sm_{(found or '').replace('.', '')}"
    what = "a library that the worker loads"
    if listed and own not in listed:
        what = f"torch {torch.__version__}, built for {', '.join(listed)},"
    return f"{what} has no kernels for {wanted}: {text}. Install one that was built for this device"
