"""The exact canary's model: construction, proof, and the same logits by every path, format and kernel."""

import json
import math
from dataclasses import replace
from fractions import Fraction
from itertools import product

import pytest

from canaryd.worker.exact_canary.golden import continuation, prompt
from canaryd.worker.exact_canary.shape import TINY, Shape, Unfit, plan
from canaryd.worker.numeric.operands import Inexact

torch = pytest.importorskip("torch", reason="the numeric worker is tested where torch is installed")
pytestmark = pytest.mark.torch

from canaryd_lab.worker.exact_canary.construct import construct  # noqa: E402
from canaryd_lab.worker.exact_canary.export import like, right_answer  # noqa: E402
from canaryd_lab.worker.exact_canary.prove import Walk  # noqa: E402

from canaryd.worker.exact_canary.run import Runner  # noqa: E402
from canaryd.worker.numeric.tensors import bits, strict_switches  # noqa: E402

FORMATS = ("float64", "float32", "bfloat16", "float16")
QWEN = replace(TINY, family="qwen2")
WIDE = Shape(hidden=384, heads=6, kv_heads=2, head=64, inner=512, layers=2, vocabulary=1100)


@pytest.fixture(scope="module")
def model():
    return construct(TINY, 7)


def text(model, seed=3, count=None):
    """A prompt, what follows it, and both together without the last word."""
    words = prompt(model.program, seed)
    following = continuation(model.program, model.shape.layers, words, count or model.program.steps)
    return words, following, words + following[:-1]


def cast(model, form):
    return {name: weight.to(getattr(torch, form)) for name, weight in model.weights.items()}


@pytest.mark.parametrize(
    ("hidden", "heads", "kv_heads"), [(2816, 44, 4), pytest.param(4096, 32, 8, marks=pytest.mark.slow)]
)
def test_sizes_of_served_models_are_proved(hidden, heads, kv_heads):
    """Hidden sizes above 2,688 have more ballast than four squares take."""
    shape = Shape(
        hidden=hidden, heads=heads, kv_heads=kv_heads, head=hidden // heads, inner=512, layers=1, vocabulary=1100
    )
    model = construct(shape, 3)
    words = text(model)[2][:2]
    assert Walk(model.shape, model.weights).prove(words).logits.shape == (2, 1100)


def test_a_seed_gives_one_model():
    """The same weights again, others for another seed."""
    one, again, other = construct(TINY, 7), construct(TINY, 7), construct(TINY, 8)
    assert all(torch.equal(one.weights[name], again.weights[name]) for name in one.weights)
    differ = [name for name in one.weights if not torch.equal(one.weights[name], other.weights[name])]
    assert len(differ) == len([name for name in one.weights if "norm" not in name])


def test_every_format_holds_every_weight(model):
    """No weight is rounded, subnormal or infinite in any format, and half of the matrices' have all 8 bits."""
    for form in FORMATS[1:]:
        for name, weight in cast(model, form).items():
            assert torch.equal(weight.to(torch.float32), model.weights[name]), (form, name)
    live = torch.cat([w[w != 0].abs() for w in model.weights.values()])
    assert float(live.min()) >= 2.0**-14
    matrices = torch.cat([w[w != 0].abs() for name, w in model.weights.items() if "proj" in name or "head" in name])
    mantissa = torch.frexp(matrices).mantissa * 256
    assert float((mantissa % 2 == 1).to(torch.float64).mean()) > 0.4


@pytest.mark.parametrize("shape", [TINY, QWEN, WIDE], ids=["tiny", "qwen2", "wide"])
@pytest.mark.parametrize("anchored", [True, False])
def test_the_proof_finds_the_words_that_the_program_gives(shape, anchored):
    """The program alone and the weights in integers choose the same words; the right one leads by 8."""
    model = construct(shape, 21, anchored=anchored)
    words, following, whole = text(model)
    proof = Walk(shape, model.weights).prove(whole)
    assert proof.witnessed
    logits = proof.logits[-len(following) :]
    assert logits.argmax(-1).tolist() == following
    found = right_answer(model.program, shape, words, len(following), logits.tolist())
    assert found.tokens == following
    assert min(found.leads) == 8.0
    expected = torch.log_softmax(logits, -1)[range(len(following)), following]
    assert torch.allclose(torch.tensor(found.log_probabilities, dtype=torch.float64), expected, rtol=0, atol=1e-12)
    assert max(o.bits for o in proof.operators.values()) <= 8
    assert max(o.sums for o in proof.operators.values()) <= 23


