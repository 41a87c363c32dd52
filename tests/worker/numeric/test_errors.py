"""What backends write when they refuse, fail, or run out of memory, and texts that nobody foresaw."""

import re
import types

import pytest

from canaryd.model import Device
from canaryd.worker.numeric import stack
from canaryd.worker.numeric.errors import MESSAGES, ErrorKind, is_refusal, kind_of

ASYNCHRONOUS = (
    "\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be"
    " incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\nCompile with `TORCH_USE_CUDA_DSA` to enable"
    " device-side assertions.\n"
)
"""What torch adds to every error of the CUDA runtime (c10/cuda/CUDAMiscFunctions.cpp)."""
SEARCH = (
    "\nSearch for `cudaErrorLaunchFailure' in https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html"
    " for more information."
)
"""What it adds before that from 2.9 on, with the name of the code."""
# cudaGetErrorString of libcudart 12.1 and 13.0 for every code that a running kernel may leave behind.
RUNTIME = {
    ErrorKind.DEVICE: (
        "uncorrectable ECC error encountered",
        "uncorrectable NVLink error detected during the execution",
        "Invalid access of peer GPU memory over nvlink or a hardware error",
        "an illegal memory access was encountered",
        "device-side assert triggered",
        "hardware stack error",
        "an illegal instruction was encountered",
        "misaligned address",
        "operation not supported on global/shared address space",
        "invalid program counter",
        "unspecified launch failure",
    ),
    ErrorKind.MEMORY: ("out of memory",),
    ErrorKind.REFUSED: (
        "no kernel image is available for execution on the device",
        "invalid device function",
        "operation not supported",
    ),
    ErrorKind.OTHER: (
        "invalid argument",
        "invalid configuration argument",
        "too many resources requested for launch",
        "the launch timed out and was terminated",
        "CUDA-capable device(s) is/are busy or unavailable",
        "system not yet initialized",
        "MPS client failed to connect to the MPS control daemon or the MPS server",
        "the MPS client has been terminated by the server",
        "unknown error",
    ),
}
TEXTS = {
    ErrorKind.OTHER: (
        "",
        "HCCS LINK ERROR",
        "something that nobody foresaw",
        "CUDA error: CUBLAS_STATUS_INTERNAL_ERROR when calling `cublasCreate(handle)`",
        "Discarded (victim of GPU error/recovery) (00000005:kIOGPUCommandBufferCallbackErrorInnocentVictim)",
        "you must set an environment variable before running your PyTorch application: CUBLAS_WORKSPACE_CONFIG=:4096:8",
    ),
    ErrorKind.MEMORY: (
        "Insufficient Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "NPU out of memory. Tried to allocate 2.00 GiB (NPU 0; 60.97 GiB total capacity)",
        "level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)",
        "Validation Error\n\nCaused by:\n  In wgpuDeviceCreateBuffer\n    Not enough memory left.",
        "[enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate memory",
    ),
    ErrorKind.DEVICE: (
        "UCE ERROR",
        "HBM MULTI BIT ECC ERROR",
        "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
        "[Error]: The vector core execution is abnormal.",
        "NPU function error: call aclnnMatmul failed, error code is 507015",
        "Caused GPU Hang Error (00000003:kIOGPUCommandBufferCallbackErrorHang)",
        "level_zero backend failed with error: 20 (UR_RESULT_ERROR_DEVICE_LOST)",
        "Memory access fault by GPU node-1 (Agent handle: 0x5581) on address 0x7f00.",
        "Validation Error\n\nCaused by:\n  In wgpuDeviceCreateBuffer\n    Parent device is lost",
        "Callback: Queue 0x7f78cb400000 aborting with error : HSA_STATUS_ERROR_EXCEPTION: An HSAIL operation resul",
    ),
    ErrorKind.REFUSED: (
        "a must be 2D",
        "Undefined type BFloat16",
        "could not find valid hipblaslt solution",
        "No available kernel. Aborting execution.",
        "_int_mm_out_cuda not compiled for this platform.",
        "module 'torch' has no attribute 'float8_e4m3fnuz'",
        "mm() got an unexpected keyword argument 'out_dtype'",
        "Triton Error [CUDA]: device kernel image is invalid",
        "\"addmm_impl_cpu_\" not implemented for 'Float8_e4m3fn'",
        "Cannot convert ScalarType Float8_e4m3fnuz to cudaDataType.",
        "No viable backend for scaled_dot_product_attention was found.",
        "could not create a primitive descriptor for the matmul primitive",
        "Now _scaled_mm only supports per-tensor scaling for CPU backend.",
        "hipblaslt rowwise _scaled_mm only supports BFloat16 output but got Float",
        "Only bf16 high precsion output types are supported for row-wise scaling.",
        "CUDA error: HIPBLAS_STATUS_NOT_SUPPORTED when calling `hipblasLtMatmul`",
        "self.size(1) needs to be greater than 0 and a multiple of 8, but got 12",
        "cumsum_cuda_kernel does not have a deterministic implementation, but you set",
        "level_zero backend failed with error: 4 (UR_RESULT_ERROR_UNSUPPORTED_FEATURE)",
        "The operator 'aten::_int_mm' is not currently implemented for the MPS device.",
        "cuDNN Frontend error: [cudnn_frontend] Error: No valid execution plans built.",
        "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support",
        "out of resource: shared memory, Required: 99, Hardware limit: 64. Reducing block sizes",
        "Expected trailing dimension of mat1 to be divisible by 16 but got mat1 shape: (16x17).",
        "PTXAS error: Internal Triton PTX codegen error\n`ptxas` stderr:\nptxas fatal   : Value 'sm_103a' is not def",
    ),
}
"""What backends write. Kernels that do not take a problem are refusals; anything unclear is a failure."""


