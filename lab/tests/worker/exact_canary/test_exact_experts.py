"""The exact canary with a mixture of experts: construction, routing, proof, and what faults in it do."""

import json
import os
import subprocess
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from canaryd.worker.exact_canary.golden import continuation, prompt
from canaryd.worker.exact_canary.shape import EXPERTS, TINY, Unfit
from canaryd.worker.numeric.operands import Inexact

torch = pytest.importorskip("torch", reason="the numeric worker is tested where torch is installed")
pytestmark = pytest.mark.torch

from canaryd_lab.worker.exact_canary.construct import construct  # noqa: E402
from canaryd_lab.worker.exact_canary.export import export, like  # noqa: E402
from canaryd_lab.worker.exact_canary.prove import Exact, Walk, routes  # noqa: E402

from canaryd.worker.exact_canary.run import Runner  # noqa: E402
from canaryd.worker.numeric.tensors import bits, strict_switches  # noqa: E402

FORMATS = ("float64", "float32", "bfloat16", "float16")
EIGHT = replace(EXPERTS, experts=8)
ROUTER = "model.layers.1.block_sparse_moe.gate.weight"


@pytest.fixture(scope="module")
def model():
    return construct(EXPERTS, 7)


@pytest.fixture(scope="module")
def whole(model):
    """A prompt and what follows it, without the last word."""
    words = prompt(model.program, 3)
    return words + continuation(model.program, EXPERTS.layers, words, 12)[:-1]


@pytest.fixture(scope="module")
def golden(model, whole):
    return Walk(EXPERTS, model.weights).prove(whole).logits


def cast(model, form):
    return {name: weight.to(getattr(torch, form)) for name, weight in model.weights.items()}


def run(weights, whole, watch=None):
    with strict_switches(), torch.inference_mode():
        return Runner(EXPERTS, weights, watch=watch).forward(torch.tensor([whole]))[0].double()


@pytest.mark.parametrize("shape", [pytest.param(EXPERTS, id="4"), pytest.param(EIGHT, id="8", marks=pytest.mark.slow)])
def test_every_path_gives_the_proved_logits(shape):
    """Four formats, one row and two, decode and prefill: 0 differing values, and the program's words."""
    model = construct(shape, 33)
    texts = []
    for seed in (1, 2):
        words = prompt(model.program, seed)
        following = continuation(model.program, shape.layers, words, 8)
        texts.append((words, following, words + following[:-1]))
    proofs = [Walk(shape, model.weights).prove(whole) for _, _, whole in texts]
    assert all(proof.witnessed for proof in proofs)
    golden = torch.stack([proof.logits for proof in proofs])
    assert golden[:, -8:].argmax(-1).tolist() == [following for _, following, _ in texts]
    assert max(o.bits for proof in proofs for o in proof.operators.values()) <= 8
    for form, rows in product(FORMATS, (1, 2)):
        runner = Runner(shape, cast(model, form))
        with strict_switches(), torch.inference_mode():
            scored = runner.forward(torch.tensor([whole for _, _, whole in texts[:rows]]))
            tokens, logits = runner.decode(torch.tensor([words for words, _, _ in texts[:rows]]), 8)
        assert torch.equal(scored.double(), golden[:rows]), (form, rows)
        assert torch.equal(logits.double(), golden[:rows, -8:]), (form, rows)
        assert tokens.tolist() == [following for _, following, _ in texts[:rows]]


