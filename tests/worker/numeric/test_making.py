"""What the host makes for an accelerator, it makes while the device computes."""

import itertools
import threading
import time

import pytest

from canaryd.facts import Comparison, Doubt, Skipped, Subject
from canaryd.model import Device
from canaryd.probe import Context

torch = pytest.importorskip("torch", reason="the numeric worker is tested where torch is installed")
pytestmark = pytest.mark.torch

from canaryd.worker.numeric import operands  # noqa: E402
from canaryd.worker.numeric.cases import Case  # noqa: E402
from canaryd.worker.numeric.operands import Product  # noqa: E402
from canaryd.worker.numeric.stack import cpu  # noqa: E402
from canaryd.worker.numeric.tensors import FORMATS, flat_bits  # noqa: E402
from canaryd.worker.numeric.verify import verify_all  # noqa: E402
from canaryd.worker.runtime.torch import Torch  # noqa: E402

NAMES = [f"float32/dense/square/{layout}@24x20x64" for layout in ("nn", "nt", "tn")]
SPEC = Product("dense", FORMATS["float32"], FORMATS["float32"], 24, 24, 20, 64)
LONG = 20.0
"""Seconds until a thread gives the other one up."""


@pytest.fixture
def accelerator(monkeypatch):
    """Take the processor for a device with a processor of its own beside it, and memory of its own."""
    monkeypatch.setattr(Device, "unit", "gpu")
    monkeypatch.setattr(Torch, "download", lambda _, array: array.clone())


def run(compute=torch.matmul, build=operands.build):
    cases = [Case(name, lambda seed: build(SPEC, seed), lambda pair, _: compute(*pair)) for name in NAMES]
    return list(verify_all(Context(device=cpu(), level="quick", seed=6, budget=0.3), cases, [], None))


def compared(facts):
    return [(c.case, c.seed, c.wrong) for c in facts if isinstance(c, Comparison) and c.subject is Subject.DEVICE]


@pytest.mark.usefixtures("accelerator")
def test_the_next_case_is_made_while_the_device_computes():
    """The device computes the first case until the second is made: one after the other, that would never be."""
    seeds, second = set(), threading.Event()

    def build(spec, seed):
        seeds.add(seed)
        if len(seeds) == 2:
            second.set()
        return operands.build(spec, seed)

    def compute(a, b):
        assert second.wait(LONG)
        return torch.matmul(a, b)

    assert compared(run(compute, build)) == compared(run())


@pytest.mark.usefixtures("accelerator")
def test_a_golden_in_doubt_is_told_though_its_case_is_not_run():
    """A core that contradicts itself does so whatever the golden was for."""
    clock, seeds = [0.0], set()

    def build(spec, seed):
        problem = operands.build(spec, seed)
        seeds.add(seed)
        if len(seeds) == 2 and threading.current_thread().name.startswith("ThreadPoolExecutor"):
            flat_bits(problem.golden)[next(flips) % 7] ^= 1
        return problem

    def compute(a, b):
        clock[0] += 1.0  # the budget is spent in the first case
        return torch.matmul(a, b)

    flips = itertools.count(1)
    cases = [Case(name, lambda seed: build(SPEC, seed), lambda pair, _: compute(*pair)) for name in NAMES]
    context = Context(device=cpu(), level="quick", seed=6, budget=0.5, clock=lambda: clock[0])
    facts = list(verify_all(context, cases, [], None))
    assert len([f for f in facts if isinstance(f, Skipped)]) == 2
    (doubt,) = (f for f in facts if isinstance(f, Comparison) and f.subject is Subject.HOST)
    assert (doubt.wrong, doubt.doubt) == (True, Doubt.MADE_TWICE)


@pytest.mark.usefixtures("accelerator")
def test_a_run_that_fails_leaves_nothing_behind_that_still_makes():
    """The worker goes on to the next probe, which makes its own goldens on cores of its own choice."""
    making_now, seeds = threading.Event(), set()

    def build(spec, seed):
        seeds.add(seed)
        if len(seeds) == 2:
            making_now.set()
            time.sleep(0.5)
            made.append(seed)
        return operands.build(spec, seed)

    def compute(_a, _b):
        assert making_now.wait(LONG)
        raise RuntimeError("the device is lost")

    made = []
    with pytest.raises(RuntimeError, match="the device is lost"):
        run(compute, build)
    assert len(made) == 2
