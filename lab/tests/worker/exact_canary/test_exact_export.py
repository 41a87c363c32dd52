"""The exported checkpoint: files that other programs can load, with the answers that they must give."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import yaml

from canaryd.worker.exact_canary.shape import TINY, Shape
from tests.command import ROOT, bare_python, canaryd, configure, in_turn

torch = pytest.importorskip("torch", reason="the numeric worker is tested where torch is installed")
pytestmark = pytest.mark.torch

from canaryd_lab.worker.canary.gguf import ggml_name  # noqa: E402
from canaryd_lab.worker.exact_canary.construct import construct  # noqa: E402
from canaryd_lab.worker.exact_canary.export import answer, export, like  # noqa: E402
from canaryd_lab.worker.exact_canary.prove import Walk  # noqa: E402
from canaryd_lab.worker.safetensors import read_safetensors  # noqa: E402

from canaryd.probe import Skip  # noqa: E402
from canaryd.worker.exact_canary import expected  # noqa: E402
from canaryd.worker.exact_canary.run import Runner  # noqa: E402
from tests.headers import tensors  # noqa: E402

FILES = ("config", "expected", "generation_config", "tokenizer", "tokenizer_config")


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A directory, and its documents by name."""
    directory = tmp_path_factory.mktemp("exported") / "canary"
    model = construct(TINY, 5)
    export(model, directory)
    return model, directory, {name: json.loads((directory / f"{name}.json").read_text()) for name in FILES}


def test_the_files_hold_the_model(exported):
    """Weights in bfloat16 without a changed bit; sizes and constants in config.json; one word per token."""
    model, directory, documents = exported
    weights, _ = read_safetensors((directory / "model.safetensors").read_bytes())
    assert weights.keys() == model.weights.keys()
    assert all(torch.equal(weights[name].to(torch.float32), model.weights[name]) for name in weights)
    assert like(documents["config"]) == TINY
    assert documents["config"]["rope_theta"] == documents["config"]["rope_parameters"]["rope_theta"] == 1e38
    words = documents["tokenizer"]["model"]["vocab"]
    assert sorted(words.values()) == list(range(TINY.vocabulary))
    for prompt in documents["expected"]["prompts"]:
        assert [words[word] for word in prompt["text"].split()] == prompt["prompt"]
        assert [words[word] for word in prompt["continuation"].split()] == prompt["tokens"]


def test_the_expected_answers_are_what_the_files_give(exported):
    """Tokens, and log probabilities by a softmax in float64."""
    _, directory, documents = exported
    weights, _ = read_safetensors((directory / "model.safetensors").read_bytes())
    for prompt in documents["expected"]["prompts"]:
        with torch.inference_mode():
            tokens, logits = Runner(TINY, weights).decode(torch.tensor([prompt["prompt"]]), len(prompt["tokens"]))
        assert tokens[0].tolist() == prompt["tokens"]
        found = torch.log_softmax(logits[0].double(), -1)[range(len(prompt["tokens"])), prompt["tokens"]]
        wanted = torch.tensor(prompt["log_probabilities"], dtype=torch.float64)
        assert torch.allclose(found, wanted, rtol=0, atol=1e-12)


def test_the_bounds_of_the_answers_hold_for_every_candidate(exported):
    """Each word of the program lies below the right one by what its wrong bits cost; the others are below 4."""
    model, directory, _ = exported
    found = expected.load(directory)
    question = found.questions[1]
    logits = Walk(TINY, model.weights).prove(question.prompt + question.tokens[:-1]).logits[-len(question.tokens) :]
    for right, row in zip(question.tokens, logits.tolist(), strict=True):
        assert row[: model.program.words] == [expected.RIGHT - found.cost(right, i) for i in range(model.program.words)]
        assert max(map(abs, row[model.program.words :])) <= expected.MOST_SAID
        assert found.cost(right, model.program.words) is None


SPOILT = {
    "another prompt": lambda d: d["prompts"][2]["prompt"].reverse(),
    "another text": lambda d: d["prompts"][2].update(text=d["prompts"][1]["text"]),
    "another word": lambda d: d["prompts"][7]["tokens"].__setitem__(39, 1020),
    "a missing word": lambda d: d["prompts"][7]["tokens"].pop(),
    "a probability that cannot be": lambda d: d["prompts"][0]["log_probabilities"].__setitem__(3, -0.0034),
    "another seed": lambda d: d.update(seed=6),
    "another number of layers": lambda d: d["shape"].update(layers=2),
    "no prompts": lambda d: d.update(prompts=[]),
    "another document": lambda d: d.pop("schema"),
    "sizes that no model has": lambda d: d["shape"].update(heads=1),
}


