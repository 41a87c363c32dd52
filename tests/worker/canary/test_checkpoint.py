"""Fingerprints of checkpoints: each link moves alone, what is irrelevant moves none, every damage is one clear line."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from canaryd.facts import LINKS
from canaryd.worker.canary import checkpoint
from canaryd.worker.canary.checkpoint import BadCheckpoint, links
from tests.command import ROOT, environment

torch = pytest.importorskip("torch", reason="tiny checkpoints are made with torch")
pytestmark = pytest.mark.torch

from canaryd_lab.worker.safetensors import read_safetensors, write_safetensors  # noqa: E402

from tests import checkpoints  # noqa: E402

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    return checkpoints.make(tmp_path_factory.mktemp("clean") / "tiny")


@pytest.fixture
def copy(clean, tmp_path):
    return Path(shutil.copytree(clean, tmp_path / "copy"))


def edit(file: Path, **changes) -> None:
    content = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(content | changes))


def flip(file: Path, at: int, bit: int = 0) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1 << bit
    file.write_bytes(data)


def split(directory: Path) -> None:
    """Put the weights into two shards, the last tensors first."""
    weights, _ = read_safetensors((directory / WEIGHTS).read_bytes())
    names = sorted(weights, reverse=True)
    halves = {"b.safetensors": names[:20], "a.safetensors": names[20:]}
    for shard, group in halves.items():
        (directory / shard).write_bytes(write_safetensors({n: weights[n] for n in group}, {}))
    edit(directory / f"{WEIGHTS}.index.json", weight_map={n: shard for shard, group in halves.items() for n in group})
    (directory / WEIGHTS).unlink()


def moved(before: dict[str, str], after: dict[str, str]) -> set[str]:
    return {link for link in {*before, *after} if before.get(link) != after.get(link)}


# --- Hugging Face directories ----------------------------------------------------------------------------------------


def test_a_checkpoint_has_five_links(clean, copy):
    """Sixteen hex digits each, of the names that chains have; a copy elsewhere has the same."""
    found = links(clean)
    assert list(found) == ["checkpoint", "config", "dtype", "tokenizer", "template"]
    assert set(found) <= set(LINKS)
    assert all(len(value) == 16 and set(value) <= set("0123456789abcdef") for value in found.values())
    assert len(set(found.values())) == 5
    assert links(copy) == found


CHANGES = {
    "last bit of the last weight": ({"checkpoint"}, lambda d: flip(d / WEIGHTS, -2)),
    "a merge of the tokenizer": ({"tokenizer"}, checkpoints.other_tokenizer),
    "a setting of the tokenizer": ({"tokenizer"}, lambda d: edit(d / "tokenizer_config.json", add_prefix_space=True)),
    "a vocabulary file": ({"tokenizer"}, lambda d: (d / "merges.txt").write_text("a b\n")),
    "the template": ({"template"}, checkpoints.other_template),
    "a template of its own": ({"template"}, lambda d: (d / "chat_template.jinja").write_text("{{ messages }}")),
    "the dtype that is said": ({"dtype"}, lambda d: edit(d / "config.json", dtype="float16")),
    "a size": ({"config"}, lambda d: edit(d / "config.json", rope_theta=1e6)),
    "generation": ({"config"}, lambda d: edit(d / "generation_config.json", do_sample=True)),
    "another split into shards": ({"checkpoint"}, split),
    "who made it": (set(), lambda d: edit(d / "config.json", transformers_version="9.9", _name_or_path="x")),
    "an older name of a field": (
        set(),
        lambda d: (d / "config.json").write_text((d / "config.json").read_text().replace('"dtype"', '"torch_dtype"')),
    ),
    "a read-me": (set(), lambda d: (d / "README.md").write_text("tiny")),
}


@pytest.mark.parametrize(("wanted", "change"), CHANGES.values(), ids=CHANGES)
def test_each_change_of_a_directory_moves_its_own_link_alone(clean, copy, wanted, change):
    """Attribution rests on this: a flipped weight is no other template."""
    change(copy)
    assert moved(links(clean), links(copy)) == wanted


BROKEN = {
    "nothing there": ("does not exist", shutil.rmtree),
    "no config": ("has no config.json", lambda d: (d / "config.json").unlink()),
    "a broken config": ("is not JSON", lambda d: (d / "config.json").write_text("{")),
    "a config that is a list": ("holds list; wanted an object", lambda d: (d / "config.json").write_text("[]")),
    "no weights": ("has no weights; wanted model.safetensors", lambda d: (d / WEIGHTS).unlink()),
    "a missing shard": ("a.safetensors: a shard", lambda d: (split(d), (d / "a.safetensors").unlink())),
    "an index that leads elsewhere": (
        "files of the same directory",
        lambda d: ((d / WEIGHTS).unlink(), edit(d / f"{WEIGHTS}.index.json", weight_map={"x": "../x"})),
    ),
    "an index without tensors": (
        "wanted a weight_map",
        lambda d: ((d / WEIGHTS).unlink(), edit(d / f"{WEIGHTS}.index.json", weight_map=[])),
    ),
}


@pytest.mark.parametrize(("wanted", "damage"), BROKEN.values(), ids=BROKEN)
def test_a_broken_directory_is_one_clear_line(copy, wanted, damage):
    """Which file, what is wrong with it."""
    damage(copy)
    with pytest.raises(BadCheckpoint) as caught:
        links(copy)
    assert wanted in str(caught.value)
    assert str(copy) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_an_unreadable_file_is_one_clear_line(copy):
    """It names the file and the system's reason."""
    (copy / WEIGHTS).chmod(0)
    with pytest.raises(BadCheckpoint, match=f"{WEIGHTS}: cannot be read: Permission denied"):
        links(copy)


