"""Allocates until the address space that it was given is full; with `limit` false, until the worker's own limit."""

import resource

from canaryd.probe import ProbeSpec

SPEC = ProbeSpec(name="exhausts_memory", summary="Host memory runs out", numeric=False)


def run(ctx):
    if ctx.settings.get("limit", True):
        resource.setrlimit(resource.RLIMIT_AS, (512 << 20, resource.getrlimit(resource.RLIMIT_AS)[1]))
    kept = []
    while True:
        kept.append(bytearray(8 << 20))
    yield
