"""The exact canary through real servers that others wrote: 0 wrong answers, alone and under load, and faults are seen.

`scripts/servers` installs the servers; those that are not there are skipped aloud (docs/testing.md).
"""

from __future__ import annotations

import json
import random
import shutil

import pytest

torch = pytest.importorskip("torch", reason="the exact canary is made with torch")
pytestmark = [pytest.mark.servers, pytest.mark.torch]

from canaryd_lab.worker.exact_canary.construct import construct  # noqa: E402
from canaryd_lab.worker.exact_canary.export import export  # noqa: E402
from canaryd_lab.worker.exact_canary.quantised import FORMS  # noqa: E402

from canaryd.facts import Comparison  # noqa: E402
from canaryd.probe import Skip  # noqa: E402
from canaryd.worker.exact_canary.expected import load  # noqa: E402
from canaryd.worker.exact_canary.shape import EXPERTS, TINY  # noqa: E402
from probes import exact_endpoint  # noqa: E402
from tests.command import ROOT  # noqa: E402
from tests.headers import tensors  # noqa: E402
from tests.servers import beside, need, serving  # noqa: E402
from tests.worker.endpoint.served import context  # noqa: E402

ENGINES = ("mlx", "transformers", "llama", "vllm")
"""Servers that were tried."""
PYTHON = ("mlx", "transformers")
"""Servers whose products tests/faulty_server can break."""
CLIENTS = 8
BFLOAT16 = "30"
"""`ggml_type` of bfloat16."""
QUANTISED = (
    *(("mlx", form) for form in ("awq", "mlx-4bit", "mlx-8bit", "mlx-mxfp8")),
    ("transformers", "fp8"),
    ("vllm", "awq"),
    ("vllm", "w8a8"),
)
"""Servers, and the quantised forms that they read."""
PACKED = ("U32", "I32", "I8", "F8_E4M3")
"""How safetensors names the formats of codes."""


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Exported exact canaries: for the name of an engine that is there, the directory that it serves."""
    parent = tmp_path_factory.mktemp("exact")

    def exported(name):
        need(name)
        form = "bfloat16" if name == "llama" else ""
        if not (path := parent / f"canary{form}").exists():
            export(construct(TINY, 1), path, form=form)
        return path

    return exported


def ask(server, directory, seed):
    """Return the comparisons of a run at level standard."""
    settings = {"exact": str(directory), "model": server.model, "timeout": 60.0}
    given = context(server.url, level="standard", seed=seed, budget=60.0, settings=settings)
    return [fact for fact in exact_endpoint.run(given) if isinstance(fact, Comparison)]


SERVED = [
    *((name, "bfloat16" if name == "llama" else "", TINY) for name in ENGINES),
    *((name, form, TINY) for name, form in QUANTISED),
    *(("llama", form, EXPERTS) for form in ("bfloat16", "float32")),
    *((name, "", EXPERTS) for name in ("vllm", "transformers")),
    # MLX multiplies stacked experts on processors in float32 alone, or quantised.
    *(("mlx", form, EXPERTS) for form in ("mlx-4bit", "mlx-8bit", "mlx-mxfp8")),
    ("transformers", "fp8", EXPERTS),
]


@pytest.mark.parametrize(("name", "form", "shape"), SERVED, ids=str)
def test_a_real_server_answers_rightly_alone_and_beside_others(tmp_path, name, form, shape):
    """Every answer, in words and in what it prints of its log probabilities, also while eight clients are served."""
    need(name)
    directory = tmp_path / "canary"
    export(construct(shape, 1, bits=FORMS[form].whole if form in FORMS else 0), directory, form=form)
    with serving(name, directory, tmp_path) as server:
        alone = ask(server, directory, seed=0)
        with beside(server, [question.text for question in load(directory).questions][:CLIENTS]):
            loaded = ask(server, directory, seed=1)
    for compared in (alone, loaded):
        assert sum(c.trials for c in compared) == 60
        assert [c for c in compared if c.wrong] == []


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("name", "form"), QUANTISED)
def test_a_flipped_bit_of_a_quantised_weight_on_disk_is_seen_in_the_first_answers(tmp_path, name, form, seed):
    """Any bit of a weight that is not 0; without the file's checksum, so that only the answers can tell."""
    need(name)
    how, directory, chance = FORMS[form], tmp_path / "canary", random.Random(f"{form} {seed}")
    export(construct(TINY, 1, bits=how.whole), directory, form=form)
    path = directory / "model.safetensors"
    data = bytearray(path.read_bytes())
    tensor = chance.choice([t for t in tensors(directory) if t.dtype in PACKED and "qzeros" not in t.name])
    bits, signed = how.bits, how.floats or tensor.dtype == "I8"
    zeros = (0, 1 << bits - 1) if signed else (1 << bits - 1,)
    live = [
        (at, shift)
        for at in range(tensor.begin, tensor.end)
        for shift in range(0, 8, bits)
        if data[at] >> shift & (1 << bits) - 1 not in zeros
    ]
    at, shift = chance.choice(live)
    data[at] ^= 1 << shift + chance.randrange(bits)
    path.write_bytes(data)
    alone = tmp_path / "answers"
    alone.mkdir()
    shutil.copy(directory / "expected.json", alone)
    with serving(name, directory, tmp_path) as server:
        compared = ask(server, alone, seed=seed)
    assert compared[0].wrong, f"{tensor.name} at {at - tensor.begin}"


