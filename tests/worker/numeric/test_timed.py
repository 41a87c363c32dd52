"""What a device's speed is measured by: its own clock, while it is busy."""

from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from canaryd.model import Device
from canaryd.worker.numeric import tensors
from canaryd.worker.numeric.tensors import timed

GPU = Device(uuid="GPU-1", backend="cuda", index=0, torch_index=0, model="H100")
CLOCK = 2e9
"""Cycles of the stand-in in a second."""


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
    """Of two equal GPUs one may hang on the other processor: both must tell the same time, or one is called slow.

    No memory is asked for and nothing is written: the cache is a server's.
    """
    queue = Queue()
    cuda = SimpleNamespace(_sleep=lambda cycles: queue.take(launch, cycles / CLOCK), device=nullcontext)
    monkeypatch.setattr(tensors, "torch", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(tensors, "torch_device", lambda device: device)
    monkeypatch.setattr(tensors, "event", lambda _: queue.free)
    monkeypatch.setattr(tensors, "seconds_between", lambda start, end: end - start)
    found, seconds = timed(GPU, lambda: queue.take(launch, 7e-6), pytest.fail)
    assert found is None
    assert seconds == pytest.approx(7e-6)
