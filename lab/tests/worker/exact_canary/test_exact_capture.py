"""`canaryd capture --exact`: what a lone device computes, compared with the truth, operator by operator."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from canaryd.codec import from_json, to_json
from canaryd.model import Device
from canaryd.probe import Skip

torch = pytest.importorskip("torch", reason="the numeric worker is tested where torch is installed")
pytestmark = pytest.mark.torch

from canaryd_lab.worker.canary import capture as files  # noqa: E402
from canaryd_lab.worker.canary.capture import Recorder  # noqa: E402
from canaryd_lab.worker.exact_canary import capture  # noqa: E402
from canaryd_lab.worker.exact_canary import truth as truths  # noqa: E402
from canaryd_lab.worker.exact_canary.truth import same, truth  # noqa: E402

from benchmarks.exact_capture import strikes  # noqa: E402
from benchmarks.observability import flip  # noqa: E402
from canaryd.worker.exact_canary import cases  # noqa: E402
from canaryd.worker.exact_canary.cases import Inference  # noqa: E402
from canaryd.worker.exact_canary.shape import EXPERTS, TINY  # noqa: E402
from canaryd.worker.numeric.stack import cpu  # noqa: E402
from canaryd.worker.numeric.tensors import bits, strict_switches, visible_cores  # noqa: E402
from canaryd.worker.runtime import interface  # noqa: E402

FORMATS = ("float64", "float32", "bfloat16", "float16")
STEPS = 6


@pytest.fixture(scope="module", autouse=True)
def strict():
    """The switches of a capture."""
    with strict_switches():
        yield


@pytest.fixture(scope="module")
def known():
    return truth(11, STEPS, anchored=True)


def inference(form="float32", path="forced", kernel="eager"):
    return Inference(form, path, 1, kernel, STEPS)


def weights(known, form="float32"):
    return {name: weight.to(getattr(torch, form)).clone() for name, weight in known.model.weights.items()}


def struck(known, strike, asked=None):
    """What an inference gave whose results pass by `strike`, in every run of it."""
    asked = asked or inference()
    return capture.Session(cpu(), strike=strike).run(asked, known, weights(known, asked.form))


def spoiling(*faults):
    """A watch that flips bits: (place, element, bit), each time that a place is met."""

    def strike(name, tensor):
        tensor = tensor.clone(memory_format=torch.contiguous_format)
        for place, element, bit in faults:
            if name == place:
                flip(bits(tensor).view(-1), element, bit)
        return tensor

    return strike


def ask(**changes):
    usual = {"device": to_json(cpu()), "dtype": "", "seed": 5, "out": "", "drill": ""}
    return capture.answer({**usual, **changes}, lambda fraction, text: None)


def test_a_healthy_device_gives_every_value():
    """All formats, both paths, every kernel that it has; the others are named with the reason."""
    found = ask()
    assert found["verdict"] == "right"
    ran = {(r["dtype"], r["path"], r["kernel"]) for r in found["ran"]}
    assert ran >= {(f, p, k) for f in FORMATS for p in ("decode", "forced") for k in ("eager", "math", "eager-experts")}
    assert all((r["wrong"], r["faults"], r["fault"], r["again"]) == (0, 0, None, "") for r in found["ran"])
    for r in found["ran"]:  # every operator of every layer and pass, and few values that are not known exactly
        assert r["values"] > 300_000
        assert r["loose"] < 0.04 * r["values"]
        assert r["loose"] == 0 or r["dtype"] != "float32"
    kernels = {r["kernel"] for r in found["ran"]} | {r["kernel"] for r in found["refused"]}
    assert kernels == {*cases.kernels(cpu()), "eager-experts"}
    assert all(r["reason"] for r in found["refused"])


@pytest.mark.parametrize("path", ["forced", "decode"])
def test_every_result_of_an_inference_is_compared(known, path):
    """Whatever the runner shows to its watch has a truth."""
    seen = []

    def note(name, tensor):
        seen.append((name, tensor.numel()))
        return tensor

    found = struck(known, note, inference(path=path))
    assert found.values == sum(count for _, count in seen)
    operators = {name.rpartition(".")[2] for name, _ in seen}
    assert len(operators) == 22 + (path == "decode")  # the word is chosen in decoding alone
    assert {name.partition(".")[0] for name, _ in seen if "." in name} == {"0", "1", "2"}


@pytest.mark.parametrize("form", [pytest.param(f, marks=() if f == "bfloat16" else pytest.mark.slow) for f in FORMATS])
def test_a_flipped_bit_is_named(known, form):
    """Layer, operator, pass, element and bit of 36 random faults; never another place, and 95 % at least."""
    chance, outcomes = random.Random(f"{form} 3"), []
    for path, kernel in (("forced", "eager"), ("decode", "eager"), ("forced", "flash_attention")):
        try:
            found = strikes(capture.Session(cpu()), inference(form, path, kernel), known, 12, chance)
        except NotImplementedError:
            continue  # this torch has no such kernel
        outcomes += [strike.outcome(ran) for strike, ran in found]
        assert {ran.again for _, ran in found if ran.fault} == {"right"}
    assert "another place named" not in outcomes
    assert outcomes.count("named") >= 0.95 * len(outcomes) - 1
    assert len(outcomes) >= 24


@pytest.mark.parametrize("path", ["forced", pytest.param("decode", marks=pytest.mark.slow)])
@pytest.mark.parametrize("form", [pytest.param(f, marks=() if f == "bfloat16" else pytest.mark.slow) for f in FORMATS])
def test_a_flipped_bit_of_an_expert_is_named(form, path):
    """Router, shares, and what each expert computes, of words that do not take it too."""
    known, chance = truth(11, STEPS, anchored=True, shape=EXPERTS), random.Random(f"{form} {path}")
    asked = Inference(form, path, 1, "eager", STEPS, EXPERTS)
    found = strikes(capture.Session(cpu()), asked, known, 24, chance)
    outcomes = [strike.outcome(ran) for strike, ran in found]
    assert "another place named" not in outcomes
    assert outcomes.count("named") >= len(outcomes) - 1
    assert any("expert" in strike.name for strike, _ in found)
    for place in ("1.expert2.down", "0.expert1.share", "1.router"):
        (only,) = struck(known, spoiling((place, 0, torch.finfo(getattr(torch, form)).bits - 3)), asked).places[:1]
        assert f"{only.layer}.{only.operator}" == place


@pytest.mark.runtimes
@pytest.mark.parametrize("form", FORMATS)
def test_a_flipped_bit_is_named_through_mlx(known, form, monkeypatch):
    """A right inference is right, and a wrong element is named by layer, operator and bit, through MLX's operators."""
    pytest.importorskip("mlx.core", reason="mlx is not installed in this interpreter")
    monkeypatch.setenv("MLX_ENABLE_TF32", "0")
    device = interface.named("mlx").devices()[0]
    uploaded = capture._upload(known, form, device)
    for path, kernel, layer, operator in (
        ("forced", "eager", "1", "gate"),
        ("decode", "eager", "0", "attention_norm"),
        ("decode", "fast", "2", "value"),
    ):
        asked = inference(form, path, kernel)
        right = capture.Session(device).run(asked, known, uploaded)
        assert (right.wrong, right.fault) == (0, None)
        bit = torch.finfo(getattr(torch, form)).bits - 3
        found = capture.Session(device, strike=spoiling((f"{layer}.{operator}", 5, bit))).run(asked, known, uploaded)
        assert (found.fault.place.layer, found.fault.place.operator) == (layer, operator)
        assert (found.fault.bits, found.again) == ((bit,), "same")


