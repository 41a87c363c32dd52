"""The fingerprint of recorded kernels: one number for the bits of all cases, or the reason why there is none."""

import dataclasses

import pytest

from canaryd.facts import Reading, Recording
from canaryd.probe import Absent, Context
from canaryd.worker.numeric import recording, serving_kernels, tensors
from canaryd.worker.numeric.stack import cpu

torch = pytest.importorskip("torch", reason="the numeric worker is tested where torch is installed")
pytestmark = pytest.mark.torch

FEW = ("gemm/float32/decode1", "softmax/bfloat16", "exp/float16", "sdpa/cudnn/float32")
"""Kinds of every sort, the last of them refused by every CPU."""


@pytest.fixture
def probe(maker, monkeypatch):
    """The probe with a few cases: which ones a device has is not what these tests are about."""
    module = maker.load("recorded_kernels")

    def few(device):
        return [k for k in serving_kernels.every_kernel(device) if k.name.startswith(FEW)]

    monkeypatch.setattr(module, "every_kernel", few)
    return module


def ran(probe, *cases, seed=3, budget=60.0, **more):
    ctx = Context(device=cpu(), level=more.pop("level", "quick"), seed=seed, budget=budget, cases=cases, **more)
    facts = list(probe.run(ctx))
    (found,) = [f for f in facts if isinstance(f, (Reading, Absent)) and f.name == "golden_fingerprint"]
    return found, [f for f in facts if isinstance(f, Recording)]


def test_equal_bits_give_equal_fingerprints(probe):
    """Whatever the order, the level and the number of rounds; cases that the device refuses do not hinder it."""
    found = {
        ran(probe, seed=seed, level=level)[0].value for seed, level in ((1, "quick"), (2, "quick"), (3, "standard"))
    }
    assert len(found) == 1
    assert 0 <= found.pop() < 2**53


def test_one_bit_of_one_case_changes_it(probe):
    """A result that is wrong each time shows in the value; it does not take it away."""
    clean, recorded = ran(probe)
    right = recording.fingerprint

    def struck(*tensors):
        digest = right(*tensors)
        return f"{int(digest, 16) ^ 1:016x}" if digest == recorded[0].digest else digest

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recording, "fingerprint", struck)
        wrong, _ = ran(probe)
    assert isinstance(wrong, Reading)
    assert wrong.value != clean.value
    assert ran(probe)[0].value == clean.value


def test_a_case_that_varies_takes_it_away(probe, monkeypatch):
    """Random bits of one healthy case must not look like another device's."""
    before = probe.every_kernel

    def varying(device):
        first, *others = before(device)
        noisy = dataclasses.replace(first, compute=lambda *x: first.compute(*x) * (1 + torch.rand(()) * 1e-6))
        return [noisy, *others]

    monkeypatch.setattr(probe, "every_kernel", varying)
    found, recorded = ran(probe, level="standard")
    assert isinstance(found, Absent)
    assert found.reason.startswith("bits vary: gemm/float32/decode1@")
    assert len({r.case for r in recorded}) < len(recorded)


@pytest.mark.skipif(len(tensors.visible_cores()) < 2, reason="needs two cores to choose from")
def test_a_case_is_computed_on_another_core_in_each_round(probe, monkeypatch):
    """So that a core that is wrong meets each case in turn."""
    before, cores = probe.every_kernel, []

    def noting(device):
        first, *others = before(device)

        def compute(*operands):
            cores.append(tensors.visible_cores())
            return first.compute(*operands)

        return [dataclasses.replace(first, compute=compute), *others]

    monkeypatch.setattr(probe, "every_kernel", noting)
    ran(probe, level="standard")
    assert len({core for core in cores if len(core) == 1}) > 1
