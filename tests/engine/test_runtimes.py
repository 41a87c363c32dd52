"""Devices of other runtimes in the engine: asked for, found, said to be missing, forgotten; one card, one lock."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from canaryd.config.settings import Config, ProbesConfig, RuntimesConfig, WorkerConfig
from canaryd.daemon.rounds import Rounds
from canaryd.engine.catalogue import Entry, ProbeFile
from canaryd.engine.engine import Engine
from canaryd.model import Device
from canaryd.probe import ProbeSpec
from canaryd.store.locks import Busy
from canaryd.store.store import Store
from tests.command import bare_python

CPU = Device(uuid="CPU-1", backend="cpu", index=0, model="EPYC", torch_index=0)
MLX = Device(uuid="MLX-CPU-1", backend="mlx-cpu", index=0, model="EPYC", weak_identity=True, card=CPU.uuid)


def settings(directory: Path, **runtimes: str) -> Config:
    return Config(
        state_dir=directory,
        worker=WorkerConfig(python=bare_python(), runtimes=RuntimesConfig(**runtimes)),
        probes=ProbesConfig(directories=()),
    )


@pytest.fixture
def engine(tmp_path):
    return Engine(settings(tmp_path, mlx=bare_python()), Store.open(tmp_path))


def entry(**fields) -> Entry:
    return Entry(spec=ProbeSpec(name="p", summary="s", **fields), file=ProbeFile(name="p", path=Path("p"), source=""))


def test_what_an_interpreter_lacks_is_one_line(engine):
    """The setting, the interpreter, the package, and how to install it."""
    engine.discover()
    (line,) = [p for p in engine.problems if p.startswith("worker.runtimes.mlx: ")]
    assert f"{bare_python()} cannot import mlx" in line
    assert "pip install" in line
    assert "\n" not in line


def test_a_known_device_stays_while_its_runtime_cannot_be_asked(engine):
    """It has not vanished; its runs will say why they are skipped."""
    engine.store.see_device(MLX, 1.0)
    engine.store.set_present({MLX.uuid}, 1.0)
    engine.discover()
    assert MLX.uuid in engine.devices
    assert not [e for e in engine.watch.history.of(MLX) if e.kind == "change"]


def test_a_worker_runs_under_the_interpreter_of_its_runtime(engine):
    """Its own for MLX, that of the stack under test for torch; a container is torch's alone."""
    engine.config = replace(
        engine.config, worker=WorkerConfig(command=("false",), runtimes=RuntimesConfig(mlx=sys.executable))
    )
    for device, python, command in ((MLX, sys.executable, ()), (CPU, sys.executable, ("false",))):
        series = engine.workers.start(device=device)
        assert (series._slot.spec.python, series._slot.spec.command) == (python, command)
        engine.workers.end(series)


def test_two_runtimes_never_use_a_card_at_once(engine):
    """The lock is the card's."""
    with engine.locked(CPU, 0.0, lambda _: None), pytest.raises(Busy), engine.locked(MLX, 0.0, lambda _: None):
        pass


def test_a_round_waits_in_silence_while_its_card_is_tested_through_another_runtime(engine, caplog):
    """The other device of the card has its turn; nothing is started, nothing is logged, and the turn is kept."""
    engine.devices = {d.uuid: d for d in (CPU, MLX)}
    engine.present = set(engine.devices)
    engine.entries = {"p": entry(runtimes=("*",))}
    rounds = Rounds(engine, engine.store, lambda: None)
    rounds._at_work[CPU.uuid] = CPU.uuid
    with caplog.at_level("INFO"):
        rounds.tick(MLX.uuid)
    assert caplog.text == ""
    assert not rounds._last
    assert rounds._at_work == {CPU.uuid: CPU.uuid}