@pytest.mark.runtimes
def test_a_capture_through_mlx_names_a_drill(monkeypatch, tmp_path):
    """As the command asks for it: the device's own stack is in the file, and its memory reads back right."""
    pytest.importorskip("mlx.core", reason="mlx is not installed in this interpreter")
    monkeypatch.setenv("MLX_ENABLE_TF32", "0")
    device = interface.named("mlx").devices()[0]
    out = tmp_path / "mlx.safetensors"
    found = ask(device=to_json(device), dtype="bfloat16", drill="1.up", out=str(out))
    (wrong,) = [r for r in found["ran"] if r["fault"]]
    assert (wrong["fault"]["place"]["layer"], wrong["fault"]["place"]["operator"]) == ("1", "up")
    assert wrong["weights"] == []
    assert "mlx" in files.read(out).about["environment"]
    assert {r["kernel"] for r in found["ran"]} == {"eager", "fast", "eager-experts"}


def test_a_runtime_without_operators_is_refused():
    """WebGPU multiplies and has no language model's operators."""
    device = Device(uuid="W", backend="webgpu-cpu", index=0, model="m")
    with pytest.raises(Skip, match="does not run through webgpu"):
        ask(device=to_json(device))


def test_what_follows_from_a_fault_is_not_accused(known):
    """One wrong element makes thousands wrong behind it: one place is at fault, with its coordinates."""
    found = struck(known, spoiling(("0.output", 1 * 256 + 17, 30)))
    assert found.wrong > 1000
    assert (found.faults, len(found.places)) == (1, 1)
    assert found.fault.place == found.places[0]
    assert (found.fault.place.layer, found.fault.place.operator, found.fault.place.step) == ("0", "output", "forced")
    assert found.fault.where == {"position": 1, "element": 17}
    assert (found.fault.bits, found.fault.evidence.wrong) == ((30,), 1)
    assert found.again == "same"


