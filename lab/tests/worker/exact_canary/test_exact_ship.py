"""The exact canaries that the core ships, against what the lab makes of the same seeds."""

import json

import pytest

from tests.command import ROOT

torch = pytest.importorskip("torch", reason="the numeric worker is tested where torch is installed")
pytestmark = pytest.mark.torch

from canaryd_lab.worker.exact_canary import ship  # noqa: E402
from canaryd_lab.worker.exact_canary.prove import Walk  # noqa: E402
from canaryd_lab.worker.safetensors import read_safetensors  # noqa: E402

from canaryd.worker.exact_canary.cases import text  # noqa: E402
from canaryd.worker.exact_canary.shape import EXPERTS, TINY  # noqa: E402
from canaryd.worker.exact_canary.shipped import UNUSED, load, logits  # noqa: E402
from canaryd.worker.numeric.operands import Inexact  # noqa: E402
from canaryd.worker.numeric.tensors import same_bits  # noqa: E402

MODELS = ROOT / "probes" / "exact_models"


@pytest.mark.parametrize(("shape", "anchored"), [(TINY, True), (TINY, False), (EXPERTS, True)])
def test_the_lab_makes_what_ships(shape, anchored):
    """Weights, prompts and digests, bit for bit."""
    shipped = load(MODELS, shape, 0, anchored=anchored)
    tensors, texts = read_safetensors(ship.made(shape, shipped.model.seed, anchored=anchored, prompts=1))
    tensors.pop(UNUSED)
    assert tensors.keys() == shipped.model.weights.keys()
    assert all(same_bits(tensor, shipped.model.weights[name]) for name, tensor in tensors.items())
    assert [tuple(prompt) for prompt in json.loads(texts["prompts"])] == list(shipped.prompts[:1])


@pytest.mark.parametrize(("shape", "anchored"), [(TINY, True), (TINY, False), (EXPERTS, True)])
def test_the_program_gives_the_proved_logits(shape, anchored):
    """Of every position and word, computed without a weight; for a prompt that does not ship too."""
    shipped = load(MODELS, shape, 1, anchored=anchored)
    steps = shipped.model.program.steps
    for seed in (shipped.prompts[-1][0], 12345):
        words = text(shipped.model, seed, 0, steps)
        assert torch.equal(logits(shipped, words, steps), Walk(shape, shipped.model.weights).prove(words).logits)


def test_a_model_that_the_program_does_not_describe_is_not_written(monkeypatch):
    """Where the core would expect another logit than was proved, nothing is shipped."""
    right = ship.logits
    monkeypatch.setattr(ship, "logits", lambda *given: right(*given) + 8.0)
    with pytest.raises(Inexact, match="prompt 1 of model 1: the program and the proof disagree"):
        ship.made(TINY, 1, anchored=True, prompts=1)
