"""What backends write when they refuse, fail, or run out of memory: each message of the table, and unforeseen ones."""

import types

import pytest

from canaryd.model import Device
from canaryd.worker.numeric import stack
from canaryd.worker.numeric.errors import MESSAGES, ErrorKind, is_refusal, kind_of, meaning

BACKENDS = {"cpu", "webgpu", "cuda", "rocm", "mps", "xpu", "npu"}
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


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: m.pattern)
def test_each_message_means_what_the_table_says(message):
    """Its example is recognised by its own row, and by none before it; backends and source are given."""
    assert meaning(message.example) is message
    assert kind_of(RuntimeError(message.example)) is message.kind
    assert set(message.backends.split()) <= BACKENDS
    assert message.source


def test_every_backend_can_refuse_and_run_out_of_memory():
    """And each accelerator can fail: the table has a row for it. WebGPU's shaders are ours and refuse by type."""
    for backend in BACKENDS:
        kinds = {m.kind for m in MESSAGES if backend in m.backends.split()}
        assert ErrorKind.REFUSED in kinds or backend == "webgpu"
        assert ErrorKind.MEMORY in kinds
        assert ErrorKind.DEVICE in kinds or backend == "cpu"


# cudaGetErrorString of libcudart 12.1 and 13.0 for every code that a running kernel may leave behind.
RUNTIME = {
    "uncorrectable ECC error encountered": ErrorKind.DEVICE,
    "uncorrectable NVLink error detected during the execution": ErrorKind.DEVICE,
    "Invalid access of peer GPU memory over nvlink or a hardware error": ErrorKind.DEVICE,
    "an illegal memory access was encountered": ErrorKind.DEVICE,
    "device-side assert triggered": ErrorKind.DEVICE,
    "hardware stack error": ErrorKind.DEVICE,
    "an illegal instruction was encountered": ErrorKind.DEVICE,
    "misaligned address": ErrorKind.DEVICE,
    "operation not supported on global/shared address space": ErrorKind.DEVICE,
    "invalid program counter": ErrorKind.DEVICE,
    "unspecified launch failure": ErrorKind.DEVICE,
    "out of memory": ErrorKind.MEMORY,
    "no kernel image is available for execution on the device": ErrorKind.REFUSED,
    "invalid device function": ErrorKind.REFUSED,
    "operation not supported": ErrorKind.REFUSED,
    "invalid argument": ErrorKind.OTHER,
    "invalid configuration argument": ErrorKind.OTHER,
    "too many resources requested for launch": ErrorKind.OTHER,
    "the launch timed out and was terminated": ErrorKind.OTHER,
    "CUDA-capable device(s) is/are busy or unavailable": ErrorKind.OTHER,
    "system not yet initialized": ErrorKind.OTHER,
    "MPS client failed to connect to the MPS control daemon or the MPS server": ErrorKind.OTHER,
    "the MPS client has been terminated by the server": ErrorKind.OTHER,
    "unknown error": ErrorKind.OTHER,
}


@pytest.mark.parametrize("prefix", ["CUDA", "HIP"])
@pytest.mark.parametrize("search", ["", SEARCH])
@pytest.mark.parametrize("text", RUNTIME)
def test_errors_of_the_runtime_are_told_apart(prefix, search, text):
    """Also with the advice that torch adds, which speaks of assertions on the device."""
    assert kind_of(RuntimeError(f"{prefix} error: {text}{search}{ASYNCHRONOUS}")) is RUNTIME[text]


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        # argument checks of ATen, which come before any launch
        ("self.size(1) needs to be greater than 0 and a multiple of 8, but got 12", ErrorKind.REFUSED),
        ("Expected trailing dimension of mat1 to be divisible by 16 but got mat1 shape: (16x17).", ErrorKind.REFUSED),
        ("mat2 shape (32x17) must be divisible by 16", ErrorKind.REFUSED),
        ("mat2 must be col_major, got stride (48, 1)", ErrorKind.REFUSED),
        ("a must be 2D", ErrorKind.REFUSED),
        ("Multiplication of two Float8_e5m2 matrices is not supported", ErrorKind.REFUSED),
        ("out_dtype must be the same as input dtype or fp32 for fp16/bf16 inputs", ErrorKind.REFUSED),
        ("Float8_e4m3fn is only supported for ROCm 6.5 and above", ErrorKind.REFUSED),
        ("CUDA error: HIPBLAS_STATUS_NOT_SUPPORTED when calling `hipblasLtMatmul`", ErrorKind.REFUSED),
        ("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED", ErrorKind.DEVICE),
        ("The operator 'aten::_int_mm' is not currently implemented for the MPS device.", ErrorKind.REFUSED),
        ("Required aspect fp64 is not supported on the device", ErrorKind.REFUSED),
        ("NPU out of memory. Tried to allocate 2.00 GiB (NPU 0; 60.97 GiB total capacity)", ErrorKind.MEMORY),
        ("[Error]: The vector core execution is abnormal.", ErrorKind.DEVICE),
        ("UCE ERROR", ErrorKind.DEVICE),
        # kernels that are not there, or not under the switches
        ("No available kernel. Aborting execution.", ErrorKind.REFUSED),
        ("No viable backend for scaled_dot_product_attention was found.", ErrorKind.REFUSED),
        ("cumsum_cuda_kernel does not have a deterministic implementation, but you set", ErrorKind.REFUSED),
        ("cuDNN Frontend error: [cudnn_frontend] Error: No valid execution plans built.", ErrorKind.REFUSED),
        ("cuDNN Frontend error: [cudnn_frontend] Error: No execution plans support the graph.", ErrorKind.REFUSED),
        ("cuDNN Frontend error: No valid engine configs for Matmul_MUL_Reduction_SUB_EXP_", ErrorKind.REFUSED),
        ("_int_mm_out_cuda not compiled for this platform.", ErrorKind.REFUSED),
        ("mm() got an unexpected keyword argument 'out_dtype'", ErrorKind.REFUSED),
        ("out of resource: shared memory, Required: 99, Hardware limit: 64. Reducing block sizes", ErrorKind.REFUSED),
        ("Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support", ErrorKind.REFUSED),
        ("level_zero backend failed with error: 20 (UR_RESULT_ERROR_DEVICE_LOST)", ErrorKind.DEVICE),
        ("Caused GPU Hang Error (00000003:kIOGPUCommandBufferCallbackErrorHang)", ErrorKind.DEVICE),
        ("NPU function error: call aclnnMatmul failed, error code is 507015", ErrorKind.DEVICE),
        ("Memory access fault by GPU node-1 (Agent handle: 0x5581) on address 0x7f00.", ErrorKind.DEVICE),
        ("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx( handle)`", ErrorKind.DEVICE),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", ErrorKind.MEMORY),
        # nothing that the table knows: a failure, never a skip
        ("something that nobody foresaw", ErrorKind.OTHER),
        ("Unsupported hardware state: the device must be reset", ErrorKind.OTHER),
        ("CUDA error: CUBLAS_STATUS_INTERNAL_ERROR when calling `cublasCreate(handle)`", ErrorKind.OTHER),
        ("", ErrorKind.OTHER),
    ],
)
def test_other_texts_of_backends(text, kind):
    """Kernels that do not take a problem are refusals; anything unclear is not."""
    assert kind_of(RuntimeError(text)) is kind
    assert is_refusal(RuntimeError(text)) is (kind is ErrorKind.REFUSED)


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
