"""The only module that imports torch: formats, comparison of bits, switches, placement on cores.

The rest of the worker imports `torch` from here. Without torch the module still loads, so that probes can be listed;
`need_torch` then skips a numeric probe with the reason.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import functools
import gc
import json
import os
import re
import sys
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

from canaryd.model import SHARED, TORCH, Device
from canaryd.probe import Skip
from canaryd.worker import visible

OLDEST = (2, 6)
"""Oldest supported version of torch. Measured on a healthy CPU: 2.4 cannot copy FP8 under the strict switches, and 2.5
exceeds the error bound of rms_norm in 16 bits. On accelerators, 2.4 returns a pair for a scaled product, and devices
have no uuid."""
WORD = 8
"""Number of bytes that are compared at once, or copied at once when single columns are gathered."""

torch: Any = None
why_no_torch = ""
_collected = gc.isenabled()
gc.disable()  # nothing that an import makes is garbage, and looking for it takes an eighth of the import's time
try:
    import torch  # type: ignore[no-redef]
    import torch.nn.attention  # type: ignore[no-redef]
except Exception as error:  # noqa: BLE001  a broken installation raises anything: OSError, KeyError, RuntimeError
    why_no_torch = f"{sys.executable} cannot import torch: {type(error).__name__}: {error}"
if _collected:
    gc.freeze()  # no later collection goes through torch
    gc.enable()


_OLDEST = ".".join(map(str, OLDEST))


def need_torch() -> None:
    """Raise `Skip` with the reason and the remedy if torch is missing."""
    if torch is None:
        remedy = f"Name an interpreter that has torch {_OLDEST} or newer in worker.python (or worker.runtimes)"
        raise Skip(f"{why_no_torch}. {remedy}")


@functools.lru_cache(maxsize=8)
def need_version(backend: str) -> None:
    """Raise `Skip` if this torch is older than the oldest version that is supported for this backend."""
    found = tuple(int(number) for number in re.findall(r"\d+", str(torch.__version__))[:2])
    if found < OLDEST:
        raise Skip(f"torch {torch.__version__} is too old for {backend}: point worker.python at {_OLDEST} or newer")


@dataclass(frozen=True)
class Format:
    """A number format: significands of `bits` bits with normal exponents `emin`…`emax`."""

    name: str
    bits: int
    """Significand bits, the implicit one included."""
    emin: int
    """Smallest exponent of a normal number: 2**emin is normal."""
    emax: int
    """Largest exponent: an integer below 2**bits, times 2**e, is finite if its top bit is at most 2**emax."""

    @property
    def dtype(self) -> Any:
        """The torch dtype that carries the format."""
        return getattr(torch, {"tfloat32": "float32", "float4_e2m1fn": "float8_e4m3fn"}.get(self.name, self.name))


FORMATS = {
    f.name: f
    for f in (
        # IEEE 754-2019 table 3.5; bfloat16 and tfloat32: NVIDIA PTX ISA, "Alternate Floating-Point Data Formats";
        # FP8: OCP 8-bit Floating Point Specification 1.0. E4M3's topmost significand at 2**8 is NaN, hence emax 7.
        # FP4: OCP Microscaling Formats 1.0.
        Format("float64", 53, -1022, 1023),
        Format("float32", 24, -126, 127),
        Format("tfloat32", 11, -126, 127),
        Format("bfloat16", 8, -126, 127),
        Format("float16", 11, -14, 15),
        Format("float8_e4m3fn", 4, -6, 7),
        Format("float8_e5m2", 3, -14, 15),
        Format("float4_e2m1fn", 2, 0, 2),
        # The fnuz kinds have no infinity and no negative zero, and another bias: AMD CDNA 3 ISA, section 7.2.
        Format("float8_e4m3fnuz", 4, -7, 7),
        Format("float8_e5m2fnuz", 3, -15, 15),
    )
}


def form_of(dtype: Any) -> Format:
    """Return the format that a torch dtype carries; raise `KeyError` for integers."""
    return FORMATS[str(dtype).removeprefix("torch.")]


SMALL = 1 << 20
"""Largest result, in bytes, that one thread compares as fast as many threads (benchmarks.verified_gemm)."""
FEW = 16
"""Number of threads below which one thread also compares larger results, with memcmp, which reads eight bytes or more
at a time: up to `SMALL` x `FEW` / threads bytes."""
_INTEGER_OF_WIDTH = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}


def bits(tensor: Any) -> Any:
    """Return a tensor's raw bits as integers of the same width (no copy); NaN and signed zeros become plain values."""
    return tensor.view(getattr(torch, _INTEGER_OF_WIDTH[tensor.element_size()]))


