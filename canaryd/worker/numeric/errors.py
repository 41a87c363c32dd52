"""The classification of a backend's exceptions: refused, failed on the device, out of memory, or something else.

`MESSAGES` is the table of the messages of CUDA, ROCm, MPS, XPU, NPU and torch itself. An error without such a message
is `OTHER`: a broken device raises unforeseen errors, and these must not be taken for a missing kernel.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from enum import Enum


class ErrorKind(str, Enum):
    """The kinds of errors that a computation on a device can raise."""

    OTHER = "other"
    """Settings, other users of the device, links to other devices, and unforeseen errors."""
    MEMORY = "memory"
    """Memory ran out, on the device or on the host."""
    DEVICE = "device"
    """The device failed while it computed: uncorrectable ECC, illegal address, launch failure."""
    REFUSED = "refused"
    """The kernel does not support the problem, which says nothing about the device's health."""


UNBUILT = r"no kernel image is available|error: invalid device function"
"""Regular expression for errors of a library that was built for other devices."""
MESSAGES: Mapping[ErrorKind, tuple[str, ...]] = {
    ErrorKind.OTHER: (
        r"busy or unavailable",  # cudaGetErrorString of libcudart 12.1 and 13.0
        r"set an environment variable.*CUBLAS_WORKSPACE_CONFIG",  # pytorch, aten/src/ATen/Context.cpp
        r"ErrorInnocentVictim",  # Metal's MTLCommandBufferError as macOS prints it
        # Ascend/pytorch, torch_npu/csrc/core/npu/NPUQueue.cpp, deviceErrorMap
        r"FORCE STOP|HCCS LINK ERROR|SUSPECT REMOTE ERROR|HCCL OP RETRY FAILED",
    ),
    ErrorKind.MEMORY: (
        r"out of memory",  # the allocators: CUDACachingAllocator.cpp, MPSAllocator.mm and their like
        r"Not enough memory left",  # wgpu-native 29.0.1, seen under a limit of address space
        r"not enough memory|can't allocate memory",  # pytorch, c10/core/impl/alloc_cpu.cpp
        r"STATUS_ALLOC_FAILED",  # cuBLAS documentation, cublasStatus_t; hipBLAS likewise
        r"UR_RESULT_ERROR_OUT_OF_(DEVICE|HOST)_MEMORY",  # oneAPI Unified Runtime, ur_result_t
        r"CallbackErrorOutOfMemory",  # Metal's MTLCommandBufferError
    ),
    ErrorKind.DEVICE: (
        # cudaGetErrorString of libcudart 12.1 and 13.0; ROCm/clr, hipamd/src/hip_error.cpp
        r"uncorrectable (ECC|NVLink) error|illegal memory access|unspecified launch failure",
        r"illegal instruction was encountered|hardware stack error|invalid program counter|error: misaligned address",
        r"not supported on global/shared address space|device-side assert triggered|over nvlink or a hardware error",
        # pytorch, aten/src/ATen/cuda/Exceptions.cpp; cuBLAS and cuDNN documentation; hipBLAS likewise
        r"(BLAS|BLASLT|DNN)_STATUS_EXECUTION_FAILED",
        # ROCm/ROCR-Runtime, hsa.cpp and runtime.cpp
        r"HSA_STATUS_ERROR_(EXCEPTION|MEMORY_FAULT|MEMORY_APERTURE_VIOLATION|ILLEGAL_INSTRUCTION)",
        r"Memory access fault by GPU",
        r"UR_RESULT_ERROR_DEVICE_LOST",  # oneAPI Unified Runtime, ur_result_t
        # Metal's MTLCommandBufferError
        r"CallbackError(Hang|PageFault)|command buffer exited with error status",
        r"device is lost",  # wgpu-native 29.0.1, seen after GPUDevice.destroy()
        # Ascend/pytorch, NPUQueue.cpp and AclErrorCode; CANN, rt_error_codes.h
        r"\bUCE ERROR|HBM MULTI BIT ECC ERROR|SUSPECT MEM ERROR",
        r"error code is 5070(13|15|16|35|53|54|55)|(aicore|vector core) execution is abnormal",
    ),
    ErrorKind.REFUSED: (
        # pytorch, aten/src/ATen/native/transformers: cuda/sdp_utils.cpp, attention.cpp; Context.cpp
        r"No available kernel|No viable backend|does not have a deterministic implementation",
        # cuBLAS and cuDNN documentation; NVIDIA/cudnn-frontend, plans.h; pytorch, CUDABlas.cpp, scaled_gemm
        r"(BLAS|BLASLT|DNN)_STATUS_(NOT_SUPPORTED|ARCH_MISMATCH|INVALID_VALUE|BAD_PARAM)",
        r"No (valid )?(execution plans|engine configs)|could not find valid hipblaslt solution",
        UNBUILT,
        r"kernel image is invalid|unsupported toolchain",  # a driver older than Triton's assembler (triton issue 3001)
        r"not compiled (for|with)",  # pytorch, aten/src/ATen/native/cuda/Blas.cpp, _int_mm_out_cuda
        # triton, runtime/errors.py, OutOfResources and PTXASError; python/src/ir.cc
        r"^out of resource: |PTXAS error|PassManager::run failed",
        r"Cannot convert ScalarType",  # pytorch, aten/src/ATen/cuda/CUDADataType.h
        r"could not create a primitive|UR_RESULT_ERROR_UNSUPPORTED",  # oneDNN, unimplemented; oneAPI, ur_result_t
        # pytorch, aten/src/ATen: mps/EmptyTensor.cpp, Dispatch.h, native/cuda/ScaledBlas.cpp; torch_npu
        r"does(n't| not) (have )?support|feature not supported|not (yet |currently )?(implemented|supported)",
        r"only (supports|supported|available)|only .* types are supported",
        r"unsupported (data ?|scalar ?)?type|Undefined type",
        # pytorch's argument checks, which come before any launch
        r"\b(must|should|needs? to|expected?|requires?) .*(dtype|dimension|divisible|multiple|matrix|shape)",
        r"\b(must|should|needs? to|expected?|requires?) .*(size|stride|contiguous|greater|[23]D|col_major|same|match)",
        # Python: a torch older than the argument or the function
        r"unexpected keyword argument|invalid combination of arguments|(module|type object) '.*' has no attribute",
    ),
}
"""Kind of error → regular expressions that are searched in a message, in upper or lower case. If several kinds match,
the first in this table is taken."""


def kind_of(error: BaseException) -> ErrorKind:
    """Return the kind of an error, from its type if that is enough, otherwise from its text."""
    if isinstance(error, MemoryError) or any(c.__name__ == "OutOfMemoryError" for c in type(error).__mro__):
        return ErrorKind.MEMORY
    if isinstance(error, NotImplementedError):
        return ErrorKind.REFUSED
    found = (kind for kind, patterns in MESSAGES.items() if any(map(_within(str(error)), patterns)))
    return next(found, ErrorKind.OTHER)


def _within(text: str) -> Callable[[str], object]:
    return lambda pattern: re.search(pattern, text, re.IGNORECASE)


def is_unbuilt(error: BaseException) -> bool:
    """Return whether the error comes from a library that was built for other devices and has no kernel for this one."""
    is_one = isinstance(error, RuntimeError) and kind_of(error) is ErrorKind.REFUSED
    return is_one and bool(_within(str(error))(UNBUILT))


def is_refusal(error: BaseException) -> bool:
    """Return whether an error says that a kernel does not support a problem; only then can the case be skipped."""
    return kind_of(error) is ErrorKind.REFUSED
