"""The products of the served model's own sizes: derived, bounded, told where left out, and what only they find."""

import json

import pytest

from canaryd.facts import Comparison, Skipped
from canaryd.judge.characterised import class_of
from canaryd.probe import Context
from canaryd.worker.numeric import reproducer, verify
from canaryd.worker.numeric.served import Unreadable, Weight, heads, read, served_attention, served_cases, weights
from canaryd.worker.numeric.session import Session
from canaryd.worker.numeric.stack import cpu
from canaryd.worker.numeric.tensors import flat_bits
from canaryd.worker.runtime import interface
from canaryd.worker.runtime.torch import Torch
from probes import exact_attention, exact_matmul
from tests.worker.numeric.cuda import HOPPER

pytest.importorskip("torch", reason="the numeric worker is tested where torch is installed")
pytestmark = pytest.mark.torch

LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
}
SMALL = {"hidden_size": 192, "intermediate_size": 1500, "num_attention_heads": 4, "vocab_size": 900, "dtype": "float32"}


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    return tmp_path


def context(path, **other):
    return Context(
        **{"device": cpu(), "level": "quick", "seed": 7, "budget": 3.0, "settings": {"shapes_of": [str(path)]}, **other}
    )


def test_weights_are_those_of_the_model():
    """Llama 3.1 8B as servers lay it out; an expert of a mixture; sizes below a heading of their own."""
    wanted = [
        Weight("qkv", 6144, 4096),
        Weight("gate_up", 28672, 4096),
        Weight("head", 128256, 4096),
        Weight("o", 4096, 4096),
        Weight("down", 4096, 14336),
    ]
    assert weights(LLAMA_8B) == wanted
    assert weights({"text_config": LLAMA_8B}) == wanted
    expert = weights({**LLAMA_8B, "moe_intermediate_size": 768, "head_dim": 64})
    assert expert[1:] == [Weight("gate_up", 1536, 4096), wanted[2], Weight("o", 4096, 2048), Weight("down", 4096, 768)]


def test_devices_that_share_a_model_get_their_shares(tmp_path, monkeypatch):
    """As vLLM gives eight GPUs a 70B and sixteen an 8B; three, which its heads do not allow, take it as a whole."""
    large = {**LLAMA_8B, "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64}
    assert [(w.N, w.K) for w in weights(large, 8)] == [
        (1280, 8192), (7168, 8192), (16032, 8192), (8192, 1024), (8192, 3584),
    ]  # fmt: skip
    assert (heads(large, 8), heads(LLAMA_8B, 16)) == ((8, 1, 128), (2, 1, 128))
    assert weights(LLAMA_8B, 16)[0] == Weight("qkv", 4 * 128, 4096)
    uneven = {**LLAMA_8B, "num_attention_heads": 30, "num_key_value_heads": 10}  # three would have 10 and 3
    assert (heads(uneven, 3), heads(uneven, 5)) == (heads(uneven), (6, 2, heads(uneven)[2]))
    assert (weights(LLAMA_8B, 3), heads(LLAMA_8B, 3)) == (weights(LLAMA_8B), heads(LLAMA_8B))
    monkeypatch.setattr(Torch, "memory", lambda *_: (None, None))
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    settings = {"shapes_of": [str(tmp_path)], "ranks": {str(tmp_path): 4}}
    ctx = context(tmp_path, settings=settings, device=HOPPER)
    (down,) = (c for c in served_cases(ctx, {"bfloat16": 5e14}) if "/down-" in c.name)
    assert (down.product.N, down.product.K) == (4096, 3584)
    assert [sizes[1:3] for _, _, sizes in served_attention(ctx)] == [(8, 2)] * 2
    again = context(tmp_path, device=HOPPER, cases=(down.name,))  # by a person, who gives no endpoint
    assert down.name in [case.name for case in served_cases(again, {"bfloat16": 5e14})]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot be read: No such file or directory"),
        ("{", "has no sizes of a language model"),
        ("[]", "has no sizes of a language model"),
        ("{}", "has no sizes of a language model: KeyError 'hidden_size'"),
        (json.dumps({**SMALL, "num_attention_heads": 0}), "has no sizes of a language model: ZeroDivisionError"),
        (json.dumps({**SMALL, "vocab_size": -1}), "a size is not positive"),
    ],
)
def test_what_gives_no_sizes_is_told(tmp_path, text, said):
    """The file and the reason, in the error and as a case that was left out."""
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(Unreadable, match=said):
        read(tmp_path)
    (skipped,) = served_cases(context(tmp_path), {"float32": 1e11})
    assert isinstance(skipped, Skipped)
    assert str(tmp_path) in skipped.reason


