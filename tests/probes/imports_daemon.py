"""Tries to import what belongs to the daemon, or to its environment."""

import importlib

from canaryd.probe import ProbeSpec, Reading

SPEC = ProbeSpec(name="imports_daemon", summary="Reaches for the daemon's modules", numeric=False)


def run(ctx):
    for name in (
        "canaryd.supervisor.series",
        "canaryd.engine.catalogue",
        "canaryd.store.store",
        "canaryd.cli.main",
        "yaml",
        "canaryd.worker.runner",
    ):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            yield Reading(name=name, value=str(error))
        else:
            yield Reading(name=name, value="imported")
