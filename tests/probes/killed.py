"""Is killed by somebody else's SIGKILL."""

import os
import signal

from canaryd.probe import ProbeSpec

SPEC = ProbeSpec(name="killed", summary="SIGKILL from outside", numeric=False)


def run(ctx):
    os.kill(os.getpid(), signal.SIGKILL)
    yield