def flat_bits(tensor: Any) -> Any:
    """Return a tensor's raw bits in storage order, which is memory order for a transposed operand (no copy)."""
    raw = bits(tensor)
    return raw.reshape(-1) if raw.is_contiguous() else raw.transpose(-1, -2).reshape(-1)


def bytes_of(tensor: Any) -> bytes:
    """Return a host tensor's bytes in C order; it needs no numpy, and tolist takes 20 times as long."""
    whole = tensor.contiguous()
    return ctypes.string_at(whole.data_ptr(), whole.nbytes)


def words(*tensors: Any) -> tuple[Any, ...]:
    """Return the raw bits of tensors of one format, as 64-bit words if their sizes allow this, else as `bits` does.

    Nothing is copied. A comparison of words reads four bfloat16 values at once, so that its speed is limited by the
    memory and not by the number of elements.
    """
    whole = all(
        t.is_contiguous() and t.nbytes % WORD == 0 and t.storage_offset() * t.element_size() % WORD == 0
        for t in tensors
    )
    return tuple(t.view(-1).view(torch.int64) if whole else bits(t) for t in tensors)


def joined(results: list[Any]) -> list[Any]:
    """Return [one tensor (n, …)] for contiguous results that are adjacent in memory; return other results unchanged."""
    first, *others = results
    size = first.numel()
    at, memory = first.storage_offset(), _memory_of(first)
    lie_together = bool(others) and all(
        r.is_contiguous() and _memory_of(r) == memory and r.storage_offset() == at + n * size
        for n, r in enumerate(results)
    )
    if not lie_together:
        return results
    return [first.as_strided((len(results), *first.shape), (size, *first.stride()), at)]


def _memory_of(tensor: Any) -> int:
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001  fake tensors of tests have no address


def same_bits(a: Any, b: Any) -> bool:
    """Return whether two contiguous tensors are equal bit for bit, compared on their device, eight bytes at a time."""
    if a.shape != b.shape or a.dtype != b.dtype:
        raise ValueError(f"compared {a.dtype}{tuple(a.shape)} with {b.dtype}{tuple(b.shape)}; wanted equal kinds")
    return bool(torch.equal(*words(a, b)))


def host_same_bits(a: Any, b: Any) -> bool:
    """Return whether two host tensors are equal, by memcmp of the C library, which shares no code with torch."""
    a, b = a.contiguous(), b.contiguous()
    return bool(a.nbytes == b.nbytes and _memcmp()(a.data_ptr(), b.data_ptr(), a.nbytes) == 0)


@functools.lru_cache(maxsize=1)
def _memcmp() -> Any:
    memcmp = ctypes.CDLL(None).memcmp
    memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    return memcmp