@pytest.mark.parametrize("part", ["gate", "experts.0.w1", "experts.1.w3", "experts.2.w2", "experts.3.w2"])
def test_one_flipped_bit_of_router_and_experts_is_found(model, whole, golden, part):
    """The lowest bit of bfloat16, in a live weight: logits differ."""
    name = f"model.layers.1.block_sparse_moe.{part}.weight"
    weights = cast(model, "bfloat16")
    weights[name] = weights[name].clone()
    live = (weights[name].view(-1) != 0).nonzero().view(-1)
    bits(weights[name]).view(-1)[int(live[len(live) // 2])] ^= 1
    assert not torch.equal(run(weights, whole), golden)


def test_a_wrong_expert_is_found(model, whole, golden):
    """One strange expert beside a right one, and a strange pair, at the last position alone."""
    proof_choice = routes(Exact.of(run_router(model, whole)))[-1].nonzero().view(-1).tolist()
    others = [e for e in range(EXPERTS.experts) if e not in proof_choice]
    for instead in ([proof_choice[0], others[0]], [others[1], proof_choice[1]], others, [proof_choice[0]] * 2):

        def strike(name, tensor, instead=instead):
            if name == "1.chosen":
                tensor = tensor.clone()
                tensor[0, -1] = torch.tensor(instead)
            return tensor

        for form in ("float32", "bfloat16"):
            assert not torch.equal(run(cast(model, form), whole, strike)[-1], golden[-1]), (form, instead)


def run_router(model, whole):
    """The router's logits in the last layer."""
    seen = {}
    run(cast(model, "float64"), whole, seen.setdefault)
    return seen["1.router"][0]


def test_the_order_of_the_two_experts_changes_nothing(model, whole, golden):
    """Engines choose among equals in either order."""
    assert torch.equal(run(cast(model, "bfloat16"), whole, lambda n, t: t.flip(-1) if "chosen" in n else t), golden)


@pytest.mark.parametrize(
    ("row", "change", "reason"),
    [
        (0, lambda weight: weight[1].clone(), "experts tie|partial sums"),
        (1, lambda weight: weight[1] / 4, "neither at 0 nor 110 below"),
        (2, lambda weight: weight[2] * 0, "experts tie"),
    ],
)
def test_the_proof_refuses_a_tie_and_a_small_gap(model, whole, row, change, reason):
    """In a checkpoint's router."""
    weights = {**model.weights, ROUTER: model.weights[ROUTER].clone()}
    weights[ROUTER][row] = change(weights[ROUTER])
    with pytest.raises(Inexact, match=reason):
        Walk(EXPERTS, weights).prove(whole)


def test_the_proof_refuses_a_prompt_that_leaves_an_expert_unused(model, whole):
    """Whether all positions are compared, or the last one alone."""
    with pytest.raises(Inexact, match="no compared word takes expert"):
        Walk(EXPERTS, model.weights).prove(whole[:1])
    Walk(EXPERTS, model.weights).prove(whole, 2)
    with pytest.raises(Inexact, match="no compared word takes expert"):
        Walk(EXPERTS, model.weights).prove(whole, 1)


@pytest.mark.parametrize(
    ("logits", "reason"),
    [
        ([[0, 0, 0, -128]], "3 to 3 experts tie"),
        ([[0, -128, -128, -128]], "1 to 1 experts tie"),
        ([[0, 0, -109, -128]], "neither at 0 nor 110 below"),
        ([[1, 0, 0, -128]], "neither at 0"),
        ([[0, 0, -128, -128], [0, -128, 0, -128]], "takes expert 3"),
    ],
)
def test_a_route_has_exactly_two_winners(logits, reason):
    """Bounds of the router alone; each is a refusal with its reason."""
    with pytest.raises(Inexact, match=reason):
        routes(Exact(torch.tensor(logits), 0))
    assert routes(Exact(torch.tensor([[0, 0, -110, -128], [-111, -128, 0, 0]]), 0)).sum() == 4


TRANSFORMERS = """
import json, sys, torch
from transformers import MixtralForCausalLM
directory, golden, whole = sys.argv[1], torch.load(sys.argv[2]), json.loads(sys.argv[3])
for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
    for way in ("eager", "batched_mm", "grouped_mm")[: 2 if dtype == torch.float64 else 3]:  # none in float64
        model = MixtralForCausalLM.from_pretrained(directory, dtype=dtype, experts_implementation=way).eval()
        with torch.inference_mode():
            got = model(torch.tensor([whole, whole])).logits.double()
            cached = model(torch.tensor([whole[:20]]), use_cache=True)
            rest = [cached.logits]
            for word in whole[20:]:
                cached = model(torch.tensor([[word]]), past_key_values=cached.past_key_values, use_cache=True)
                rest.append(cached.logits)
        for logits in (got[0], got[1], torch.cat(rest, 1)[0].double()):
            assert int((logits != golden).sum()) == 0, (dtype, way, int((logits != golden).sum()))
"""
"""Its own Mixtral, in four formats and three ways to run experts: in one pass, two rows, and word by word."""


@pytest.mark.servers
def test_transformers_gives_the_proved_logits(model, whole, golden, tmp_path):
    """The exported checkpoint in transformers' own Mixtral: 0 differing logits."""
    python = Path(os.environ.get("CANARYD_TEST_TRANSFORMERS", "none")).with_name("python")
    if not python.is_file():
        pytest.skip("no transformers here: run `scripts/servers DIR transformers`, then `. DIR/env.sh`")
    export(model, tmp_path / "canary")
    assert like(json.loads((tmp_path / "canary/config.json").read_text())) == EXPERTS
    torch.save(golden, tmp_path / "golden")
    done = subprocess.run(
        [str(python), "-c", TRANSFORMERS, str(tmp_path / "canary"), str(tmp_path / "golden"), json.dumps(whole)],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_sizes_of_a_served_mixture_fit_or_are_refused():
    """What `config.json` of a Mixtral says; other numbers of experts are named."""
    config = {
        "model_type": "mixtral", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
        "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 32000,
        "num_local_experts": 8, "num_experts_per_tok": 2,
    }  # fmt: skip
    assert (like(config).family, like(config).experts) == ("mixtral", 8)
    for wrong, reason in (({"num_experts_per_tok": 1}, "wanted 2"), ({"num_local_experts": 6}, "6 experts")):
        with pytest.raises(Unfit, match=reason):
            like({**config, **wrong})
    with pytest.raises(Unfit, match="family llama has none"):
        replace(TINY, experts=4)
    with pytest.raises(Unfit, match="at most 32"):
        construct(replace(EXPERTS, experts=64), 1)
