"""Other ways of decoding: calls of fixed shapes, compiled ones, captured ones."""

import contextlib
import gc
import time
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest

from canaryd.worker.canary.fixed import Decoder, Slots, time_limit
from canaryd.worker.exact_canary.golden import prompt
from canaryd.worker.exact_canary.run import Runner
from canaryd.worker.exact_canary.shape import TINY, plan
from canaryd.worker.exact_canary.shipped import load
from canaryd.worker.runtime import graphs
from canaryd.worker.runtime.key_values import KeyValues

torch = pytest.importorskip("torch", reason="the numeric worker is tested where torch is installed")
pytestmark = pytest.mark.torch

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def runner():
    """The exact canary in float32."""
    model = load(ROOT / "probes" / "exact_models", TINY, 1, anchored=True).model
    return Runner(TINY, {name: weight.to(torch.float32) for name, weight in model.weights.items()})


class Graphs:
    """What `capture` asks of torch.cuda, computed at once; the streams that it made, and what ran on which."""

    def __init__(self, monkeypatch):
        self.made, self.calls = [], []
        stream = SimpleNamespace(wait_stream=lambda _: None)
        answers = {
            "device": lambda _: contextlib.nullcontext(),
            "Stream": lambda _: self.made.append(f"stream {len(self.made)}") or Stream(self.made[-1]),
            "current_stream": lambda: stream,
            "stream": lambda given: self.on("try", given),
            "graph": lambda _, stream=None: self.on("capture", stream),
            "CUDAGraph": lambda: SimpleNamespace(replay=lambda: None),
        }
        for name, answer in answers.items():
            monkeypatch.setattr(torch.cuda, name, answer)
        graphs.aside.cache_clear()

    @contextlib.contextmanager
    def on(self, what, stream):
        self.calls.append((what, stream.name))
        yield


class Stream:
    def __init__(self, name):
        self.name = name

    def wait_stream(self, _):
        pass


def test_what_is_captured_was_tried_on_the_same_stream(runner, monkeypatch):
    """Libraries make a workspace for each stream at its first call: of 32 MiB, and never within a capture."""
    seen = Graphs(monkeypatch)
    for _ in range(3):
        Decoder(runner, 1, 16, 4).capture()
    assert seen.made == ["stream 0"]
    assert seen.calls == 3 * [("try", "stream 0"), ("capture", "stream 0")]
    graphs.aside.cache_clear()


def test_a_captured_graph_goes_with_its_decoder(runner, monkeypatch):
    """Not when Python next looks for cycles: each holds memory of the device that is only its own."""
    Graphs(monkeypatch)
    decoder = Decoder(runner, 1, 16, 4)
    decoder.capture()
    left = weakref.ref(decoder)
    gc.disable()
    try:
        del decoder
        assert left() is None
    finally:
        gc.enable()
    graphs.aside.cache_clear()


def test_slots_hold_what_a_cache_holds(runner):
    """Token by token, the same keys and values at the same places, zeros behind; emptied, nothing of it is left."""
    tokens = torch.tensor([prompt(plan(TINY), seed)[:20] for seed in (1, 2)])
    cache, slots = KeyValues(*runner.cached(2, 30)), Slots(*runner.cached(2, 30))
    for part in tokens.split([16, 1, 1, 1, 1], 1):
        runner.forward(part, cache)
        runner.forward(part, slots)
    assert int(slots.at) == cache.used == 20
    for ours, theirs in zip((*slots.keys, *slots.values), (*cache.keys, *cache.values), strict=True):
        assert torch.equal(ours[:, :, :20], theirs[:, :, :20])
        assert not ours[:, :, 20:].any()
    slots.keys[0].fill_(float("nan"))
    slots.clear()
    assert not any(tensor.any() for tensor in (*slots.keys, *slots.values))


def test_what_takes_too_long_is_stopped():
    """Even where a callback swallows the first exception; what is quick is left alone."""
    with time_limit(30.0, "nothing"):
        pass
    started = time.monotonic()
    with pytest.raises(TimeoutError, match=r"a sleep took longer than 0\.2 s"), time_limit(0.2, "a sleep"):
        time.sleep(20)
    assert time.monotonic() - started < 10


def wrapping(error):
    """Do what torch's tracer does: make an error of its own of whatever is raised inside it."""
    try:
        time.sleep(5.0)
    except TimeoutError as late:
        raise error from late


def test_a_compiler_that_wraps_the_time_limit_is_still_too_late():
    """What it raises once the time is over is the time limit; an error before is its own."""
    late = pytest.raises(TimeoutError, match=r"torch.compile took longer than 0.01 s")
    with late, time_limit(0.01, "torch.compile"):
        wrapping(RuntimeError("when making fake tensor call"))
    with pytest.raises(RuntimeError, match="its own"), time_limit(60.0, "torch.compile"):
        raise RuntimeError("its own")
