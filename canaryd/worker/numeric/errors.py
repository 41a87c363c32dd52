"""What an exception of a backend means: refused, failed on the device, out of memory, or something else.

`MESSAGES` is the table: what CUDA, ROCm, MPS, XPU, NPU and torch itself write, each with an example and its source. The
first message that an error contains decides. An error that contains none is `OTHER`: a broken device raises unforeseen
errors, and none of them may pass for a kernel that does not exist.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum


class ErrorKind(str, Enum):
    """What an error says about the device."""

    REFUSED = "refused"
    """This kernel does not take this problem: no evidence about the device."""
    DEVICE = "device"
    """The device failed while it computed: uncorrectable ECC, illegal address, launch failure."""
    MEMORY = "memory"
    """Memory ran out, on the device or on the host."""
    OTHER = "other"
    """Anything else: settings, other users of the device, links to other devices, and what nobody foresaw."""


@dataclass(frozen=True)
class Message:
    """One message of a backend."""

    kind: ErrorKind
    pattern: str
    """Regular expression, found anywhere in the text, upper or lower case."""
    example: str
    """A text as the backend writes it."""
    backends: str
    source: str


UNBUILT = r"no kernel image is available|error: invalid device function"
"""Of a library that was built for other devices."""
_RUNTIME = "cudaGetErrorString of libcudart 12.1 and 13.0; ROCm/clr, hipamd/src/hip_error.cpp"
_BLAS = "pytorch, aten/src/ATen/cuda/Exceptions.cpp; cuBLAS documentation, cublasStatus_t; hipBLAS likewise"
_DNN = "cuDNN documentation, cudnnStatus_t; pytorch, aten/src/ATen/cudnn/Exceptions.h"
_SDPA = "pytorch, aten/src/ATen/native/transformers/cuda/sdp_utils.cpp"
_METAL = "Metal's MTLCommandBufferError as macOS prints it"
_ACL = "Ascend/pytorch, AclErrorCode; CANN, rt_error_codes.h"
_NPU_QUEUE = "Ascend/pytorch, torch_npu/csrc/core/npu/NPUQueue.cpp, deviceErrorMap"

_OTHER, _MEMORY, _DEVICE, _REFUSED = ErrorKind.OTHER, ErrorKind.MEMORY, ErrorKind.DEVICE, ErrorKind.REFUSED

MESSAGES = (
    # Neither this device nor its kernels: settings, other processes, other cards.
    Message(_OTHER, r"busy or unavailable", "CUDA error: CUDA-capable device(s) is/are busy or unavailable",
            "cuda", _RUNTIME),
    Message(_OTHER, r"set an environment variable.*CUBLAS_WORKSPACE_CONFIG",
            "this operation is not deterministic because it uses CuBLAS and you have CUDA >= 10.2. To enable"
            " deterministic behavior in this case, you must set an environment variable before running your PyTorch"
            " application: CUBLAS_WORKSPACE_CONFIG=:4096:8", "cuda", "pytorch, aten/src/ATen/Context.cpp"),
    Message(_OTHER, r"ErrorInnocentVictim",
            "Discarded (victim of GPU error/recovery) (00000005:kIOGPUCommandBufferCallbackErrorInnocentVictim)",
            "mps", _METAL),
    Message(_OTHER, r"FORCE STOP|HCCS LINK ERROR|SUSPECT REMOTE ERROR|HCCL OP RETRY FAILED", "HCCS LINK ERROR",
            "npu", _NPU_QUEUE),
    # Memory.
    Message(_MEMORY, r"out of memory",
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB",
            "cuda rocm mps xpu npu", "the allocators: CUDACachingAllocator.cpp, MPSAllocator.mm and their like"),
    Message(_MEMORY, r"Not enough memory left",
            "Validation Error\n\nCaused by:\n  In wgpuDeviceCreateBuffer\n    Not enough memory left.",
            "webgpu", "wgpu-native 29.0.1, seen under a limit of address space"),
    Message(_MEMORY, r"not enough memory|can't allocate memory",
            "[enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate memory",
            "cpu", "pytorch, c10/core/impl/alloc_cpu.cpp"),
    Message(_MEMORY, r"STATUS_ALLOC_FAILED",
            "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "cuda rocm", _BLAS),
    Message(_MEMORY, r"UR_RESULT_ERROR_OUT_OF_(DEVICE|HOST)_MEMORY",
            "level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)",
            "xpu", "oneAPI Unified Runtime, ur_result_t"),
    Message(_MEMORY, r"CallbackErrorOutOfMemory",
            "Insufficient Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)", "mps", _METAL),
    # The device failed.
    Message(_DEVICE, r"uncorrectable (ECC|NVLink) error", "CUDA error: uncorrectable ECC error encountered",
            "cuda rocm", _RUNTIME),
    Message(_DEVICE, r"illegal memory access", "CUDA error: an illegal memory access was encountered",
            "cuda rocm", _RUNTIME),
    Message(_DEVICE, r"unspecified launch failure", "HIP error: unspecified launch failure", "cuda rocm", _RUNTIME),
    Message(_DEVICE, r"illegal instruction was encountered", "CUDA error: an illegal instruction was encountered",
            "cuda", _RUNTIME),
    Message(_DEVICE, r"hardware stack error|invalid program counter|error: misaligned address",
            "CUDA error: misaligned address", "cuda", _RUNTIME),
    Message(_DEVICE, r"not supported on global/shared address space",
            "CUDA error: operation not supported on global/shared address space", "cuda", _RUNTIME),
    Message(_DEVICE, r"device-side assert triggered", "CUDA error: device-side assert triggered",
            "cuda rocm", _RUNTIME),
    Message(_DEVICE, r"over nvlink or a hardware error",
            "CUDA error: Invalid access of peer GPU memory over nvlink or a hardware error", "cuda", _RUNTIME),
    Message(_DEVICE, r"(BLAS|BLASLT|DNN)_STATUS_EXECUTION_FAILED",
            "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx( handle, opa, opb, m, n, k)`",
            "cuda rocm", f"{_BLAS}; {_DNN}"),
    Message(_DEVICE, r"HSA_STATUS_ERROR_(EXCEPTION|MEMORY_FAULT|MEMORY_APERTURE_VIOLATION|ILLEGAL_INSTRUCTION)",
            "Callback: Queue 0x7f78cb400000 aborting with error : HSA_STATUS_ERROR_EXCEPTION: An HSAIL operation"
            " resulted in a hardware exception. code: 0x1016", "rocm", "ROCm/ROCR-Runtime, hsa.cpp"),
    Message(_DEVICE, r"Memory access fault by GPU",
            "Memory access fault by GPU node-1 (Agent handle: 0x5581) on address 0x7f00. Reason: Unknown.",
            "rocm", "ROCm/ROCR-Runtime, runtime.cpp"),
    Message(_DEVICE, r"UR_RESULT_ERROR_DEVICE_LOST",
            "level_zero backend failed with error: 20 (UR_RESULT_ERROR_DEVICE_LOST)",
            "xpu", "oneAPI Unified Runtime, ur_result_t"),
    Message(_DEVICE, r"CallbackError(Hang|PageFault)|command buffer exited with error status",
            "Caused GPU Hang Error (00000003:kIOGPUCommandBufferCallbackErrorHang)", "mps", _METAL),
    Message(_DEVICE, r"device is lost",
            "Validation Error\n\nCaused by:\n  In wgpuDeviceCreateBuffer\n    Parent device is lost",
            "webgpu", "wgpu-native 29.0.1, seen after GPUDevice.destroy()"),
    Message(_DEVICE, r"\bUCE ERROR|HBM MULTI BIT ECC ERROR|SUSPECT MEM ERROR", "HBM MULTI BIT ECC ERROR",
            "npu", _NPU_QUEUE),
    Message(_DEVICE, r"error code is 5070(13|15|16|35|53|54|55)|(aicore|vector core) execution is abnormal",
            "NPU function error: call aclnnMatmul failed, error code is 507015\n[Error]: The aicore execution is"
            " abnormal.", "npu", _ACL),
    # This kernel does not take this problem.
    Message(_REFUSED, r"No available kernel", "No available kernel. Aborting execution.", "cuda rocm xpu", _SDPA),
    Message(_REFUSED, r"No viable backend", "No viable backend for scaled_dot_product_attention was found.",
            "cpu mps", "pytorch, aten/src/ATen/native/transformers/attention.cpp"),
    Message(_REFUSED, r"does not have a deterministic implementation",
            "cumsum_cuda_kernel does not have a deterministic implementation, but you set"
            " 'torch.use_deterministic_algorithms(True)'.", "cuda rocm xpu", "pytorch, aten/src/ATen/Context.cpp"),
    Message(_REFUSED, r"(BLAS|BLASLT|DNN)_STATUS_(NOT_SUPPORTED|ARCH_MISMATCH|INVALID_VALUE|BAD_PARAM)",
            "CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasLtMatmulAlgoGetHeuristic(ltHandle)`",
            "cuda rocm", f"{_BLAS}; {_DNN}"),
    Message(_REFUSED, r"No (valid )?(execution plans|engine configs)",
            "cuDNN Frontend error: [cudnn_frontend] Error: No valid execution plans built.",
            "cuda", "NVIDIA/cudnn-frontend, plans.h"),
    Message(_REFUSED, r"could not find valid hipblaslt solution", "could not find valid hipblaslt solution", "rocm",
            "pytorch, aten/src/ATen/cuda/CUDABlas.cpp, scaled_gemm"),
    Message(_REFUSED, UNBUILT,
            "CUDA error: no kernel image is available for execution on the device", "cuda rocm", _RUNTIME),
    Message(_REFUSED, r"kernel image is invalid|unsupported toolchain",
            "Triton Error [CUDA]: device kernel image is invalid", "cuda",
            f"{_RUNTIME}; triton issue 3001: a driver older than Triton's assembler"),
    Message(_REFUSED, r"not compiled (for|with)", "_int_mm_out_cuda not compiled for this platform.",
            "cuda rocm", "pytorch, aten/src/ATen/native/cuda/Blas.cpp, _int_mm_out_cuda"),
    Message(_REFUSED, r"^out of resource: ",
            "out of resource: shared memory, Required: 262144, Hardware limit: 101376. Reducing block sizes or"
            " `num_stages` may help.", "cuda rocm", "triton, runtime/errors.py, OutOfResources"),
    Message(_REFUSED, r"PTXAS error|PassManager::run failed",
            "PTXAS error: Internal Triton PTX codegen error\n`ptxas` stderr:\nptxas fatal   : Value 'sm_103a' is not"
            " defined for option 'gpu-name'", "cuda", "triton, runtime/errors.py, PTXASError; python/src/ir.cc"),
    Message(_REFUSED, r"Cannot convert ScalarType", "Cannot convert ScalarType Float8_e4m3fnuz to cudaDataType.",
            "cuda rocm", "pytorch, aten/src/ATen/cuda/CUDADataType.h"),
    Message(_REFUSED, r"could not create a primitive", "could not create a primitive descriptor for the matmul"
            " primitive", "xpu cpu", "oneDNN, status unimplemented"),
    Message(_REFUSED, r"UR_RESULT_ERROR_UNSUPPORTED",
            "level_zero backend failed with error: 4 (UR_RESULT_ERROR_UNSUPPORTED_FEATURE)",
            "xpu", "oneAPI Unified Runtime, ur_result_t"),
    Message(_REFUSED, r"does(n't| not) (have )?support",
            "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64.",
            "mps", "pytorch, aten/src/ATen/mps/EmptyTensor.cpp"),
    Message(_REFUSED, r"feature not supported|not (yet |currently )?(implemented|supported)",
            "\"addmm_impl_cpu_\" not implemented for 'Float8_e4m3fn'",
            "cpu cuda rocm mps xpu npu", "pytorch, aten/src/ATen/Dispatch.h; torch_npu, NPUException.cpp"),
    Message(_REFUSED, r"only (supported|available)",
            "torch._scaled_mm is only supported on CUDA devices with compute capability >= 9.0 or 8.9, or ROCm MI300+",
            "cuda rocm", "pytorch, aten/src/ATen/native/cuda/ScaledBlas.cpp"),
    Message(_REFUSED, r"unsupported (data ?|scalar ?)?type|Undefined type", "Undefined type BFloat16",
            "mps", "pytorch, aten/src/ATen/native/mps/OperationUtils.mm"),
    Message(_REFUSED, r"\b(must|should|needs? to|expected?|requires?) .*(dtype|dimension|divisible|multiple|matrix"
            r"|shape|size|stride|contiguous|greater|[23]D|col_major|same|match)",
            "self.size(0) needs to be greater than 16, but got 16",
            "cpu cuda rocm mps xpu npu", "pytorch's argument checks, which come before any launch; here: Blas.cpp"),
    Message(_REFUSED, r"unexpected keyword argument|invalid combination of arguments",
            "mm() got an unexpected keyword argument 'out_dtype'",
            "cpu cuda rocm mps xpu npu", "Python: a torch older than the argument"),
    Message(_REFUSED, r"(module|type object) '.*' has no attribute",
            "module 'torch' has no attribute 'float8_e4m3fnuz'",
            "cpu cuda rocm mps xpu npu", "Python: a torch older than the function"),
)  # fmt: skip
"""The messages, in the order of precedence."""


def meaning(text: str) -> Message | None:
    """Return the first message of the table that a text contains."""
    return next((m for m in MESSAGES if re.search(m.pattern, text, re.IGNORECASE)), None)


def kind_of(error: BaseException) -> ErrorKind:
    """Return what an exception means, by its type where that says it, otherwise by its text."""
    if isinstance(error, MemoryError) or any(c.__name__ == "OutOfMemoryError" for c in type(error).__mro__):
        return ErrorKind.MEMORY
    if isinstance(error, NotImplementedError):
        return ErrorKind.REFUSED
    found = meaning(str(error))
    return found.kind if found else ErrorKind.OTHER


def is_unbuilt(error: BaseException) -> bool:
    """Return whether a library that was built for other devices has no kernel for this one."""
    found = meaning(str(error)) if isinstance(error, RuntimeError) else None
    return found is not None and found.pattern == UNBUILT


def is_refusal(error: BaseException) -> bool:
    """Return whether a kernel does not take a problem, rather than failed on it: only the former may be skipped."""
    return kind_of(error) is ErrorKind.REFUSED
