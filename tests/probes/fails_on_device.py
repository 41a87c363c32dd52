"""Raises what torch raises when the device itself fails; with `cleaning`, another error while cleaning up after it."""

from canaryd.probe import ProbeSpec

SPEC = ProbeSpec(name="fails_on_device", summary="The device fails", numeric=False)


def run(ctx):
    try:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    finally:
        if ctx.settings.get("cleaning"):
            raise ValueError("cannot put the switches back")
    yield