def test_a_second_fault_of_its_own_is_listed_too(known):
    """At a position that the first one cannot have reached."""
    found = struck(known, spoiling(("1.down", 20 * 256 + 3, 22), ("2.gate", 4 * 256 + 9, 23)))
    assert [(p.layer, p.operator, p.position) for p in found.places] == [("1", "down", 20), ("2", "gate", 4)]
    assert found.faults == 2


def test_positions_and_heads_are_those_of_the_whole_text(known):
    """In decoding a pass has one new position; the cache is read again, and not accused again."""
    position = len(known.prompt) + 2

    def strike(name, tensor):
        if name == "1.keys" and tensor.shape[2] == position + 1:  # the third pass after the prompt
            bits(tensor)[0, 1, 4, 40] ^= 1 << 22  # in the cache itself
        return tensor

    found = struck(known, strike, inference(path="decode"))
    (place,) = found.places
    assert (place.operator, place.step, place.position) == ("keys", "3", 4)
    assert found.fault.where == {"head": 1, "position": 4, "element": 40}
    assert found.wrong > 1  # it stays in the cache
    found = struck(known, spoiling(("2.scores", (1 * 2 + 1) * 900 + 29 * 30 + 7, 30)))
    assert found.fault.where == {"head": 3, "position": 29, "key": 7}


def test_a_wrong_word_is_named_and_the_next_pass_goes_on_with_the_right_one(known):
    """The choice of a word is an operator too."""
    found = struck(known, lambda name, tensor: tensor + 1 if name == "word" else tensor, inference(path="decode"))
    assert {p.operator for p in found.places} == {"word"}
    assert (found.faults, found.wrong) == (STEPS, STEPS)
    assert found.fault.where == {"position": len(known.prompt) - 1}


def test_a_wrong_weight_is_found_in_the_device(known):
    """The operator that it belongs to is named, and the weight itself."""
    name = "model.layers.1.mlp.up_proj.weight"
    broken = weights(known)
    index = tuple(broken[name].nonzero()[5].tolist())
    broken[name][index] *= 2
    found = capture.Session(cpu()).run(inference(), known, broken)
    assert (found.fault.place.layer, found.fault.place.operator) == ("1", "up")
    ((wrong, evidence),) = found.weights
    assert (wrong, evidence.wrong, tuple(evidence.first[0][0])) == (name, 1, index)


def test_another_fault_in_the_second_run_is_said(known):
    """Not the same, and not right either."""
    count = iter(range(2))

    def strike(name, tensor):
        return spoiling(("0.up", next(count), 28))(name, tensor) if name == "0.up" else tensor

    assert struck(known, strike).again == "other"


