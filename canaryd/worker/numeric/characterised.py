"""Tables of what canaryd knows about healthy devices: the width of partial sums, and where results are exact.

For everything else canaryd needs evidence, which canaryd/judge/characterised.py weighs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from canaryd.model import TORCH, Device
from canaryd.worker.numeric.stack import capability
from canaryd.worker.numeric.tensors import FORMATS, overrides


@dataclass(frozen=True)
class Accumulator:
    """The width of partial sums on a backend, and whether healthy devices were seen to be exact up to that width."""

    bits: int
    characterised: bool
    why: str


def accumulator(device: Device, source: str) -> Accumulator:
    """Return the width of the narrowest format in which a kernel of `device` can keep partial sums.

    `source` is the format of the operands. Sources: NVIDIA CUDA C++ Programming Guide (float32 accumulation of tensor
    cores, when reduced-precision reduction is off); M. Fasi et al., "Numerical behavior of NVIDIA tensor cores", PeerJ
    CS 2021 (additions inside a block are aligned and truncated: two bits of margin); DeepSeek-V3 report, section 3.3.2
    (FP8 on Hopper accumulates about 14 bits: one bit of margin). x86 CPUs: `benchmarks/clean_runs.py`, see
    benchmarks/results/.
    """
    if device.runtime != TORCH:
        return _accumulator_elsewhere(device, source)
    x86 = device.backend == "cpu" and is_x86(device)
    if source == "float64":
        return Accumulator(53, x86, "float64 products and sums")
    if source.startswith(("float8", "float4")):  # of FP4 nothing narrower is documented
        return Accumulator(13, x86, "Hopper's FP8 accumulation keeps about 14 bits")
    if device.backend == "cpu":
        if x86 or source == "float32":
            return Accumulator(24, x86, "float32 partial sums")
        return Accumulator(11 if source == "float16" else 24, False, "Arm kernels may accumulate in float16")
    if device.backend in ("cuda", "rocm"):
        # Tensor cores before Hopper need two bits of margin, and so do those after data-centre Blackwell and AMD's
        # matrix cores, of which nothing is known: a device that rounds now and then meets a class before it misses it.
        margin = 0 if source == "float32" or capability(device)[0] in (9, 10) else 2
        return Accumulator(24 - margin, False, "float32 partial sums, reduced-precision reduction off")
    narrow = {"float32": 24, "float16": 11, "bfloat16": 8}
    return Accumulator(narrow.get(source, 8), False, "undocumented: the narrowest possible format")


def room_of(device: Device, source: str, target: str, *, batched: bool) -> int:
    """Return the number of significant bits that every partial sum of a product must fit into.

    cuBLAS may split a long sum among blocks and add their parts in the result's format. torch forbids that for products
    of two 16-bit matrices only, not for batches and scaled products (aten/src/ATen/cuda/CUDABlas.cpp: `bgemm_internal`
    sets no math mode, `scaled_gemm` no reduction scheme). cuBLASLt does it on an L40 (NVIDIA/TransformerEngine, pull
    request 3440).
    """
    bits = accumulator(device, source).bits
    shared = batched if source in ("bfloat16", "float16") else source.startswith(("float8", "float4"))
    return min(bits, FORMATS[target].bits) if shared and device.backend == "cuda" else bits


def is_x86(device: Device) -> bool:
    """Return whether a device is an x86 processor, or belongs to one."""
    return device.detail.get("architecture") in ("x86_64", "AMD64")


SHOWN: Mapping[str, tuple[str, str]] = {
    "mlx-cpu": ("mlx", "0.32.4"),
    "onnx-cpu": ("onnxruntime", "1.32.0"),
    "jax-cpu": ("jax", "0.10.2"),
}
"""Backends of runtimes other than torch: backend → package, and the version with which a healthy x86 processor was
right in every class in 10,000 distinct runs (benchmarks/results/clean_runs-*.md). Other versions need their own
evidence."""


def is_shown(device: Device) -> bool:
    """Return whether a device of a runtime other than torch runs the package version that `SHOWN` lists."""
    package, version = SHOWN.get(device.backend, ("", ""))
    return bool(package) and is_x86(device) and device.detail.get(package) == version


def _accumulator_elsewhere(device: Device, source: str) -> Accumulator:
    """Return the width of partial sums (see `accumulator`) for a device of a runtime other than torch.

    On x86 processors MLX and ONNX Runtime multiply 16-bit formats in float32 (measured as `characterise` does: 24 bits
    kept). CUDA's tensor cores are as under torch; ONNX Runtime has no known switch that forbids float16 sums there.
    """
    if device.runtime in ("webgpu", "jax") and source == "float16":
        return Accumulator(11, is_shown(device), "WGSL's f16 and JAX's F16_F16_F16: sums in float16")
    if source == "float64":
        return Accumulator(53, is_shown(device), "float64 products and sums")
    if source in ("float32", "tfloat32") and device.unit != "coreml":
        return Accumulator(24 if source == "float32" else 22, is_shown(device), "float32 partial sums")
    if device.unit == "cpu" and is_x86(device):
        return Accumulator(24, is_shown(device), "float32 partial sums")
    if device.backend in ("mlx-cuda", "jax-cuda", "jax-rocm"):
        return Accumulator(22, False, "float32 partial sums of tensor cores, two bits of margin")
    return Accumulator(8 if source == "bfloat16" else 11, False, "undocumented: the narrowest possible format")


SETTLED = ("cuda", "rocm")
"""Backends whose float32 products round no operand under the strict switches, and whose integer kernels torch tests bit
for bit. On other backends even operations without rounding were wrong on healthy devices: pytorch issues 78915
(top-k), 90635 (cumulative sum), 183885 (argsort) and 195595 (64-bit keys through float32), all of MPS; CANN's first
training products multiply float32 in float16 (precision mode force_fp16)."""


def is_characterised(device: Device, source: str, *, rounds_nothing: bool = False) -> bool:
    """Return whether canaryd knows that healthy devices of this kind give right results for a format (docs/goldens.md).

    False if the environment overrides torch's switches. `rounds_nothing`: the cases do not round, so the backends in
    `SETTLED` suffice. Everything that is not known needs evidence, which the judge weighs.
    """
    if overrides():
        return False
    return accumulator(device, source).characterised or (rounds_nothing and is_settled(device))


def is_settled(device: Device) -> bool:
    """Return whether canaryd knows that integer and index kernels are right on healthy devices of this kind."""
    return device.backend in ("cpu", *SETTLED) or is_shown(device)
