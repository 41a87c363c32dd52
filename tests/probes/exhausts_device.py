"""Raises what torch raises when a device's memory runs out."""

from canaryd.probe import ProbeSpec

SPEC = ProbeSpec(name="exhausts_device", summary="Device memory runs out", numeric=False)


class OutOfMemoryError(RuntimeError):
    pass


def run(ctx):
    if ctx.settings.get("plain"):
        raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)")
    raise OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
    yield
