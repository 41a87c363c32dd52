"""The environment variables of workers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

INSTRUCTION_SETS: Mapping[str, Mapping[str, str]] = {
    "": {},
    "native": {},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    "baseline": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_CBWR": "COMPATIBLE"},
    "strict": {},
    "tf32": {"MLX_ENABLE_TF32": "1"},
}
"""Name of an execution path → environment variables that select it. On a CPU, "" and "native" leave the choice to
torch's libraries. On MLX, "strict" computes float32 in float32, and "tf32" is MLX's default, which servers use."""
STRICT = {
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # the order of nvidia-smi; otherwise the fastest device comes first
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "MLX_ENABLE_TF32": "0",  # MLX's default is 1, which rounds the operands of float32 products on CUDA and Metal
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # JAX's default takes three quarters of a GPU's memory at once
    "OMP_WAIT_POLICY": "PASSIVE",  # a spinning barrier would take the cores from the server beside it
    # glibc keeps what a tensor leaves for the next one. By default it gives such memory back to the system, and a
    # processor's goldens take a fifth longer. 32 MiB is the most that it allows; one setting alone makes it slower.
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(64 << 20),
    "PYTHONUNBUFFERED": "1",
}
"""Environment of every worker. Libraries read these variables only when they start, so a probe cannot set them."""
BELOW_NORMAL = {"CUDA_MPS_CLIENT_PRIORITY": "1"}
"""Environment of a worker with low priority. If worker and server are both clients of MPS, the worker's kernels wait
for the server's (NVIDIA Multi-Process Service, "Client Priority Level Control"). torch's streams have the lowest
priority anyway, but stream priorities count only within one process."""
SCRUBBED = (
    # Not set to 0 either: that would keep the tfloat32 cases, which allow TF32 themselves, off its units.
    *("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "HIPBLASLT_ALLOW_TF32"),
    # Emulated float32 and float64 products split their operands: the exact goldens' bound does not cover that.
    *("CUBLAS_EMULATE_SINGLE_PRECISION", "CUBLAS_EMULATE_DOUBLE_PRECISION", "CUBLAS_EMULATION_STRATEGY"),
    *("ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE", "IPEX_FP32_MATH_MODE"),
    # float16 operands rounded to bfloat16; kernels chosen by a race at the first call; Metal's fast arithmetic.
    *("ROCBLAS_INTERNAL_FP16_ALT_IMPL", "PYTORCH_TUNABLEOP_ENABLED", "PYTORCH_MPS_FAST_MATH"),
    "XLA_FLAGS",  # among them fast arithmetic and other algorithms for products
    *("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"),
    *("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"),
    *("MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR", "MKL_DEBUG_CPU_TYPE"),
    *("MALLOC_ARENA_MAX", "MALLOC_TOP_PAD_"),  # the first is the daemon's, set in its unit and image
)
"""Environment variables that no worker inherits, because they would silently change numbers or times."""
MPS = "/tmp/nvidia-mps"  # noqa: S108 - NVIDIA's own default
"""Default directory of the pipes of NVIDIA's MPS daemon; the variable CUDA_MPS_PIPE_DIRECTORY can name another."""


def beside_mps(environment: Mapping[str, str]) -> bool:
    """Return whether a process with this environment shares this host's NVIDIA devices through MPS.

    If a client is killed while it computes, others can end too (NVIDIA Multi-Process Service, "Limitations").
    """
    return (Path(environment.get("CUDA_MPS_PIPE_DIRECTORY") or MPS) / "control").exists()
