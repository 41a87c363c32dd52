"""Quantised exact canaries: weights lie on the grid of a format, files hold them, the proof is made for them."""

import json
import random
from dataclasses import replace

import pytest
from canaryd_lab.cli.canary import QUANTIZATIONS

from canaryd.worker.exact_canary.shape import EXPERTS, TINY, Shape, Unfit

torch = pytest.importorskip("torch", reason="the numeric worker is tested where torch is installed")
pytestmark = pytest.mark.torch

from canaryd_lab.worker.exact_canary.construct import construct  # noqa: E402
from canaryd_lab.worker.exact_canary.export import answer, export  # noqa: E402
from canaryd_lab.worker.exact_canary.prove import Walk  # noqa: E402
from canaryd_lab.worker.exact_canary.quantised import FORMS, store, stored  # noqa: E402
from canaryd_lab.worker.safetensors import read_safetensors  # noqa: E402

from canaryd.worker.exact_canary import expected, golden  # noqa: E402
from canaryd.worker.exact_canary.cases import text  # noqa: E402
from canaryd.worker.exact_canary.run import Runner  # noqa: E402
from canaryd.worker.numeric.operands import Inexact  # noqa: E402

QWEN = replace(TINY, family="qwen2")
WIDE = Shape(hidden=256, heads=4, kv_heads=2, head=128, inner=128, layers=1, vocabulary=1 << 15)
"""A code of 9 bits and a value of 6: a word's constant is more than 4 bits hold in one weight."""
FLIPS = 40
GATE = ("awq", "mlx-mxfp8", "w8a8")
"""Codes of 4 bits with zeros, floats with scales, and int8 inputs: all the ways to store a matrix."""


def matrices(tensors):
    """Return the tensors of a checkpoint that hold matrices."""
    return [tensor for name, tensor in tensors.items() if name.endswith("weight")]


def made(form, shape=TINY, seed=5):
    """Return a model whose weights lie on the grid of a form."""
    return construct(shape, seed, bits=FORMS[form].whole)


def number(code):
    """Return the number that a code of FP8 stands for (OCP 8-bit Floating Point Specification, E4M3)."""
    exponent, mantissa = code >> 3 & 15, code & 7
    return (-1) ** (code >> 7) * ((8 + mantissa) * 2.0 ** (exponent - 10) if exponent else mantissa * 2.0**-9)


def unpacked(form, tensors, name):
    """Return the matrix that a checkpoint stands for, as the documents of the format have it, in plain Python."""
    module, bits = name.removesuffix(".weight"), FORMS[form].bits
    group, each = FORMS[form].group, 32 // bits
    if form == "w8a8":
        return tensors[name] * tensors[f"{module}.weight_scale"]
    if form == "fp8":
        rows = tensors[name].view(torch.uint8).tolist()
        return torch.tensor([[number(code) for code in row] for row in rows]) * tensors[f"{module}.weight_scale"]

    def codes(tensor, order):
        return [
            [(word >> bits * place & (1 << bits) - 1) for word in row for place in order]
            for row in tensor.to(torch.int64).tolist()
        ]

    if form == "awq":
        order = (0, 4, 1, 5, 2, 6, 3, 7)
        whole = torch.tensor(codes(tensors[f"{module}.qweight"], order))
        zeros = torch.tensor(codes(tensors[f"{module}.qzeros"], order))
        scales = tensors[f"{module}.scales"]
        return ((whole - zeros.repeat_interleave(group, 0)) * scales.repeat_interleave(group, 0)).T
    whole = torch.tensor(codes(tensors[name], range(each)))
    if form == "mlx-mxfp8":
        scales = torch.exp2(tensors[f"{module}.scales"].to(torch.float32) - 127).repeat_interleave(group, 1)
        return torch.tensor([[number(code) for code in row] for row in whole.tolist()]) * scales
    scales, biases = (tensors[f"{module}.{part}"].repeat_interleave(group, 1) for part in ("scales", "biases"))
    return whole * scales + biases


def test_the_command_knows_every_form():
    """The list of choices stands where no torch is."""
    assert list(FORMS) == list(QUANTIZATIONS)


