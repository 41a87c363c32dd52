"""Does not apply here."""

from canaryd.probe import ProbeSpec, Skip

SPEC = ProbeSpec(name="skips", summary="Never applies", numeric=False)


def run(ctx):
    raise Skip("no tensor cores here")
    yield
