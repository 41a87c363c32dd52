"""The worker that found only a processor goes on to test it; every other series gets a worker of its own."""

from __future__ import annotations

import pytest

from canaryd.config.settings import Config, ProbesConfig, ProbeSettings
from canaryd.engine import check
from canaryd.engine.engine import Engine
from canaryd.engine.host import Options
from canaryd.model import Device, Outcome
from canaryd.store.store import Store
from canaryd.supervisor.series import Series
from tests.command import BUILTIN

CPU = Device(uuid="CPU-1", backend="cpu", index=0, model="EPYC", torch_index=0)
JAX = Device(uuid="JAX-1", backend="jax-cpu", index=0, model="EPYC", card=CPU.uuid)
GPU = Device(uuid="GPU-1", backend="cuda", index=0, model="H100", torch_index=0)


@pytest.fixture
def engine(tmp_path):
    engine = Engine(Config(state_dir=tmp_path), Store.open(tmp_path))
    yield engine
    engine.stop()


@pytest.mark.parametrize(
    ("device", "instruction_set", "same"),
    [(CPU, "native", True), (CPU, "avx2", False), (GPU, "", False), (JAX, "", False)],
)
def test_only_tests_of_the_processor_as_it_is_take_over(engine, device, instruction_set, same):
    """Another instruction set needs another environment; other workers see one device, or none but the processor."""
    asked = engine.workers.start()
    engine.workers.keep(asked)
    assert engine.holds
    series = engine.workers.start(instruction_set, device=device)
    assert (series is asked) is same
    assert engine.workers.start(instruction_set, device=device) is not asked
    engine.workers.end_spare()
    for one in list(engine.workers._series):
        engine.workers.end(one)
    assert not engine.holds


def test_what_is_kept_ends_when_nothing_took_it_over(engine):
    """A second one takes the place of the first; a stop kills it as any other."""
    first, second = engine.workers.start(), engine.workers.start()
    engine.workers.keep(first)
    engine.workers.keep(second)
    assert list(engine.workers._series) == [second]
    engine.stop("over")
    assert second.stopped
    engine.workers.end_spare()
    assert not engine.holds


def test_a_search_that_fails_leaves_no_worker(engine, monkeypatch):
    """A daemon searches every hour, and what stays for ever holds the devices."""
    monkeypatch.setattr(Series, "describe", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.discover(keep=True)
    assert not engine.holds


@pytest.mark.torch
@pytest.mark.parametrize("keep", [True, False])
def test_a_check_of_a_processor_alone_imports_torch_once(tmp_path, keep):
    """The process that described tests too, and none is left after the check."""
    probes = ProbesConfig(each={n: ProbeSettings(enabled=False) for n in BUILTIN if n != "exact_integer"})
    engine = Engine(Config(state_dir=tmp_path / "state", probes=probes), Store.open(tmp_path / "state"))
    engine.discover(keep=keep)
    before = set(engine.workers._series)
    assert [series.workers_started for series in before] == [1] * keep
    started = []
    start = engine.workers.start
    engine.workers.start = lambda *a, **k: started.append(start(*a, **k)) or started[-1]
    device = next(d for d in engine.devices.values() if d.backend == "cpu")
    result = check.run(engine, Options(level="quick", seed=7), [device], print)
    assert [run.outcome for run in result.runs[device.uuid]] == [Outcome.COMPLETED]
    tested = [series for series in started if series.workers_started and series._slot.instruction_set == "native"]
    assert len(tested) == 1
    assert (set(tested) == before) is keep
    assert tested[0].workers_started == 1
    assert not engine.holds