def test_the_proof_agrees_with_plain_python():
    """Fractions and lists, without torch and without a shortcut, give the same logits to a bit."""
    shape = replace(TINY, layers=1)
    model = construct(shape, 5)
    words = text(model)[0][:3]
    w = {
        name: [[Fraction(v) for v in row] for row in t.reshape(len(t), -1).tolist()]
        for name, t in model.weights.items()
    }

    def linear(name, xs):
        rows = [[(i, v) for i, v in enumerate(row) if v] for row in w[f"{name}.weight"]]
        return [[sum(v * x[i] for i, v in row) for row in rows] for x in xs]

    def norm(xs):
        roots = [math.isqrt(int(sum(v * v for v in x) / len(x))) for x in xs]
        assert all(sum(v * v for v in x) == r * r * len(x) for x, r in zip(xs, roots, strict=True))
        return [[v / r for v in x] for x, r in zip(xs, roots, strict=True)]

    xs = [w["model.embed_tokens.weight"][word] for word in words]
    layer, d = "model.layers.0", shape.head
    q, k, v = (linear(f"{layer}.self_attn.{n}_proj", norm(xs)) for n in "qkv")
    mixed = []
    for t, own in enumerate(q):
        row = []
        for h in range(shape.heads):
            g = h // (shape.heads // shape.kv_heads)
            scores = [
                sum(a * b for a, b in zip(own[h * d : h * d + d], k[s][g * d : g * d + d], strict=True))
                for s in range(t + 1)
            ]
            assert max(scores) == 0
            won = [s for s, score in enumerate(scores) if score == 0]
            assert all(score <= -104 * 8 for score in scores if score)
            row += [sum(v[s][g * d + i] for s in won) / len(won) for i in range(d)]
        mixed.append(row)
    xs = [
        [a + b for a, b in zip(*rows, strict=True)]
        for rows in zip(xs, linear(f"{layer}.self_attn.o_proj", mixed), strict=True)
    ]
    gate, up = (linear(f"{layer}.mlp.{n}_proj", norm(xs)) for n in ("gate", "up"))
    active = [
        [a * b if a > 0 else Fraction(0) for a, b in zip(*rows, strict=True)] for rows in zip(gate, up, strict=True)
    ]
    down = linear(f"{layer}.mlp.down_proj", active)
    xs = [[a + b for a, b in zip(*rows, strict=True)] for rows in zip(xs, down, strict=True)]
    logits = linear("lm_head", norm(xs))
    assert Walk(shape, model.weights).prove(words).logits.tolist() == [[float(v) for v in row] for row in logits]


def _raise_lowest_bit(weights, name, at=None):
    """Flip the lowest bit of bfloat16 of one live weight."""
    flat = weights[name].view(-1)
    index = int((flat != 0).nonzero()[0]) if at is None else at
    narrow = flat[index : index + 1].to(torch.bfloat16)
    bits(narrow)[0] ^= 1
    flat[index] = narrow.to(torch.float32)[0]


def test_the_proof_refuses_what_is_not_exact(model):
    """A single wrong bit in any kind of weight breaks one of its conditions, and it says which."""
    whole = text(model)[2]
    names = [n for n in model.weights if ".0." in n or "layers" not in n]
    refused = {}
    for name in names:
        weights = {n: w.clone() for n, w in model.weights.items()}
        _raise_lowest_bit(weights, name, at=whole[5] * TINY.hidden if "embed" in name else None)
        try:
            proof = Walk(TINY, weights).prove(whole)
        except Inexact as error:
            refused[name] = str(error)
        else:  # still exact, but then another answer
            assert not torch.equal(proof.logits, Walk(TINY, model.weights).prove(whole).logits), name
    assert len(refused) >= len(names) - 1
    assert refused["model.embed_tokens.weight"].startswith("norm: ")