@pytest.mark.parametrize("rate", ["0.02", "0.0005"])
@pytest.mark.parametrize("name", PYTHON)
def test_wrong_products_of_a_real_server_are_seen_at_once(exported, tmp_path, name, rate):
    """One product in 50 or 2,000 has one wrong bit, inside the server's own process: the first run accuses.

    An answer takes some 880 products, and a run has 60 answers: 26 wrong products at 1 in 2,000.
    """
    directory = exported(name)
    broken = {"PYTHONPATH": str(ROOT / "tests/faulty_server"), "CANARYD_TEST_FAULT_RATE": rate}
    with serving(name, directory, tmp_path, **broken) as server:
        compared = ask(server, directory, seed=0)
    wrong = [c for c in compared if c.wrong]
    assert wrong
    assert all(c.characterised for c in wrong)


@pytest.mark.parametrize("seed", range(6))
def test_one_flipped_exponent_bit_on_disk_is_seen_in_the_first_answers(exported, tmp_path, seed):
    """One weight that is not 0, whichever it is; without the file's checksum, so that only the answers can tell."""
    shutil.copytree(exported("llama"), tmp_path / "canary")
    path = tmp_path / "canary/model.gguf"
    data = bytearray(path.read_bytes())
    chance = random.Random(seed)
    found = [t for t in tensors(path) if t.dtype == BFLOAT16 and t.name != "token_embd.weight"]
    tensor = chance.choice(found)
    live = [at for at in range(tensor.begin, tensor.end, 2) if data[at] | data[at + 1] & 0x7F]
    at = chance.choice(live)
    data[at + 1] ^= 1 << chance.randrange(6)  # the sign and the top bit would make infinities or be no exponent
    path.write_bytes(data)
    shutil.copy(tmp_path / "canary/expected.json", tmp_path)
    with serving("llama", tmp_path / "canary", tmp_path) as server:
        compared = ask(server, tmp_path, seed=seed)
    assert [c for c in compared if c.wrong], f"{tensor.name} at {at - tensor.begin}"


@pytest.mark.parametrize("name", ENGINES)
def test_a_server_that_turns_to_another_checkpoint_serves_its_weights(exported, tmp_path, name):
    """All seeds have the same right words, so only a weight that is wrong shows that a server serves the next one."""
    shutil.copytree(exported(name), tmp_path / "canary")
    served = tmp_path / "canary" / ("model.gguf" if name == "llama" else "")
    norm = next(t for t in tensors(served) if t.name in ("model.norm.weight", "output_norm.weight"))
    data = bytearray(norm.file.read_bytes())
    data[norm.end - 1] ^= 1  # a bit of the last weight's exponent, in bfloat16 and in float32
    norm.file.write_bytes(data)
    with serving(name, exported(name), tmp_path, VLLM_SERVER_DEV_MODE="1") as server:
        assert [c for c in ask(server, exported(name), seed=0) if c.wrong] == []
        server.turn_to(tmp_path / "canary")
        assert [c for c in ask(server, exported(name), seed=0) if c.wrong]
        server.turn_to(exported(name))
        assert [c for c in ask(server, exported(name), seed=1) if c.wrong] == []