def is_alone(result: Any) -> bool:
    """Return whether one thread compares and overwrites this result of a processor, with the C library.

    If not, torch does so with all threads. The host's check of a comparison uses the other of the two methods. Waking
    threads takes longer than it saves for a `SMALL` result, or for a larger one if there are few threads (`FEW`).
    """
    threads = torch.get_num_threads()
    return bool(threads == 1 or result.nbytes <= SMALL * max(1, FEW // threads))


def spoil(result: Any) -> None:
    """Overwrite every bit of a contiguous tensor with ones."""
    (raw,) = words(result)  # eight bytes at a time
    if raw.device.type == "cpu" and is_alone(raw):
        ctypes.memset(raw.data_ptr(), 255, raw.nbytes)
    else:
        raw.fill_(255 if raw.dtype is torch.uint8 else -1)


def torch_device(device: Device) -> Any:
    """Return the torch device of a `Device`, found by its uuid, because its number can change after the discovery.

    Raises `Skip` if the device is not visible now, or if this torch is too old for it. ROCm is called "cuda" in torch.
    """
    need_version(device.backend)
    kind, index = device.torch_place
    if kind == "cpu":
        return torch.device("cpu")
    # CUDA may give an instance of a divided GPU under the GPU's uuid; only that instance is visible here.
    narrowed = visible.is_narrowed()
    names = (device.uuid, device.parent) if device.parent and narrowed else (device.uuid,)
    return torch.device(kind, _index_now(kind, names, 0 if narrowed else index, by_place=SHARED in device.detail))


@functools.lru_cache(maxsize=64)
def _index_now(kind: str, names: tuple[str, ...], index: int, *, by_place: bool) -> int:
    """Return torch's present number of the device that has one of the uuids in `names`.

    The first name is the device's own uuid; `index` is its earlier number. `by_place`: other devices have the same
    uuid, so only `index` identifies the device.
    """
    module = getattr(torch, kind)
    if not module.is_available():
        raise Skip(f"{names[0]} is not visible: torch finds no {kind} device")
    if kind == "mps" or (by_place and index < module.device_count()):
        return index
    for now in range(module.device_count()):
        found = str(getattr(module.get_device_properties(now), "uuid", ""))
        if not found and now == index:
            return index  # this torch gives none
        if found and any(name.endswith(found.removeprefix("GPU-").removeprefix("MIG-")) for name in names):
            return now
    raise Skip(f"{names[0]} is not visible: none of the {module.device_count()} {kind} devices has that uuid")


def upload(tensors: tuple[Any, ...], device: Device) -> tuple[Any, ...]:
    """Return copies of host tensors in new allocations on the device; a transposed tensor stays transposed."""
    target = torch_device(device)
    # clone() first: on the CPU `to` would return the same memory, and an upload must be fresh.
    return tuple(t.clone(memory_format=torch.preserve_format).to(target) for t in tensors)


OVERRIDES = (
    *("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "HIPBLASLT_ALLOW_TF32"),
    *("CUBLAS_EMULATE_SINGLE_PRECISION", "CUBLAS_EMULATE_DOUBLE_PRECISION", "CUBLAS_EMULATION_STRATEGY"),
    *("ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE", "IPEX_FP32_MATH_MODE"),
    *("ROCBLAS_INTERNAL_FP16_ALT_IMPL", "PYTORCH_TUNABLEOP_ENABLED", "PYTORCH_MPS_FAST_MATH"),
)
"""Environment variables that make a library round operands or choose other kernels, against torch's switches. canaryd
removes them from workers. The setting `worker.env` can set them again; then no case counts as known to be right on
healthy devices."""


def overrides() -> dict[str, str]:
    """Return the variables of `OVERRIDES` that the operator's environment sets; usually {}."""
    return {name: os.environ[name] for name in OVERRIDES if os.environ.get(name, "0") not in ("", "0")}


def _switch_table() -> list[tuple[str, Any, str, Any]]:
    matmul = torch.backends.cuda.matmul
    # HF32 rounds operands to 11 bits: Ascend Extension for PyTorch, allow_hf32. Its convolutions allow it by default.
    npu = {name: getattr(torch.npu, name, None) for name in ("matmul", "conv")} if hasattr(torch, "npu") else {}
    return [
        ("cuda.matmul.allow_tf32", matmul, "allow_tf32", False),
        ("cuda.matmul.allow_fp16_reduced_precision_reduction", matmul, "allow_fp16_reduced_precision_reduction", False),
        ("cuda.matmul.allow_bf16_reduced_precision_reduction", matmul, "allow_bf16_reduced_precision_reduction", False),
        ("cuda.matmul.allow_fp16_accumulation", matmul, "allow_fp16_accumulation", False),
        ("cudnn.allow_tf32", torch.backends.cudnn, "allow_tf32", False),
        ("cudnn.benchmark", torch.backends.cudnn, "benchmark", False),
        ("cudnn.deterministic", torch.backends.cudnn, "deterministic", True),
        *((f"npu.{name}.allow_hf32", owner, "allow_hf32", False) for name, owner in npu.items()),
    ]


@contextlib.contextmanager
def strict_switches() -> Iterator[dict[str, str]]:
    """Set every switch that can change a result's bits to its exact position; yield the settings; restore all after.

    A switch that this torch does not have is recorded as "absent". Float32 products of the CPU are set to "highest", so
    that no library silently rounds operands to bfloat16 or TF32.
    """
    record: dict[str, str] = {}
    restore: list[tuple[Any, str, Any]] = []
    precision = torch.get_float32_matmul_precision()
    # use_deterministic_algorithms() sets the same, but also imports torch's compiler, which takes a second.
    deterministic = torch.get_deterministic_debug_mode()
    torch.set_float32_matmul_precision("highest")
    record["float32_matmul_precision"] = "highest"
    try:
        for name, owner, attribute, value in _switch_table():
            try:
                before = getattr(owner, attribute)
                setattr(owner, attribute, value)
            except (AttributeError, RuntimeError):
                record[name] = "absent"
                continue
            restore.append((owner, attribute, before))
            record[name] = str(value)
        torch.set_deterministic_debug_mode("error")
        record["deterministic_algorithms"] = "True"
        record["CUBLAS_WORKSPACE_CONFIG"] = os.environ.get("CUBLAS_WORKSPACE_CONFIG", "unset")
        yield record
    finally:
        torch.set_deterministic_debug_mode(deterministic)
        for owner, attribute, before in reversed(restore):
            setattr(owner, attribute, before)
        torch.set_float32_matmul_precision(precision)


@contextlib.contextmanager
def allowing(attribute: str) -> Iterator[None]:
    """Turn on one of the switches of CUDA's products, such as "allow_tf32", during the block."""
    matmul = torch.backends.cuda.matmul
    before = getattr(matmul, attribute)
    setattr(matmul, attribute, True)
    try:
        yield
    finally:
        setattr(matmul, attribute, before)


@contextlib.contextmanager
def in_any_order() -> Iterator[None]:
    """Allow torch to add and scatter in any order during the block, as serving does.

    A fixed order makes torch sort on CUDA, and excludes cuDNN. Source: pytorch, aten/src/ATen/native/cuda/Indexing.cu,
    index_add_cuda_impl; TensorAdvancedIndexing.cpp, scatter; transformers/cuda/sdp_utils.cpp,
    check_cudnn_deterministic.
    """
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("default")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


def visible_cores() -> tuple[int, ...]:
    """Return the host cores that this process may use, in order."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


@functools.lru_cache(maxsize=1)
def can_pin() -> bool:
    """Return whether this process can choose its core; macOS and some filters of system calls do not allow it."""
    try:
        os.sched_setaffinity(0, os.sched_getaffinity(0))
    except (AttributeError, OSError):
        return False
    return True


@contextlib.contextmanager
def on_cores(cores: Collection[int], threads: int) -> Iterator[None]:
    """Run the block's torch work in `threads` threads on `cores`; if `cores` is empty, on the present cores."""
    before, pinned = torch.get_num_threads(), visible_cores()
    pins = bool(cores) and can_pin()
    try:
        # The affinity first: new threads of the pool inherit it from this thread.
        if pins:
            os.sched_setaffinity(0, cores)
        torch.set_num_threads(threads)
        yield
    finally:
        if pins:
            os.sched_setaffinity(0, pinned)
        torch.set_num_threads(before)


def on_core(core: int | None) -> contextlib.AbstractContextManager[None]:
    """Run the block's torch work in this thread only, pinned to `core`; with None, torch uses all its threads.

    With one intra-op thread torch runs kernels in the calling thread, so that the core of a wrong result is known. If
    the core cannot be chosen (`can_pin`), the work still runs in one thread, on a core that the system chose.
    """
    return contextlib.nullcontext() if core is None else on_cores({core}, 1)


def on_two_cores(first: int, second: int, work: Callable[[], Any]) -> tuple[Any, Any]:
    """Run `work` on two cores at the same time, as `on_core` does; return both results.

    If both cores are the same, the second run follows the first. An error in either run ends both and is raised.
    """
    if first == second or not can_pin():
        with on_core(first):
            return work(), work()

    def aside() -> Any:
        os.sched_setaffinity(0, {second})
        return work()

    with on_core(first):
        twin = _other_thread().submit(aside)
        try:
            return work(), twin.result()
        finally:
            concurrent.futures.wait([twin])


@functools.lru_cache(maxsize=1)
def _other_thread() -> concurrent.futures.ThreadPoolExecutor:
    """Return the executor with the one thread for work on a second core; a new thread each time would have new memory.

    The thread has its own number of OpenMP threads. MKL has one number for all threads: 1 during `on_two_cores`.
    """

    def alone() -> None:
        torch.get_num_threads()  # the first of such calls in a thread gives it the number that another thread set last
        torch.set_num_threads(1)

    return concurrent.futures.ThreadPoolExecutor(1, initializer=alone)


def synchronize(device: Device) -> None:
    """Wait until the device has finished; return at once on a CPU."""
    target = torch_device(device)
    if target.type == "mps":
        torch.mps.synchronize()  # there is one, and no argument
    elif target.type != "cpu":
        getattr(torch, target.type).synchronize(target)  # without it, the wait opens a context on device 0


AHEAD = 100_000
"""Number of the device's clock cycles for which one thread of it idles before a timed call, at least 50 µs. In this
time the host enqueues the call, so the device does not wait for the host. A server's caches stay."""


def has_events(device: Device) -> bool:
    """Return whether a device measures times with its own clock, which CUDA and ROCm devices do through torch."""
    return device.runtime == TORCH and device.backend in ("cuda", "rocm")


def timed(device: Device, call: Callable[[], Any], wait: Callable[[], None]) -> tuple[Any, float]:
    """Return (result of the call, seconds that it took), measured by the device's own events if it has them.

    `wait` waits for the device. With events, the speed at which the host launches kernels does not count: one of two
    equal GPUs can be farther from the host's processor.
    """
    if has_events(device):
        with torch.cuda.device(torch_device(device)):
            torch.cuda._sleep(AHEAD)  # noqa: SLF001
        start = event(device)
        result = call()
        return result, seconds_between(start, event(device))
    wait()
    begun = time.perf_counter()
    result = call()
    wait()
    return result, time.perf_counter() - begun


def event(device: Device) -> Any:
    """Return an event that marks the end of all work enqueued on the device so far, or None if there are no events."""
    if not has_events(device):
        return None
    made = torch.cuda.Event(enable_timing=True)
    made.record(torch.cuda.current_stream(torch_device(device)))
    return made


def seconds_between(start: Any, end: Any) -> float:
    """Return the seconds between two events by the device's clock, after waiting until the device passes `end`."""
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def let_go() -> None:
    """Wait until the one device of this process has finished, and free its memory."""
    for kind in ("cuda", "xpu", "npu"):
        module = getattr(torch, kind, None)
        if visible.is_narrowed() and module is not None and module.is_initialized():
            module.synchronize()
            module.empty_cache()


def as_text(record: dict[str, str]) -> str:
    """Return a record of switches as one canonical line, for a Reading."""
    return json.dumps(record, sort_keys=True, separators=(",", ":"))
