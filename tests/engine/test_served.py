"""Endpoint canaries on real servers that others wrote: what changed is told apart, and clean runs raise no alarm.

`scripts/servers` installs the servers; those that are not there are skipped aloud (docs/testing.md).
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from canaryd.config import load
from canaryd.model import Cause, State
from tests import checkpoints
from tests.servers import KINDS, UNKNOWN
from tests.watched import Watched

pytestmark = pytest.mark.servers


@pytest.fixture(scope="module", params=KINDS)
def watched(request, tmp_path_factory) -> Iterator[Watched]:
    """Return a server of each kind that has been learnt, with its checkpoint's directory named."""
    found = Watched(request.param, tmp_path_factory.mktemp(request.param))
    found.server.start()
    found.learn()
    keep = found.checkpoint.with_name("kept")
    shutil.copytree(found.checkpoint, keep)
    yield found
    found.server.stop()


@pytest.fixture
def clean(watched):
    """Return it as it was learnt, and put its checkpoint back afterwards."""
    watched.ask()
    assert watched.state is State.HEALTHY, watched.found()
    yield watched
    watched.server.stop()
    shutil.rmtree(watched.checkpoint)
    shutil.copytree(watched.checkpoint.with_name("kept"), watched.checkpoint)
    watched.server.start()


def test_known_answers_pass_under_load_and_after_a_restart(clean):
    """Cold, warm, alone, batched with others, and by a new process: no alarm."""
    with clean.load():
        for _ in range(5):
            clean.ask()
            assert clean.state is State.HEALTHY, clean.found()
    with clean.restarted():
        pass
    clean.ask()
    assert clean.state is State.HEALTHY, clean.found()
    assert "endpoint-departed" not in clean.behind


CHANGES = {
    "checkpoint": lambda directory: [checkpoints.flip_bit(directory, seed) for seed in range(12)],  # also in text alone
    "tokenizer": checkpoints.other_tokenizer,
    "template": checkpoints.other_template,
    "dtype": lambda directory: checkpoints.other_dtype(directory, "float32"),
}


@pytest.mark.parametrize("link", CHANGES)
def test_a_changed_link_is_named_and_accuses_no_device(clean, link):
    """Weights, tokenizer, template and format: the first link that changed is told, and hardware is not accused."""
    with clean.restarted():
        CHANGES[link](clean.checkpoint)
    clean.ask()
    found = clean.found()
    assert link in found["chain-changed"].evidence[0].partition("Changed: ")[2].split(" (")[0], found
    assert not {"recording-departed"} & set(found)
    assert "endpoint-departed" not in clean.behind
    assert all(f.cause is not Cause.HARDWARE for f in found.values())


def test_a_killed_server_is_unknown_and_says_why(clean):
    """Not healthy, not hardware, and the device behind it is left alone."""
    clean.server.kill()
    clean.ask()
    found = clean.found()["not-completed"]
    assert (found.state, found.cause) == (State.UNKNOWN, Cause.ENVIRONMENT)
    assert "refused" in found.message
    assert "endpoint-departed" not in clean.behind


def test_a_paused_server_is_told_from_a_dead_one(clean):
    """It takes connections and never answers."""
    clean.engine.config = load.load(short_of_patience(clean.file))
    with clean.server.paused():
        clean.ask()
    clean.engine.config = load.load(clean.file)
    found = clean.found()["not-completed"]
    assert found.state is State.UNKNOWN
    assert "connected, but no complete answer" in found.message


def short_of_patience(file: Path) -> Path:
    path = file.with_name("hasty.yaml")
    path.write_text(file.read_text().replace('"30s"', '"2s"'))
    return path


@pytest.mark.parametrize("name", ["mlx", "llama"])
def test_a_flipped_bit_that_no_link_shows_is_a_departure(name, tmp_path):
    """Where nobody named the checkpoint's directory: confirmed by three re-runs, and whose fault it is stays open."""
    blind = Watched(name, tmp_path, told=False)
    blind.server.start()
    try:
        blind.learn()
        for _ in range(3):
            blind.ask()
        with blind.restarted():
            checkpoints.flip_bit(blind.checkpoint, seed=3)
        runs = blind.ask()
        assert sum(bool(r.confirms) for r in runs) == 3
        found = blind.found()["recording-departed"]
        assert (found.state, found.cause) == (State.SUSPECT, Cause.UNDETERMINED)
        assert blind.behind["endpoint-departed"].state is State.HEALTHY
    finally:
        blind.server.stop()


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_server_without_a_dialect_is_learnt_and_compared(name, tmp_path):
    """A GPT-NeoX behind a proxy, or on a server that canaryd does not know: clean runs are healthy, flips depart."""
    strange = Watched(name, tmp_path, told=False, family="gpt_neox")
    strange.server.start()
    try:
        strange.learn()
        for _ in range(3):
            strange.ask()
            assert strange.state is State.HEALTHY, strange.found()
        with strange.restarted():
            for seed in range(11):  # the twelfth makes infinities: FastChat answers those with 500, which is `unknown`
                checkpoints.flip_bit(strange.checkpoint, seed)
        strange.ask()
        found = strange.found()["recording-departed"]
        assert (found.state, found.cause) == (State.SUSPECT, Cause.UNDETERMINED)
    finally:
        strange.server.stop()
