"""Moves itself into the memory cgroup named by the setting "cgroup" and fills it until the kernel kills it."""

import os
from pathlib import Path

from canaryd.probe import ProbeSpec

SPEC = ProbeSpec(name="killed_for_memory", summary="The kernel kills it for memory", numeric=False)


def run(ctx):
    Path(ctx.settings["cgroup"], "cgroup.procs").write_text(str(os.getpid()))
    kept = [b"x" * (1 << 20) for _ in range(256)]
    raise RuntimeError(f"{len(kept)} MiB fitted into {ctx.settings['cgroup']}")
    yield
