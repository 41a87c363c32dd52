"""There is nothing to run."""

from canaryd.probe import ProbeSpec

SPEC = ProbeSpec(name="no_run", summary="Has no run function")