@pytest.mark.parametrize("form", [pytest.param(f, marks=() if f in GATE else pytest.mark.slow) for f in FORMS])
def test_a_directory_holds_the_weights_in_few_bits(tmp_path, form):
    """Read back as the format is documented, every weight has the model's value; `load` takes the answers."""
    model, directory = made(form), tmp_path / "out"
    export(model, directory, form=form)
    tensors, _ = read_safetensors((directory / "model.safetensors").read_bytes())
    config = json.loads((directory / "config.json").read_text())
    if form in ("fp8", "w8a8"):
        (told,) = config["quantization_config"]["config_groups"].values()
        assert told["weights"]["type"] == {"fp8": "float", "w8a8": "int"}[form]
        assert bool(told["input_activations"]) == (form == "w8a8")
    else:
        told = config["quantization_config" if form == "awq" else "quantization"]
        assert (told["bits"], told["group_size"]) == (FORMS[form].bits, FORMS[form].group)
    few = [name for name in model.weights if "proj" in name or ("mlx" in form and name.startswith("lm_head"))]
    assert sum(t.element_size() == 1 or not t.is_floating_point() for t in matrices(tensors)) == len(few)
    for name, weight in model.weights.items():
        assert torch.equal(unpacked(form, tensors, name) if name in few else tensors[name], weight), name
    found = expected.load(directory)
    assert (found.quantization, found.changed_file()) == (form, "")


