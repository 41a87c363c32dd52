"""What a device's speed is measured by: its own clock, while it is busy."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from canaryd.model import Device
from canaryd.worker.numeric import sizes, tensors
from canaryd.worker.numeric.stack import cpu
from canaryd.worker.numeric.tensors import FORMATS, timed

GPU = Device(uuid="GPU-1", backend="cuda", index=0, torch_index=0, model="H100")
WRITES = 5e12
"""Bytes that the stand-in writes in a second."""


@dataclass
class Queue:
    """A device that works off what the host hands over, by a clock that only the test moves."""

    host: float = 0.0
    free: float = 0.0
    """When all that was handed over is done."""

    def take(self, launch: float, work: float) -> None:
        self.host += launch
        self.free = max(self.free, self.host) + work


@pytest.mark.parametrize("launch", [5e-6, 40e-6], ids=["near", "far"])
def test_how_fast_the_host_launches_does_not_count(monkeypatch, launch):
    """Of two equal GPUs one may hang on the other processor: both must tell the same time, or one is called slow."""
    queue = Queue()

    def empty(size, dtype, device):
        return SimpleNamespace(zero_=lambda: queue.take(launch, size / WRITES))

    monkeypatch.setattr(tensors, "torch", SimpleNamespace(empty=empty, uint8=None))
    monkeypatch.setattr(tensors, "torch_device", lambda device: device)
    monkeypatch.setattr(tensors, "event", lambda _: queue.free)
    monkeypatch.setattr(tensors, "seconds_between", lambda start, end: end - start)
    found, seconds = timed(GPU, lambda: queue.take(launch, 7e-6), pytest.fail)
    assert found is None
    assert seconds == pytest.approx(7e-6)


def test_without_events_the_host_waits_before_and_after():
    """What was handed over before must not count, and what was handed over must be done."""
    seen = []
    found, seconds = timed(cpu(), lambda: seen.append("call"), lambda: seen.append("wait"))
    assert (found, seen) == (None, ["wait", "call", "wait"])
    assert 0 < seconds < 1


@pytest.mark.torch
@pytest.mark.parametrize(("clocked", "side"), [(False, 192), (True, 1024)])
def test_a_speed_is_the_best_of_three_calls(monkeypatch, clocked, side):
    """The first of four loads the kernels; a device with a clock multiplies more, which that clock can resolve."""
    pytest.importorskip("torch")
    told, shapes = iter([9.0, 3e-3, 2e-3, 4e-3]), []

    def stand_in(_, call, __):
        shapes.append(tuple(call.args[0][0].shape))
        return None, next(told)

    monkeypatch.setattr(sizes, "timed", stand_in)
    monkeypatch.setattr(sizes, "has_events", lambda _: clocked)
    speed = sizes.measure_speed(cpu(), pytest.fail, FORMATS["float32"], FORMATS["float32"])
    assert speed == 2 * side**3 / 2e-3
    assert shapes == [(side, side)] * 4