def test_another_template_of_llama_cpp_is_told_from_a_fault(exported, tmp_path):
    """It is named, and nobody is accused."""
    template = "{% for message in messages %}anchor {{ message['content'] }}{% endfor %}"
    with (
        serving("llama", exported("llama"), tmp_path, "--chat-template", template) as server,
        pytest.raises(Skip, match="a chat template"),
    ):
        ask(server, exported("llama"), seed=0)


@pytest.mark.parametrize("name", [*PYTHON, "vllm"])
def test_a_tokenizer_that_adds_a_word_is_told_from_a_fault(exported, tmp_path, name):
    """The number of tokens in a prompt, as the server counts them, names it."""
    shutil.copytree(exported(name), tmp_path / "canary")
    path = tmp_path / "canary/tokenizer.json"
    document = json.loads(path.read_text())
    first = {"SpecialToken": {"id": "p0v0", "type_id": 0}}
    document["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [first, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [first, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"p0v0": {"id": "p0v0", "ids": [0], "tokens": ["p0v0"]}},
    }
    path.write_text(json.dumps(document))
    with (
        serving(name, tmp_path / "canary", tmp_path) as server,
        pytest.raises(Skip, match=r"its tokenizer is another, or adds words|a chat template or a tokenizer adds"),
    ):
        ask(server, exported(name), seed=0)


def with_generation_config(directory, tmp_path, **document):
    """Return a copy of a checkpoint with another `generation_config.json`, whose values servers take as defaults."""
    copy = shutil.copytree(directory, tmp_path / "canary")
    (copy / "generation_config.json").write_text(json.dumps(document))
    return copy


@pytest.mark.parametrize("name", ["vllm", "transformers"])
def test_the_generation_config_of_a_real_model_changes_no_answer(exported, tmp_path, name):
    """A request says temperature 0, and a penalty lowers only words that came before: the right one never did."""
    usual = {"do_sample": True, "repetition_penalty": 1.1, "temperature": 0.7, "top_k": 20, "top_p": 0.8}
    directory = with_generation_config(exported(name), tmp_path, **usual)
    with serving(name, directory, tmp_path) as server:
        compared = ask(server, directory, seed=0)
    assert sum(c.trials for c in compared) == 60
    assert [c for c in compared if c.wrong] == []


@pytest.mark.parametrize(
    ("name", "penalty", "options", "said"),
    [
        ("vllm", 1.3, ["--logprobs-mode", "processed_logprobs"], "lowers the probability of words that came before"),
        ("vllm", 0.8, ["--logprobs-mode", "processed_logprobs"], "changes the probability of words that came before"),
        ("vllm", 0.5, [], "changes the probability of words that came before"),
    ],
)
def test_a_penalty_of_the_generation_config_is_told_from_a_fault(exported, tmp_path, name, penalty, options, said):
    """Whether the server prints log probabilities from before it, from after it, or none: then the file has to tell."""
    directory = with_generation_config(exported(name), tmp_path, repetition_penalty=penalty)
    with serving(name, directory, tmp_path, *options) as server, pytest.raises(Skip, match=said):
        ask(server, directory, seed=0)


@pytest.mark.parametrize("option", ["-ctk", "-ctv"])
def test_a_quantised_cache_of_llama_cpp_accuses_nobody(exported, tmp_path, option):
    """The server does not tell its cache's format: all is wrong, always in the same way, and not characterised."""
    with serving("llama", exported("llama"), tmp_path, option, "q8_0") as server:
        compared = ask(server, exported("llama"), seed=0)
    assert all(c.wrong_trials == c.trials for c in compared)
    assert not any(c.characterised for c in compared)