@pytest.mark.parametrize(
    ("form", "shape", "anchored"),
    [
        *((form, shape, None) for form in ("awq", "mlx-8bit", "w8a8", "fp8") for shape in (TINY, QWEN)),
        *((form, TINY, False) for form in ("awq", "mlx-8bit", "w8a8", "fp8")),
        *((form, EXPERTS, None) for form in ("mlx-4bit", "mlx-8bit", "mlx-mxfp8", "fp8")),
        ("awq", WIDE, None),
        pytest.param("mlx-8bit", WIDE, None, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_what_is_stored_is_proved(form, shape, anchored):
    """The walk finds the program's words; the bits of every code are used."""
    model = construct(shape, 9, bits=FORMS[form].whole, anchored=anchored)
    few = stored(model.weights, form)
    count = min(8, model.program.steps)
    words = golden.prompt(model.program, 9)
    following = golden.continuation(model.program, shape.layers, words, count)
    proof = Walk(shape, model.weights, stored=few).prove(words + following[:-1], 0 if shape.experts else count)
    assert proof.logits[-count:].argmax(1).tolist() == following
    assert proof.witnessed
    codes = {name: each.codes.flatten() for name, each in few.items()}
    if FORMS[form].floats:  # a matrix may have one exponent alone
        codes = {"all": torch.cat(list(codes.values()))}
    for name, each in codes.items():
        used = (each[:, None] >> torch.arange(FORMS[form].bits)) & 1
        assert bool((used.amax(0) > used.amin(0)).all()), name
    for name, each in few.items():
        assert float((each.values / each.wide).abs().max()) > (60 if each.floats else each.zero / 2), name


@pytest.mark.parametrize("form", FORMS)
def test_a_weight_off_the_grid_is_refused(tmp_path, form):
    """One of half a unit; a model that was not made for it; a code that is not the weight. Nothing is written."""
    model = made(form)
    name = "model.layers.1.mlp.up_proj.weight"
    few, weight = stored(model.weights, form), model.weights[name].clone()
    weight[7] -= weight[7].sign() * (weight[7].abs() == weight[7].abs().max()) * few[name].scales[7, 0] / 2
    with pytest.raises(Inexact, match=r"up_proj.weight: a weight is off the grid"):
        export(replace(model, weights={**model.weights, name: weight}), tmp_path / "out", form=form)
    with pytest.raises(Inexact, match="off the grid"):
        export(construct(TINY, 5), tmp_path / "out", form=form)
    few[name].codes[3, 3] ^= 1
    with pytest.raises(Inexact, match="what is stored in few bits is not the weight"):
        Walk(model.shape, model.weights, stored=few).prove(text(model, 5, 0, 4))
    assert not (tmp_path / "out").exists()


def test_sums_of_codes_that_a_kernel_takes_apart_are_counted():
    """They are larger than sums of weights, and have to fit as well."""
    model = made("mlx-8bit")
    few, tokens = stored(model.weights, "mlx-8bit"), text(model, 5, 0, 4)
    together, apart = (Walk(model.shape, model.weights, stored=each).prove(tokens).operators for each in ({}, few))
    for name in ("query", "key", "value", "output", "gate", "up", "down", "logits"):
        assert together[name].sums < apart[name].sums <= 22


@pytest.mark.parametrize("form", ["awq", "w8a8"])
def test_a_form_that_no_engine_reads_with_experts_is_refused(tmp_path, form):
    """With the forms that are read."""
    with pytest.raises(Unfit, match=f"{form}: not for a mixture of experts; take mlx-4bit, mlx-8bit, mlx-mxfp8 or fp8"):
        export(made(form, EXPERTS), tmp_path / "out", form=form)


def test_inputs_that_are_no_whole_groups_are_refused(tmp_path):
    """By `store`, and by the command's answer as a mistake."""
    with pytest.raises(Inexact, match="96 inputs are no whole number of groups of 64"):
        store("x.weight", torch.ones(4, 96), FORMS["mlx-4bit"])
    config = {"model_type": "llama", "num_attention_heads": 4, "hidden_size": 256, "intermediate_size": 208}
    like = {**config, "num_key_value_heads": 2, "num_hidden_layers": 1, "vocab_size": 1152}
    asked = {"directory": str(tmp_path / "out"), "like": like, "layers": 1, "seed": 1, "no_anchor": False}
    found = answer({**asked, "form": "awq"}, lambda *_: None)
    assert "down_proj.weight: 208 inputs are no whole number of groups of 128" in found["mistake"]


def test_an_input_off_the_grid_of_int8_is_refused():
    """The static scale of an activation must hold every value that the walk meets."""
    model = made("w8a8")
    few = stored(model.weights, "w8a8")
    name = "model.layers.1.mlp.down_proj.weight"
    for unit in (2 * few[name].unit, few[name].unit / 4):  # not a multiple; larger than 127
        with pytest.raises(Inexact, match="down: an input is off the grid of int8"):
            Walk(model.shape, model.weights, stored={**few, name: replace(few[name], unit=unit)}).prove(
                text(model, 5, 0, 4)
            )


@pytest.mark.parametrize(("scale", "reason"), [(3 / 4, "a scale is no power of two"), (2.0**-16, "1 bits, from")])
def test_a_scale_that_is_not_held_exactly_is_refused(scale, reason):
    """Three quarters, which E8M0 would round; and one below float16's normal numbers."""
    weight = torch.tensor([[2.0**-9, 3 * 2.0**-9]] * 2)
    few = store("x.weight", weight, FORMS["fp8"])
    few = replace(few, scales=torch.full_like(few.scales, scale))
    walk = Walk(TINY, {"x.weight": few.values}, stored={"x.weight": few})
    with pytest.raises(Inexact, match=f"x.weight: {reason}"):
        walk._matrix("x.weight")


@pytest.mark.parametrize("form", FORMS)
def test_a_flipped_bit_of_a_code_changes_a_logit(form):
    """Of codes that are not 0, whichever the bit."""
    model, chance = made(form), random.Random(form)
    few = stored(model.weights, form)
    tokens = torch.tensor([text(model, 5, 0, model.program.steps)])
    weights = {name: weight.to(torch.bfloat16) for name, weight in model.weights.items()}
    seen = 0
    with torch.inference_mode():
        right = Runner(model.shape, weights).forward(tokens)
        for _ in range(FLIPS):
            name = chance.choice(list(few))
            codes = few[name].codes.clone()
            row, column = chance.choice((few[name].values != 0).nonzero().tolist())
            codes[row, column] ^= 1 << chance.randrange(FORMS[form].bits)
            wrong = replace(few[name], codes=codes).values.to(torch.bfloat16)
            seen += bool((Runner(model.shape, {**weights, name: wrong}).forward(tokens) != right).any())
    assert seen >= FLIPS - 2  # 99.8 % of 887 flips with seed 1


@pytest.mark.parametrize("form", FORMS)
def test_a_product_fits_before_its_bias_is_added(form):
    """Some kernels store it in the served format first; so biases are half as large as weights, or smaller."""
    model = made(form, QWEN, 2)
    words, few = text(model, 2, 0, model.program.steps), stored(model.weights, form)
    walk = Walk(QWEN, model.weights, stored=few)
    walk.prove(words)
    assert max(walk.operators[f"{name} before its bias"].bits for name in ("query", "key", "value")) <= 8
    odd = {name: w + 2**-9 if name.endswith(".down_proj.weight") else w for name, w in model.weights.items()}
    with pytest.raises(Inexact, match="not the weight"):
        Walk(QWEN, odd, stored=few).prove(words)