@pytest.mark.parametrize(
    ("name", "factor", "reason"),
    [
        ("model.layers.0.mlp.gate_proj.weight", 2.0**-6, "gate: one is between"),
        ("model.layers.0.self_attn.q_proj.weight", 2.0**-4, "neither 0 nor far below"),
        ("model.layers.1.self_attn.k_proj.weight", 2.0**3, "float16 ends at 65504"),
        ("model.layers.0.self_attn.v_proj.weight", 2.0**-16, "v_proj.weight: 8 bits, from"),
        ("model.layers.2.mlp.down_proj.weight", 3.0, "down"),
    ],
)
def test_the_proof_names_the_condition_that_is_broken(model, name, factor, reason):
    """Gates that do not saturate, scores that do not vanish or overflow, numbers below float16's range."""
    weights = {**model.weights, name: model.weights[name] * factor}
    with pytest.raises(Inexact, match=reason):
        Walk(TINY, weights).prove(text(model)[2])


def test_rotations_must_stand_still(model):
    """A weight in a pair that turns is refused."""
    weights = {n: w.clone() for n, w in model.weights.items()}
    weights["model.layers.0.self_attn.q_proj.weight"][1, :] = 1.0
    with pytest.raises(Inexact, match="rotation: pair 1 turns"):
        Walk(TINY, weights).prove(text(model)[2])


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(TINY, id="tiny"),
        pytest.param(QWEN, id="qwen2", marks=pytest.mark.slow),
        pytest.param(WIDE, id="wide", marks=pytest.mark.slow),
    ],
)
def test_every_path_gives_the_proved_logits(shape):
    """Formats x kernels x rows x decode and prefill: 0 differing values."""
    for anchored, kernels in ((True, ("", "FLASH_ATTENTION")), (False, ("", "MATH", "FLASH_ATTENTION"))):
        model = construct(shape, 33, anchored=anchored)
        texts = [text(model, seed, 6) for seed in (1, 2)]
        golden = torch.stack([Walk(shape, model.weights).prove(whole).logits for _, _, whole in texts])
        for form, kernel, rows in product(FORMATS, kernels, (1, 2)):
            runner = Runner(shape, cast(model, form), kernel)
            with strict_switches(), torch.inference_mode():
                scored = runner.forward(torch.tensor([whole for _, _, whole in texts[:rows]]))
                tokens, logits = runner.decode(torch.tensor([words for words, _, _ in texts[:rows]]), 6)
            assert torch.equal(scored.double(), golden[:rows]), (form, kernel, rows)
            assert torch.equal(logits.double(), golden[:rows, -6:]), (form, kernel, rows)
            assert tokens.tolist() == [following for _, following, _ in texts[:rows]]


def test_a_cache_filled_in_parts_gives_the_same(model):
    """Prefill in two parts of which the second is one word, as a prefix cache leaves it."""
    _, _, whole = text(model)
    golden = Walk(TINY, model.weights).prove(whole).logits
    runner = Runner(TINY, cast(model, "bfloat16"))
    cache = runner.operators.cache(*runner.cached(1, len(whole)))
    with torch.inference_mode():
        parts = [
            runner.forward(part, cache) for part in torch.tensor([whole]).split([20, 11, 1, 1, len(whole) - 33], 1)
        ]
    assert torch.equal(torch.cat(parts, 1)[0].double(), golden)


def test_sizes_of_served_models_fit_or_are_refused():
    """What `config.json` says becomes sizes; what the construction cannot have is named."""
    config = json.loads(
        '{"model_type": "qwen2", "hidden_size": 896, "num_attention_heads": 14, "num_key_value_heads": 2,'
        ' "intermediate_size": 4864, "num_hidden_layers": 24, "vocab_size": 151936}'
    )
    shape = like(config)
    assert (shape.head, shape.layers, shape.family) == (64, 4, "qwen2")
    assert plan(shape).anchored
    llama = like({**config, "model_type": "llama", "head_dim": 128})
    assert not plan(llama).anchored  # a scale of 128^-1/2 rounds where a kernel applies it to q
    for wrong, reason in (
        ({"model_type": "gpt2"}, "gpt2"),
        ({"num_attention_heads": 1, "num_key_value_heads": 1}, "1 heads"),
        ({"hidden_size": 100}, "multiples of 16"),
    ):
        with pytest.raises(Unfit, match=reason):
            like({**config, **wrong})
    for sizes, reason in (
        ({"hidden": 128}, "static bits"),
        ({"vocabulary": 200}, "less than 16 places"),
        ({"inner": 32}, "too small for values"),
        ({"head": 16}, "still pairs"),
    ):
        with pytest.raises(Unfit, match=reason):
            construct(replace(TINY, **sizes), 1)
