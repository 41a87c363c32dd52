"""The tests' own checkpoint, and the real servers that are started on it."""

import shutil
import threading
import time
from http.client import HTTPException
from typing import Any, NamedTuple

import pytest

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
