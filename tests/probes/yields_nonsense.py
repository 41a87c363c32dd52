"""Yields what is no fact."""

from canaryd.probe import ProbeSpec, Reading

SPEC = ProbeSpec(name="yields_nonsense", summary="Yields what is no fact", numeric=False)


def run(ctx):
    yield {
        "dict": {"name": "x"},
        "none": None,
        "class": Reading,
        "nan": Reading(name="ratio", value=float("nan")),
        "object": Reading(name="ratio", value=object()),
        "missing": Reading(name=None, value=1),
    }[ctx.settings["what"]]