def test_what_is_not_exact_is_held_to_what_is_known(known):
    """Scores of losers may be rounded up or down in 16 bits; float64's tails may differ by less than anyone's error."""
    scores = known.values["1.scores"]
    value, slack = known.expected("1.scores", "bfloat16", 30, scores.shape)
    near = value.to(torch.bfloat16).double()
    unit = 2.0 ** (torch.frexp(value).exponent - 8)
    assert bool(((value - near).abs() <= slack).all())
    assert bool((slack[near == value] == 0).all())
    assert bool(((slack == 0) | (slack == unit)).all())
    assert float((slack == 0).double().mean()) > 0.05
    assert bool((known.expected("1.scores", "float32", 30, scores.shape)[1] == 0).all())
    chances, slack = known.expected("1.softmax", "float64", 30, scores.shape)
    assert torch.allclose(chances.sum(-1), torch.ones(()).double(), rtol=1e-15)
    assert float(slack.max()) < 1e-47
    assert bool((known.expected("1.softmax", "float32", 30, scores.shape)[1] == 0).all())
    mixed, slack = known.expected("1.mixed", "float64", 30, known.values["1.mixed"].shape)
    assert bool((slack[mixed != 0] == 0).all())
    assert 0 < float(slack.max()) < 1e-45


def test_the_truth_is_one_for_all_paths(known):
    """Residual stream and cache repeat what is added and rotated; the words are the program's."""
    for first, then in pairwise(("embedding", "0.middle", "0.out", "1.middle")):
        added = {"0.middle": "0.output", "0.out": "0.down", "1.middle": "1.output"}[then]
        assert torch.equal(known.values[first] + known.values[added], known.values[then])
    assert torch.equal(known.values["2.keys"], known.values["2.rotated_key"])
    assert known.values["word"][0, : len(known.tokens) - 1].tolist() == list(known.tokens[1:])


def test_a_host_that_proves_two_answers_is_refused():
    """Two cores make the truth; where they disagree nobody is accused."""
    first, other = truth(12, 2, anchored=True), truth(12, 2, anchored=True)
    assert same(first, other)
    values = {**other.values, "1.up": other.values["1.up"].clone()}
    values["1.up"][0, 3, 7] *= 2
    assert not same(first, replace(other, values=values))
    cores = visible_cores()
    if len(cores) == 1:
        pytest.skip("this host has one core")
    made = truths.model(TINY, 12, True, (cores[-1],))
    made.weights["lm_head.weight"][TINY.vocabulary - 1] *= -1  # as if this core had made it so
    with pytest.raises(Skip, match=f"cores {cores[0]} and {cores[-1]} of this host"):
        truth(12, 2, anchored=True)
    truths.model.cache_clear()


def test_a_drill_is_found_and_its_capture_written(tmp_path):
    """Once, in the first inference that has the place; the file is a capture like any other."""
    path = tmp_path / "wrong.safetensors"
    found = ask(dtype="bfloat16", drill="1.up", out=str(path))
    (wrong,) = [r for r in found["ran"] if r["fault"]]
    assert (wrong["fault"]["place"]["layer"], wrong["fault"]["place"]["operator"]) == ("1", "up")
    assert (wrong["again"], found["verdict"], found["bytes"]) == ("right", "wrong", path.stat().st_size)
    held = files.read(path)
    assert (held.about["dtype"], held.about["path"], held.about["drill"]) == ("bfloat16", wrong["path"], "1.up")
    assert from_json(Device, found["device"]) == cpu()
    assert files.name_of(capture.PROMPT, "3", "2", "down") in held.tensors


def test_mistakes_are_said():
    """A format, a directory and a place that do not exist; nothing is written where nothing is wrong."""
    with pytest.raises(ValueError, match="dtype 'float8'"):
        ask(dtype="float8")
    with pytest.raises(ValueError, match="is not a directory"):
        ask(out="/nowhere/x.safetensors")
    with pytest.raises(ValueError, match=r"drill '9.up': no such place; there are input.embedding, 0.attention_norm"):
        ask(dtype="float32", drill="9.up")


def test_a_recorder_keeps_the_words(known):
    """A whole capture: the tokens given and chosen, and every operator of every pass."""
    recorder = Recorder(operators=True)
    capture.Session(cpu()).once(inference(path="decode"), known, weights(known), recorder)
    assert recorder.kept["exact/input"].tolist() == [list(known.prompt)]
    assert recorder.kept["exact/tokens"].tolist() == [known.values["word"][0, -STEPS:].long().tolist()]
    assert not [name for name in recorder.kept if name.endswith("/word")]
