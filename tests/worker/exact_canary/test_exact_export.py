"""The exported checkpoint: files that other programs can load, with the answers that they must give."""

import json
import os
import subprocess
import sys

import pytest

from canaryd.worker.exact_canary.shape import TINY, like
from tests.command import ROOT

torch = pytest.importorskip("torch", reason="the numeric worker is tested where torch is installed")
pytestmark = pytest.mark.torch

from canaryd.worker.canary.model import read_safetensors  # noqa: E402
from canaryd.worker.exact_canary.construct import construct  # noqa: E402
from canaryd.worker.exact_canary.export import export  # noqa: E402
from canaryd.worker.exact_canary.run import Runner  # noqa: E402
from tools.export_exact_canary import main  # noqa: E402

FILES = ("config", "expected", "generation_config", "tokenizer", "tokenizer_config")


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A directory, and its documents by name."""
    directory = tmp_path_factory.mktemp("exported")
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


def test_the_command_takes_a_served_models_sizes(tmp_path, capsys):
    """What fits is written; what does not is named, with exit code 64 and nothing written."""
    config = {
        "model_type": "qwen2",
        "hidden_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 320,
        "num_hidden_layers": 9,
        "vocab_size": 700,
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert main([str(tmp_path / "out"), "--like", str(path), "--layers", "2"]) == 0
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert {name: written[name] for name in config} == {**config, "num_hidden_layers": 2}
    path.write_text(json.dumps({**config, "hidden_size": 100}))
    assert main([str(tmp_path / "other"), "--like", str(path)]) == 64
    assert "multiples of 16" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


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
