"""Tells what it was given and where it runs."""

import os
import sys

from canaryd.probe import ProbeSpec, Reading

SPEC = ProbeSpec(name="echoes", summary="Returns its context", numeric=False)
NAMES = (
    "CUBLAS_WORKSPACE_CONFIG",
    "NVIDIA_TF32_OVERRIDE",
    "ATEN_CPU_CAPABILITY",
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
)


def run(ctx):
    yield Reading(name="pid", value=os.getpid())
    yield Reading(name="seed", value=ctx.seed)
    yield Reading(name="budget", value=ctx.budget, unit="seconds")
    yield Reading(name="cases", value=",".join(ctx.cases))
    yield Reading(name="drill", value=ctx.drill)
    yield Reading(name="level", value=ctx.level)
    yield Reading(name="device", value=ctx.device.uuid)
    yield Reading(name="settings", value=repr(dict(ctx.settings)))
    yield Reading(name="executable", value=sys.executable)
    yield Reading(name="file", value=__file__)
    yield Reading(name="stdin", value=sys.stdin.read())
    yield Reading(name="path", value=os.pathsep.join(sys.path))
    for name in (*NAMES, *ctx.settings.get("names", ())):
        yield Reading(name=name, value=os.environ.get(name, "unset"))
