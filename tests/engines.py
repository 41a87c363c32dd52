"""Real engines that watch an endpoint."""

from __future__ import annotations

from pathlib import Path

from canaryd.config import load
from canaryd.engine import schedule
from canaryd.engine.engine import Engine
from canaryd.model import Finding, Run
from canaryd.store.store import Store

NAMED = "endpoint:main"


def start(config: Path) -> Engine:
    """Return an engine on a configuration, with its devices."""
    loaded = load.load(config)
    engine = Engine(loaded, Store.open(loaded.state_dir))
    engine.discover()
    return engine


def ask(engine: Engine, uuid: str = NAMED, seed: int = 7) -> list[Run]:
    """Run a round at level quick on a device, with all that it calls for."""
    device, entries = engine.devices[uuid], list(engine.entries.values())
    plans = schedule.plan_round(device, entries, levels=engine.levels("quick"), seed=seed, sets=("",))
    return [run for plan in plans for run in engine.carry_out(plan)]


def cpu(engine: Engine) -> str:
    """Return the uuid of the host's processor."""
    return next(u for u, d in engine.devices.items() if d.backend == "cpu")


def rules(engine: Engine, uuid: str = NAMED) -> dict[str, Finding]:
    """Return what is found of a device, by rule."""
    return {f.rule: f for f in engine.verdict(uuid).findings}
