"""The tests' own checkpoint, and the real servers that are started on it."""

import json
import re
import shutil
import struct
import threading
import time
from http.client import HTTPException
from typing import Any, NamedTuple

import pytest

from canaryd.worker.canary.safetensors import read_safetensors
from tests import checkpoints
from tests.servers import KINDS, serving

torch = pytest.importorskip("torch", reason="the checkpoint is made with torch")
pytestmark = pytest.mark.torch

PROMPT = {"prompt": "The reef holds fish, coral and 42 crabs.", "max_tokens": 24, "temperature": 0, "seed": 7}
TALK = {"messages": [{"role": "user", "content": "Name a fish."}], "max_tokens": 24, "temperature": 0, "seed": 7}


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A checkpoint that no test changes."""
    return checkpoints.make(tmp_path_factory.mktemp("original"))


@pytest.fixture
def copy(original, tmp_path):
    """A checkpoint that the test may change."""
    return shutil.copytree(original, tmp_path / "copy")


def weights(directory):
    return read_safetensors((directory / "model.safetensors").read_bytes())[0]


class Answer(NamedTuple):
    """What a server said, what it said of its chances, and the number of prompt tokens."""

    text: str
    logprobs: Any
    tokens: int


def ask(server, path="completions", body=PROMPT):
    status, answer = server.ask(path, body)
    assert status == 200, answer
    choice = answer["choices"][0]
    text = choice.get("text") or choice["message"]["content"]
    return Answer(text, choice.get("logprobs"), answer["usage"]["prompt_tokens"])


def seconds(server):
    begun = time.monotonic()
    ask(server, body=PROMPT | {"max_tokens": 6})
    return time.monotonic() - begun


def test_the_same_seed_makes_the_same_files(original, tmp_path):
    """Two checkpoints of one seed are equal byte by byte; another seed changes the weights alone."""
    again, other = checkpoints.make(tmp_path / "again"), checkpoints.make(tmp_path / "other", seed=5)
    for path in original.iterdir():
        assert (again / path.name).read_bytes() == path.read_bytes()
        assert ((other / path.name).read_bytes() == path.read_bytes()) == (path.name != "model.safetensors")


def test_the_vocabulary_is_whole(original):
    """Every id has one token, every merge makes a token, and the model has a row for each."""
    tokenizer = json.loads((original / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    ids = [*vocabulary.values(), *(token["id"] for token in tokenizer["added_tokens"])]
    assert ids == list(range(512))
    assert all(a in vocabulary and b in vocabulary and a + b in vocabulary for a, b in tokenizer["model"]["merges"])
    found = weights(original)
    assert found["model.embed_tokens.weight"].shape == found["lm_head.weight"].shape == (512, 256)
    assert sum(tensor.numel() for tensor in found.values()) == 3_412_224


@pytest.mark.parametrize("dtype", ["float32", pytest.param("float16", marks=pytest.mark.slow)])
def test_another_format_holds_the_same_weights(dtype, original, copy, tmp_path):
    """Stored in another format, no weight that float16 holds as a normal number changes; `make` gives the same file."""
    checkpoints.other_dtype(copy, dtype)
    assert json.loads((copy / "config.json").read_text())["dtype"] == dtype
    found = weights(copy)
    for name, tensor in weights(original).items():
        stored = found[name]
        assert stored.dtype == getattr(torch, dtype)
        normal = (tensor.float().abs() >= 2**-14) | (dtype == "float32")
        assert torch.equal(stored.float()[normal], tensor.float()[normal])
    made = checkpoints.make(tmp_path / "made", dtype=dtype)
    assert (made / "model.safetensors").read_bytes() == (copy / "model.safetensors").read_bytes()


@pytest.mark.parametrize(("dtype", "exponent"), [("bfloat16", range(7, 15)), ("float32", range(23, 31))])
def test_a_flip_changes_one_exponent_bit_of_one_weight(dtype, exponent, tmp_path):
    """Of ten flips each is one bit, in the exponent, and where the description says; seeds choose different weights."""
    directory, told = checkpoints.make(tmp_path, dtype=dtype), set()
    path, before = directory / "model.safetensors", weights(directory)
    whole = path.read_bytes()
    for seed in range(10):
        path.write_bytes(whole)
        told.add(description := checkpoints.flip_bit(directory, seed))
        name, place, bit, old, new = re.fullmatch(
            r"(.+)\[([\d, ]+)\]: bit (\d+), (\S+) became (\S+)", description
        ).groups()
        assert int(bit) in exponent
        assert (int.from_bytes(path.read_bytes(), "big") ^ int.from_bytes(whole, "big")).bit_count() == 1
        index = tuple(map(int, place.split(", ")))
        assert (f"{before[name][index]:g}", f"{weights(directory)[name][index]:g}") == (old, new)
    assert len(told) == 10


def test_the_other_changes_leave_the_weights_alone(original, copy):
    """Another tokenizer has the same ids and half the merges; another template differs in that entry alone."""
    checkpoints.other_tokenizer(copy)
    checkpoints.other_template(copy)
    changed = [path.name for path in original.iterdir() if path.read_bytes() != (copy / path.name).read_bytes()]
    assert sorted(changed) == ["tokenizer.json", "tokenizer_config.json"]
    old, new = (json.loads((directory / "tokenizer.json").read_text())["model"] for directory in (original, copy))
    assert new["vocab"] == old["vocab"]
    assert new["merges"] == old["merges"][::2]


def test_gguf_has_a_header_and_aligned_tensors(original, tmp_path):
    """The file begins as GGUF 3 with one entry per tensor, and holds each matrix and vector at its width."""
    data = checkpoints.gguf(original, tmp_path / "tiny.gguf", "float16").read_bytes()
    magic, version, tensors, facts = struct.unpack_from("<4sIQQ", data)
    found = weights(original)
    assert (magic, version, tensors, facts) == (b"GGUF", 3, len(found), 20)
    assert len(data) % 32 == 0
    body = sum(tensor.numel() * (4 if tensor.dim() == 1 else 2) for tensor in found.values())
    assert body < len(data) < body + 32_768


@pytest.mark.servers
@pytest.mark.parametrize("name", KINDS)
def test_a_server_starts_answers_dies_and_answers_the_same_again(name, original, tmp_path):
    """Killed, a server refuses connections; started again it gives the same text. Paused it is silent, slowed late."""
    with serving(name, original, tmp_path) as server:
        first = ask(server)
        assert len(first.text) > 20
        assert ask(server, "chat/completions", TALK).text
        usual = min(seconds(server) for _ in range(3))
        with server.slowed():
            assert seconds(server) > 2 * usual
        with server.paused(), pytest.raises(TimeoutError):
            server.ask("completions", PROMPT, timeout=1.0)
        assert ask(server) == first
        server.kill()
        with pytest.raises(OSError, match="refused"):
            server.ask("completions", PROMPT)
        server.start()
        assert ask(server) == first


@pytest.mark.servers
@pytest.mark.parametrize("name", KINDS)
def test_a_server_killed_while_it_answers_breaks_off(name, original, tmp_path):
    """A request that is under way when its server is killed ends with an error, and does not hang."""
    with serving(name, original, tmp_path) as server, server.slowed():
        timer = threading.Timer(0.5, server.kill)
        timer.start()
        with pytest.raises((OSError, HTTPException)):
            server.ask("completions", PROMPT | {"max_tokens": 900})
        timer.join()


@pytest.mark.servers
@pytest.mark.parametrize(("name", "wanted"), [("mlx", True), ("llama", 1)])
def test_every_change_of_the_checkpoint_shows_in_the_answers(name, wanted, original, tmp_path):
    """Another tokenizer or template changes the prompt's tokens where it applies, a flip or format only the numbers."""

    def answers(change):
        directory = tmp_path / "copy"
        shutil.copytree(original, directory)
        change(directory)
        with serving(name, directory, tmp_path) as server:
            found = [ask(server, body=PROMPT | {"logprobs": wanted}), ask(server, "chat/completions", TALK)]
        shutil.rmtree(directory)
        return found

    completed, talked = answers(lambda _: None)
    assert answers(lambda _: None) == [completed, talked]
    other = answers(checkpoints.other_tokenizer)
    assert other[0].tokens > completed.tokens
    assert other[1].tokens > talked.tokens
    other = answers(checkpoints.other_template)
    assert other[0] == completed
    assert other[1].tokens > talked.tokens
    for change in (lambda copy: checkpoints.other_dtype(copy, "float32"), lambda copy: checkpoints.flip_bit(copy, 1)):
        other = answers(change)
        assert (other[0].tokens, other[1].tokens) == (completed.tokens, talked.tokens)
        assert other[0].logprobs != completed.logprobs
