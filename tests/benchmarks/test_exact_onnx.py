"""The exact canary as a graph of ONNX Runtime: the proved logits, bit for bit, and a flipped bit is seen."""

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch", reason="the exact canary is made with torch")
pytestmark = [pytest.mark.torch, pytest.mark.runtimes]

from canaryd_lab.worker.exact_canary.construct import construct  # noqa: E402
from canaryd_lab.worker.exact_canary.prove import Walk  # noqa: E402

from benchmarks import exact_onnx  # noqa: E402  it needs torch
from canaryd.facts import DTYPES  # noqa: E402
from canaryd.worker.exact_canary import cases  # noqa: E402
from canaryd.worker.exact_canary.shape import FAMILIES, TINY  # noqa: E402
from canaryd.worker.numeric.tensors import bits  # noqa: E402
from canaryd.worker.runtime.interface import Unsupported  # noqa: E402

STEPS = 6
"""Words that are decoded."""


@pytest.fixture(scope="module", autouse=True)
def installed():
    """Skip without the packages."""
    if reason := exact_onnx.why_not():
        pytest.skip(reason)


@pytest.mark.slow
def test_every_logit_is_the_proved_one():
    """In one pass and from the cache, in each format that the provider has, by both kernels; families take turns."""
    tried = set()
    for number, form in enumerate(DTYPES):
        model = construct(replace(TINY, family=FAMILIES[number % len(FAMILIES)]), 4)
        text = cases.text(model, 4, 0, STEPS)
        texts, prompts = torch.tensor([text]), torch.tensor([text[: len(text) - STEPS + 1]])
        weights = {name: weight.to(getattr(torch, form)) for name, weight in model.weights.items()}
        wanted = Walk(model.shape, model.weights).prove(text).logits[None].to(getattr(torch, form))
        for kernel in exact_onnx.KERNELS:
            if (form, kernel) == ("float64", "attention"):
                continue  # its own decomposition multiplies queries and keys by a root, which rounds
            try:
                runner = exact_onnx.Runner(model.shape, weights, kernel)
            except Unsupported:
                continue
            tried.add((form, kernel))
            assert torch.equal(bits(runner.forward(texts)), bits(wanted))
            assert torch.equal(bits(runner.decode(prompts, STEPS)[1]), bits(wanted[:, -STEPS:].contiguous()))
    assert tried >= {("float64", "eager"), ("float32", "eager"), ("float32", "attention"), ("float16", "attention")}


def test_a_flipped_bit_is_seen():
    """One bit of one weight changes a logit."""
    model = construct(TINY, 4)
    text = cases.text(model, 4, 0, STEPS)
    golden = Walk(model.shape, model.weights).prove(text).logits[None]
    struck = {name: weight.to(torch.float32) for name, weight in model.weights.items()}
    struck["model.layers.1.self_attn.k_proj.weight"] = flipped(struck["model.layers.1.self_attn.k_proj.weight"])
    got = exact_onnx.Runner(model.shape, struck, "eager").forward(torch.tensor([text]))
    assert not torch.equal(bits(got), bits(golden.to(torch.float32)))


def flipped(weight):
    """Return a weight with one flipped bit of the exponent, in an element that is not 0."""
    out = weight.clone()
    element = int(out.view(-1).nonzero()[5])
    bits(out).view(-1)[element] ^= 1 << 24
    return out
