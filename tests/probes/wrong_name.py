"""SPEC.name is not the file's stem."""

from canaryd.probe import ProbeSpec

SPEC = ProbeSpec(name="another_name", summary="Calls itself something else", numeric=False)


def run(ctx):
    return iter(())