@pytest.mark.parametrize("prefix", ["CUDA", "HIP"])
@pytest.mark.parametrize("search", ["", SEARCH])
@pytest.mark.parametrize(("kind", "text"), [(kind, text) for kind, texts in RUNTIME.items() for text in texts])
def test_errors_of_the_runtime_are_told_apart(prefix, search, kind, text):
    """Also with the advice that torch adds, which speaks of assertions on the device."""
    assert kind_of(RuntimeError(f"{prefix} error: {text}{search}{ASYNCHRONOUS}")) is kind


@pytest.mark.parametrize(("kind", "text"), [(kind, text) for kind, texts in TEXTS.items() for text in texts])
def test_texts_of_backends_are_told_apart(kind, text):
    """By what the text contains; only a refusal may be skipped."""
    assert kind_of(RuntimeError(text)) is kind
    assert is_refusal(RuntimeError(text)) is (kind is ErrorKind.REFUSED)


def test_every_row_of_the_table_is_met_by_a_text():
    """So that no row is there for nothing."""
    for kind, patterns in MESSAGES.items():
        texts = [*TEXTS[kind], *(f"CUDA error: {text}" for text in RUNTIME[kind])]
        assert [p for p in patterns if not any(re.search(p, text, re.IGNORECASE) for text in texts)] == []


def test_a_type_may_say_it_all():
    """A missing implementation is a refusal and a lack of memory is one, whatever the words."""

    class OutOfMemoryError(RuntimeError):
        """As torch's."""

    assert kind_of(NotImplementedError("cuDNN SDPA is not deterministic.")) is ErrorKind.REFUSED
    assert kind_of(MemoryError()) is ErrorKind.MEMORY
    assert kind_of(OutOfMemoryError("no words")) is ErrorKind.MEMORY
    assert kind_of(TypeError("unsupported operand type(s) for +: 'int' and 'str'")) is ErrorKind.OTHER
    assert kind_of(AttributeError("'NoneType' object has no attribute 'shape'")) is ErrorKind.OTHER
    assert kind_of(AttributeError("module 'torch' has no attribute 'float8_e5m2fnuz'")) is ErrorKind.REFUSED


@pytest.mark.parametrize(
    ("listed", "backend", "what"),
    [
        (["sm_80", "sm_90"], "cuda", "torch 2.9.9, built for sm_80, sm_90, has"),
        (["sm_80", "sm_120"], "cuda", "a library that the worker loads has"),  # an extension of torch, say
        (["sm_80", "sm_90"], "jax-cuda", "a library that the worker loads has"),
        (None, "cuda", "a library that the worker loads has"),
    ],
)
def test_who_lacks_kernels_is_told_by_what_torch_was_built_for(monkeypatch, listed, backend, what):
    """Torch is named only where it was not built for the device, and not where it is missing."""
    fake = listed and types.SimpleNamespace(
        __version__="2.9.9", cuda=types.SimpleNamespace(get_arch_list=lambda: [*listed, "compute_90"])
    )
    monkeypatch.setattr(stack, "torch", fake)
    device = Device(uuid="GPU-1", backend=backend, index=0, model="B", detail={"capability": "12.0"})
    told = stack.built_for_others(device, RuntimeError("CUDA error: no kernel image is available"))
    assert told == (
        f"{what} no kernels for compute capability 12.0: CUDA error: no kernel image is available."
        " Install one that was built for this device"
    )