# --- Reading once ----------------------------------------------------------------------------------------------------


def test_a_file_is_read_again_only_when_it_was_written_or_when_asked(copy):
    """A flipped bit under the old times is found too: the time of change cannot be set."""
    told: list[float] = []

    def read(**how) -> tuple[dict[str, str], int]:
        told.clear()
        return links(copy, progress=lambda fraction, _: told.append(fraction), **how), len(told)

    first, blocks = read()
    assert blocks >= (copy / WEIGHTS).stat().st_size / checkpoint.BLOCK
    assert told == sorted(told)
    assert 0 <= told[0] <= told[-1] < 1
    assert read() == (first, 0)
    assert read(thorough=True) == (first, blocks)
    times = (copy / WEIGHTS).stat()
    flip(copy / WEIGHTS, -2)
    os.utime(copy / WEIGHTS, ns=(times.st_atime_ns, times.st_mtime_ns))
    after, again = read()
    assert (moved(first, after), again) == ({"checkpoint"}, blocks)


def test_a_file_that_is_written_to_while_it_is_read_is_refused(copy):
    """Half of the old weights and half of the new ones are no checkpoint."""
    with pytest.raises(BadCheckpoint, match="changed while it was read"):
        links(copy, progress=lambda *_: os.utime(copy / WEIGHTS))
    assert links(copy)


def test_it_needs_the_standard_library_alone():
    """An endpoint's probe runs where there is no torch."""
    code = "import canaryd.worker.canary.checkpoint, sys; print('torch' in sys.modules, 'numpy' in sys.modules)"
    argv = [sys.executable, "-c", code]
    done = subprocess.run(argv, cwd=ROOT, env=environment(), capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_a_split_gguf_is_read_as_one(tmp_path):
    """Its shards count in their order, a missing one is named, and a flipped bit of any shows."""
    first, second = (tmp_path / f"two-0000{n}-of-00002.gguf" for n in (1, 2))
    first.write_bytes(b"GGUF one")
    with pytest.raises(BadCheckpoint, match=r"two-00002-of-00002\.gguf: a shard of this checkpoint is missing"):
        links(first)
    second.write_bytes(b"GGUF two")
    before = links(first)
    flip(second, -1)
    assert moved(before, links(first)) == {"checkpoint"}


def test_another_process_need_not_read_it_again(copy, tmp_path):
    """What a file held is remembered by its stamp; a changed file, or a doubt, has it read again."""
    memory = tmp_path / "memory"
    checkpoint._READ.clear()
    first = links(copy, memory=str(memory))
    (file,) = memory.glob("*")
    said = json.loads(file.read_text())
    file.write_text(json.dumps(dict.fromkeys(said, "0" * 64)))
    checkpoint._READ.clear()
    assert links(copy, memory=str(memory))["checkpoint"] != first["checkpoint"]  # it was believed
    checkpoint._READ.clear()
    assert links(copy, memory=str(memory), thorough=True) == first  # in doubt it is read
    assert json.loads(file.read_text()) == said
    checkpoint._READ.clear()
    for damaged in ("{", json.dumps({stamp: {"a tensor": "0" * 64} for stamp in said})):
        file.write_text(damaged)
        checkpoint._READ.clear()
        assert links(copy, memory=str(memory)) == first
    assert json.loads(file.read_text()) == said