def test_what_is_too_large_or_too_slow_is_left_out_aloud(tmp_path):
    """By the level, by the memory beside a server, and by the time that one product would take."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))

    def reasons(**other):
        facts = list(served_cases(context(tmp_path, **other), {"bfloat16": 1e13}))
        return {f.case.split("/")[2]: f.reason for f in facts if isinstance(f, Skipped)}, len(facts)

    found, every = reasons(level="standard", budget=30.0)
    assert every == 4 * 5
    assert set(found) == {f"head-{M}" for M in (1, 8, 64, 512)}
    assert found["head-1"] == "the weight has 1002 MiB; this run takes those of at most 512 MiB"
    assert reasons(level="deep", budget=240.0) == ({}, 12 * 5)
    slow, _ = reasons(level="standard", budget=0.1)
    assert slow["down-512"] == "one product would take about 0.006 s of the 0.1 s of this level"
    assert "down-64" not in slow
    beside = context(tmp_path, level="standard", budget=30.0)
    beside.room = 64 << 20
    assert all(isinstance(f, Skipped) for f in served_cases(beside, {"bfloat16": 1e13}))


def test_an_accelerator_gets_a_part_of_a_weight_that_is_too_large_for_the_level(tmp_path, monkeypatch):
    """As if several GPUs shared it. A retest at any level gets the part that was wrong."""
    monkeypatch.setattr(Torch, "memory", lambda *_: (None, None))
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    cases = list(served_cases(context(tmp_path, device=HOPPER), {"bfloat16": 5e14}))
    sizes = {c.name.split("/")[2].partition("-")[0]: (c.product.N, c.product.K) for c in cases}
    assert sizes == {
        "qkv": (6144, 4096), "gate_up": (8192, 4096), "head": (8192, 4096), "o": (4096, 4096), "down": (2304, 14336),
    }  # fmt: skip
    again = context(tmp_path, device=HOPPER, level="deep", budget=240.0, cases=(cases[2].name,))
    assert cases[2].name in [case.name for case in served_cases(again, {"bfloat16": 5e14})]


def test_every_case_is_right_here_and_can_be_asked_for(model):
    """All rows and contents by name; the same name gives the same product, also for the dossier's script."""
    cases = list(served_cases(context(model, cases=("*",)), {"float32": 1e11}))
    assert len(cases) == 2 * 6 * 5
    session = Session(context(model))
    for case in cases[::7]:
        seed = verify.case_seed(session.ctx, case)
        (found,) = (f for f in verify.verify_case(session, case, 0.0) if isinstance(f, Comparison))
        assert not found.wrong
        assert found.shape == case.product.shape
        made = reproducer.exhibit("exact_matmul", case.name, seed, cpu())
        assert made.problem.shape == case.product.shape
        assert class_of(case.name)


class WrongWhenLong(Torch):
    """The real runtime, whose products are wrong from K = 1200 up."""

    def run(self, operation, operands, out):
        result = super().run(operation, operands, out)
        if operation.name == "matmul" and operands[0].shape[-1] >= 1200:
            flat_bits(result)[5] ^= 1 << 20
        return result


@pytest.mark.parametrize("served", [True, False])
def test_a_kernel_that_is_wrong_from_some_size_up_is_found_by_the_models_sizes(model, monkeypatch, served):
    """The products of a quick check are smaller in every layout and every shape but one, which may be long enough."""
    monkeypatch.setattr(interface, "of", lambda _: WrongWhenLong())
    settings = {"shapes_of": [str(model)]} if served else {}
    ctx = context(model, budget=0.5, cases=("float32/dense",), settings=settings)
    wrong = {f.case for f in exact_matmul.run(ctx) if isinstance(f, Comparison) and f.wrong}
    assert {case.split("/")[2].partition("-")[0] for case in wrong} - {"long"} == ({"down"} if served else set())


def test_attention_of_the_model_is_asked_of_every_kernel(model):
    """Decoding without a mask and a causal prefill, in the model's format; longer at a deeper level."""
    assert list(served_attention(context(model))) == [
        ("float32", "served-decode", (1, 4, 4, 1, 256, 48)),
        ("float32", "served-prefill", (1, 4, 4, 64, 64, 48)),
    ]
    ctx = context(model, level="standard")
    served = list(served_attention(ctx))
    assert [sizes[3:5] for _, _, sizes in served] == [(1, 1024), (256, 256)]
    names = [case.name for _, case in exact_attention.served_cases(ctx, served)]
    kernels = {name.split("/")[3] for name in names}
    assert len(names) == 2 * len(kernels) == 8
    assert all(("causal" in name) == ("prefill" in name) for name in names)
    asked = context(model, cases=("float32/uniform/served-decode",))
    assert len(exact_attention.served_cases(asked, served)) == 4 * len(names)


class WrongHeads(Torch):
    """The real runtime, whose attention is wrong for heads of 48."""

    def run(self, operation, operands, out):
        result = super().run(operation, operands, out)
        if operation.name == "attention" and operands[0].shape[-1] == 48:
            flat_bits(result)[5] ^= 1 << 20
        return result


@pytest.mark.parametrize("served", [True, False])
def test_a_kernel_that_is_wrong_for_some_heads_is_found_by_the_models_sizes_alone(model, monkeypatch, served):
    """The heads of a quick check have 64 values."""
    monkeypatch.setattr(interface, "of", lambda _: WrongHeads())
    settings = {"shapes_of": [str(model)]} if served else {}
    ctx = context(model, budget=0.5, cases=("float32/onehot",), settings=settings)
    wrong = {f.case for f in exact_attention.run(ctx) if isinstance(f, Comparison) and f.wrong}
    assert bool(wrong) is served
    assert all("/served-" in case for case in wrong)