@pytest.mark.parametrize("change", SPOILT)
def test_a_file_that_does_not_agree_with_its_seed_is_refused(exported, tmp_path, change):
    """Prompts, words and bounds are made again from the seed: nothing is believed because it stands there."""
    _, directory, documents = exported
    assert len(expected.load(directory).questions) == 8
    document = json.loads(json.dumps(documents["expected"]))
    SPOILT[change](document)
    (tmp_path / "expected.json").write_text(json.dumps(document))
    with pytest.raises(Skip, match="canary export"):
        expected.load(tmp_path)


def test_changed_weights_on_disk_are_seen(exported, tmp_path):
    """One bit of the file; a directory without weights says nothing."""
    _, directory, _ = exported
    assert expected.load(directory).changed_file() == ""
    shutil.copy(directory / "expected.json", tmp_path)
    assert expected.load(tmp_path).changed_file() == ""
    data = bytearray((directory / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (tmp_path / "model.safetensors").write_bytes(data)
    assert "is not the file" in expected.load(tmp_path).changed_file()


def test_texts_are_read_whatever_white_space_stands_between(exported):
    """And a text with another word is none of this tokenizer's."""
    model, directory, _ = exported
    program, question = model.program, expected.load(directory).questions[0]
    text = expected.spell(program, question.tokens)
    for given in (text, f" {text}\n", text.replace(" ", ""), text.replace(" ", "  ")):
        assert expected.tokens_of(program, given) == question.tokens
    assert expected.tokens_of(program, "anchor unused1025 p0v0") == [1024, 1025, 0]
    for given in ("p24v3 said", "p24", "p024v3", "unused3", "p99v3", "p3v99"):
        assert expected.tokens_of(program, given) is None


# --- The command -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def common(tmp_path_factory):
    """A configuration whose workers have torch."""
    directory = tmp_path_factory.mktemp("command")
    settings = {"worker": {"python": sys.executable}, "state_dir": str(directory / "state")}
    return ("--config", configure(directory, **settings))


def test_the_command_takes_a_served_models_sizes(common, tmp_path):
    """What fits is written, and the next steps are named; the configuration lines are ready to be pasted."""
    config = {
        "model_type": "qwen2",
        "hidden_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 320,
        "num_hidden_layers": 9,
        "vocab_size": 700,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    out = tmp_path / "out"
    done = canaryd("canary", "export", out, "--like", tmp_path / "config.json", "--layers", "2", *common)
    assert (done.code, done.err) == (0, "")
    written = json.loads((out / "config.json").read_text())
    assert {name: written[name] for name in config} == {**config, "num_hidden_layers": 2}
    lines = done.out.split("\n\n")[1]
    assert yaml.safe_load(lines)["endpoints"]["exact"]["exact"] == str(out)
    assert expected.load(out).changed_file() == ""
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "out"]


BAD = (
    (("{0}/full",), 64, "not empty"),
    (("{0}/full/file",), 64, "not a directory"),
    (("{0}/missing/out",), 64, "name a directory in one that exists"),
    (("{0}/out", "--like", "{0}/missing"), 64, "No such file"),
    (("{0}/out", "--like", "{0}/full/file"), 64, "not a JSON object"),
    (("{0}/out", "--like", "{0}/odd.json"), 64, "multiples of 16"),
)
"""What is typed ("{0}" is the test's directory), the exit status, and what is said."""


def test_bad_input_gets_one_clear_line(common, tmp_path):
    """Where and why, and nothing is written."""
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("x")
    odd = {"model_type": "llama", "hidden_size": 100, "num_attention_heads": 2, "intermediate_size": 64}
    (tmp_path / "odd.json").write_text(json.dumps({**odd, "num_hidden_layers": 2, "vocab_size": 700}))
    typed = [("canary", "export", *(word.format(tmp_path) for word in arguments), *common) for arguments, _, _ in BAD]
    for (arguments, code, said), done in zip(BAD, in_turn(*typed), strict=True):
        assert done.code == code, (arguments, done)
        (line,) = done.err.splitlines()
        assert line.startswith("canaryd: ")
        assert said in line
    assert not (tmp_path / "out").exists()


def test_a_size_that_is_not_there_is_named():
    """The command says it as it says that sizes do not fit (above)."""
    short = {"model_type": "llama", "num_attention_heads": 2}
    arguments = {"directory": "/nonexistent", "like": short, "layers": 4, "seed": 1, "no_anchor": False, "form": ""}
    assert answer(arguments, lambda *_: None) == {"mistake": "has no hidden_size"}


def test_without_torch_it_says_what_to_do(tmp_path):
    """One line that names worker.python, and exit status 3."""
    settings = {"worker": {"python": str(bare_python())}, "state_dir": str(tmp_path / "state")}
    done = canaryd("canary", "export", tmp_path / "out", "--config", configure(tmp_path, **settings))
    assert done.code == 3, done
    assert "worker.python" in done.err.splitlines()[-1]
    assert not (tmp_path / "out").exists()


def test_transformers_gives_the_expected_answers(exported):
    """Where transformers is installed: its greedy decoding gives the words, in float32 and bfloat16."""
    pytest.importorskip("transformers", reason="transformers is not installed in this interpreter")
    _, directory, documents = exported
    code = f"""
import json, torch
from transformers import LlamaForCausalLM
expected = json.load(open({str(directory / "expected.json")!r}))["prompts"][0]
ids = torch.tensor([expected["prompt"]])
for dtype in (torch.float32, torch.bfloat16):
    model = LlamaForCausalLM.from_pretrained({str(directory)!r}, dtype=dtype).eval()
    found = model.generate(ids, max_new_tokens=len(expected["tokens"]), do_sample=False)
    assert found[0, ids.shape[1]:].tolist() == expected["tokens"], dtype
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert documents["expected"]["anchored"]


# --- GGUF ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("form", "kind"), [("bfloat16", "30"), pytest.param("float32", "0", marks=pytest.mark.slow)])
def test_a_gguf_file_holds_the_same_numbers(exported, tmp_path, form, kind):
    """Read back, every tensor has the model's bits; rows of q and k stand as llama.cpp turns them."""
    model, _, documents = exported
    directory = tmp_path / "out"
    export(model, directory, form=form)
    assert sorted(p.name for p in directory.iterdir()) == ["expected.json", "model.gguf"]
    assert json.loads((directory / "expected.json").read_text())["prompts"] == documents["expected"]["prompts"]
    assert expected.load(directory).changed_file() == ""
    data = (directory / "model.gguf").read_bytes()
    found = {t.name: t for t in tensors(directory / "model.gguf")}
    assert len(found) == len(model.weights)
    half = TINY.head // 2
    for name, weight in model.weights.items():
        tensor = found[ggml_name(name)]
        stored = torch.float32 if weight.dim() == 1 else getattr(torch, form)
        assert tensor.dtype == ("0" if weight.dim() == 1 else kind)
        read = torch.frombuffer(bytearray(data[tensor.begin : tensor.end]), dtype=stored)[: weight.numel()]
        read = read.view(weight.shape).to(torch.float32)
        if ".q_proj." in name or ".k_proj." in name:
            heads, wanted = read.view(-1, TINY.head, TINY.hidden), weight.view(-1, TINY.head, TINY.hidden)
            assert torch.equal(heads[:, 0::2], wanted[:, :half])
            assert torch.equal(heads[:, 1::2], wanted[:, half:])
        else:
            assert torch.equal(read, weight)


def test_a_qwen_keeps_its_rows_in_a_gguf_file(tmp_path):
    """llama.cpp turns the pairs of a Qwen2 as Hugging Face does; biases stay float32."""
    model = construct(
        Shape(hidden=256, heads=4, kv_heads=2, head=64, inner=256, layers=1, vocabulary=1152, family="qwen2"), 1
    )
    export(model, tmp_path / "out", form="float16")
    data = (tmp_path / "out/model.gguf").read_bytes()
    found = {t.name: t for t in tensors(tmp_path / "out/model.gguf")}
    for part, stored in (("weight", torch.float16), ("bias", torch.float32)):
        wanted = model.weights[f"model.layers.0.self_attn.q_proj.{part}"]
        tensor = found[f"blk.0.attn_q.{part}"]
        read = torch.frombuffer(bytearray(data[tensor.begin : tensor.end]), dtype=stored)[: wanted.numel()]
        assert torch.equal(read.view(wanted.shape).to(torch.float32), wanted)


def test_changed_weights_of_a_gguf_file_are_seen(exported, tmp_path):
    """One bit of the file."""
    model, _, _ = exported
    export(model, tmp_path / "out", form="bfloat16")
    path = tmp_path / "out/model.gguf"
    data = bytearray(path.read_bytes())
    data[-1000] ^= 1
    path.write_bytes(data)
    assert "model.gguf is not the file" in expected.load(tmp_path / "out").changed_file()
