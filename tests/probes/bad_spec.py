"""SPEC is not a ProbeSpec."""

SPEC = {"name": "bad_spec"}


def run(ctx):
    yield
