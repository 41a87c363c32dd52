"""Fingerprints of checkpoints: each link moves alone, what is irrelevant moves none, every damage is one clear line."""

from __future__ import annotations

import json
import os
import shutil
import struct
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

from canaryd.worker.canary.safetensors import read_safetensors, write_safetensors  # noqa: E402
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


def patch(file: Path, old: bytes, new: bytes) -> None:
    data = file.read_bytes()
    assert data.count(old) >= 1
    assert len(old) == len(new)
    file.write_bytes(data.replace(old, new))


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
    "an exponent bit of some weight": ({"checkpoint"}, lambda d: checkpoints.flip_bit(d, 5)),
    "a merge of the tokenizer": ({"tokenizer"}, checkpoints.other_tokenizer),
    "a setting of the tokenizer": ({"tokenizer"}, lambda d: edit(d / "tokenizer_config.json", add_prefix_space=True)),
    "a vocabulary file": ({"tokenizer"}, lambda d: (d / "merges.txt").write_text("a b\n")),
    "the template": ({"template"}, checkpoints.other_template),
    "a template of its own": ({"template"}, lambda d: (d / "chat_template.jinja").write_text("{{ messages }}")),
    "no template": ({"template"}, lambda d: edit(d / "tokenizer_config.json", chat_template=None)),
    "the dtype that is said": ({"dtype"}, lambda d: edit(d / "config.json", dtype="float16")),
    "the dtype that is stored": ({"dtype"}, lambda d: patch(d / WEIGHTS, b'"BF16"', b'"F16" ')),
    "a size": ({"config"}, lambda d: edit(d / "config.json", rope_theta=1e6)),
    "generation": ({"config"}, lambda d: edit(d / "generation_config.json", do_sample=True)),
    "another split into shards": (set(), split),
    "who made it": (set(), lambda d: edit(d / "config.json", transformers_version="9.9", _name_or_path="x")),
    "an older name of a field": (
        set(),
        lambda d: (d / "config.json").write_text((d / "config.json").read_text().replace('"dtype"', '"torch_dtype"')),
    ),
    "a read-me": (set(), lambda d: (d / "README.md").write_text("tiny")),
}


@pytest.mark.parametrize(("wanted", "change"), CHANGES.values(), ids=CHANGES)
def test_each_change_of_a_directory_moves_its_own_link_alone(clean, copy, wanted, change):
    """Attribution rests on this: a flipped weight is no other template, and new shards are no other weights."""
    change(copy)
    assert moved(links(clean), links(copy)) == wanted


def test_a_pickled_checkpoint_is_digested_and_never_run(clean, copy, tmp_path):
    """Its bytes are one tensor; a pickle that would write a file when it is loaded does not."""
    (copy / WEIGHTS).unlink()
    trap = tmp_path / "ran"
    code = f"cposix\nsystem\n(S'touch {trap}'\ntR.".encode()
    (copy / "pytorch_model.bin").write_bytes(code)
    first = links(copy)
    assert not trap.exists()
    assert moved(first, links(clean)) == {"checkpoint", "dtype"}
    flip(copy / "pytorch_model.bin", 3)
    assert moved(first, links(copy)) == {"checkpoint"}


BROKEN = {
    "nothing there": ("does not exist", shutil.rmtree),
    "no config": ("has no config.json", lambda d: (d / "config.json").unlink()),
    "a broken config": ("is not JSON", lambda d: (d / "config.json").write_text("{")),
    "a config that is a list": ("holds list; wanted an object", lambda d: (d / "config.json").write_text("[]")),
    "no weights": ("has no weights; wanted model.safetensors", lambda d: (d / WEIGHTS).unlink()),
    "an empty file": ("not a safetensors file", lambda d: (d / WEIGHTS).write_bytes(b"")),
    "HTML": ("not a safetensors file", lambda d: (d / WEIGHTS).write_text("<!DOCTYPE html><html></html>")),
    "half a header": ("truncated within its header", lambda d: os.truncate(d / WEIGHTS, 500)),
    "half a body": ("is truncated", lambda d: os.truncate(d / WEIGHTS, 1_000_000)),
    "more behind it": (
        "has data after its last tensor",
        lambda d: os.truncate(d / WEIGHTS, (d / WEIGHTS).stat().st_size + 1),
    ),
    "a header that is a list": (
        "is not that of a safetensors file",
        lambda d: (d / WEIGHTS).write_bytes(struct.pack("<Q", 2) + b"[]"),
    ),
    "an overlap": (
        "wanted a start at",
        lambda d: (d / WEIGHTS).write_bytes(
            struct.pack("<Q", 64) + b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}'.ljust(64) + bytes(8)
        ),
    ),
    "a missing shard": ("a.safetensors: a shard", lambda d: (split(d), (d / "a.safetensors").unlink())),
    "a shard of another model": (
        "which the index lists there",
        lambda d: (split(d), (d / "a.safetensors").write_bytes(write_safetensors({"x": torch.zeros(2)}, {}))),
    ),
    "one tensor in two shards": (
        "is also in a.safetensors",
        lambda d: (split(d), shutil.copy(d / "a.safetensors", d / "b.safetensors")),
    ),
    "an index that leads elsewhere": (
        "wanted files of the same directory",
        lambda d: ((d / WEIGHTS).unlink(), edit(d / f"{WEIGHTS}.index.json", weight_map={"x": "../x"})),
    ),
    "an index without tensors": (
        "has no weight_map",
        lambda d: ((d / WEIGHTS).unlink(), edit(d / f"{WEIGHTS}.index.json", weight_map=[])),
    ),
    "a broken tokenizer_config": ("is not JSON", lambda d: (d / "tokenizer_config.json").write_bytes(b"\xff")),
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


# --- GGUF ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gguf(clean, tmp_path_factory):
    return checkpoints.gguf(clean, tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def rebuilt(change):
    """Return a change of the file that comes from a change of the directory that it is made of."""

    def apply(file: Path, directory: Path) -> None:
        change(directory)
        checkpoints.gguf(directory, file)

    return apply


GGUF_CHANGES = {
    "last bit of the last weight": ({"checkpoint"}, lambda f, _: flip(f, -4)),
    "a merge of the tokenizer": ({"tokenizer"}, rebuilt(checkpoints.other_tokenizer)),
    "the template": ({"template"}, rebuilt(checkpoints.other_template)),
    "a size": ({"config"}, rebuilt(lambda d: edit(d / "config.json", rope_theta=1e6))),
    "the type that is said": (
        {"dtype"},
        lambda f, _: patch(
            f, b"general.file_type" + struct.pack("<II", 4, 0), b"general.file_type" + struct.pack("<II", 4, 1)
        ),
    ),
    "the format of the weights": ({"checkpoint", "dtype"}, lambda f, d: checkpoints.gguf(d, f, "float16")),
}


@pytest.mark.parametrize(("wanted", "change"), GGUF_CHANGES.values(), ids=GGUF_CHANGES)
def test_each_change_of_a_gguf_file_moves_its_own_link_alone(gguf, copy, tmp_path, wanted, change):
    """As for directories; another format changes the bytes as well."""
    file = Path(shutil.copy(gguf, tmp_path / "other.gguf"))
    assert links(file) == links(gguf)
    change(file, copy)
    assert moved(links(gguf), links(file)) == wanted


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def small(tensors: list[tuple[str, bytes]], *pairs: bytes) -> bytes:
    """Return a GGUF file of float32 vectors, written here and not by the helper."""
    infos, body = b"", b""
    for name, data in tensors:
        infos += text(name) + struct.pack("<IQIQ", 1, len(data) // 4, 0, len(body))
        body += data + bytes(-len(data) % 32)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(pairs)) + b"".join(pairs) + infos
    return head + bytes(-len(head) % 32) + body


def test_a_split_gguf_is_read_as_one(tmp_path):
    """Keys stand in the first shard; the sum is the same however it is split, and a missing shard is named."""
    a, b = ("a", b"1234" * 8), ("b", b"5678" * 8)
    key = text("general.architecture") + struct.pack("<I", 8) + text("llama")
    parts = [text("split.count") + struct.pack("<IH", 2, 2)]
    (tmp_path / "one.gguf").write_bytes(small([a, b], key))
    first = tmp_path / "two-00001-of-00002.gguf"
    first.write_bytes(small([b], key, *parts))
    with pytest.raises(BadCheckpoint, match=r"two-00002-of-00002\.gguf: a shard of this checkpoint is missing"):
        links(first)
    (tmp_path / "two-00002-of-00002.gguf").write_bytes(small([a], *parts))
    assert links(first) == links(tmp_path / "one.gguf")


LONG = struct.pack("<Q", 1 << 60)
GGUF_BROKEN = {
    "something else": ("begins with b'PK", b"PK\3\4 a zip file"),
    "an empty file": ("begins with b''", b""),
    "the magic alone": ("is truncated or damaged within its header", b"GGUF"),
    "version 1": ("version 1; wanted 2 or 3", b"GGUF" + struct.pack("<IQQ", 1, 0, 0)),
    "big-endian": ("little-endian", b"GGUF" + struct.pack(">IQQ", 3, 0, 0)),
    "keys without end": ("truncated", b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60)),
    "tensors without end": ("truncated", b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0)),
    "a text without end": ("truncated", b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + LONG),
    "a list without end": ("truncated", small([], text("k") + struct.pack("<II", 9, 4) + LONG)),
    "lists in lists": ("an array of arrays", small([], text("k") + struct.pack("<IIQ", 9, 9, 1))),
    "an unknown type": ("a value of type 77", small([], text("k") + struct.pack("<I", 77))),
    "no alignment": ("general.alignment is 0", small([], text("general.alignment") + struct.pack("<II", 4, 0))),
    "many dimensions": ("17 dimensions", b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + text("t") + struct.pack("<I", 17)),
    "no body": ("is truncated", small([("a", b"1234")])[:-32]),
}


@pytest.mark.parametrize(("wanted", "data"), GGUF_BROKEN.values(), ids=GGUF_BROKEN)
def test_a_broken_gguf_is_one_clear_line(tmp_path, wanted, data):
    """Nothing is allocated on a header's word alone."""
    file = tmp_path / "x.gguf"
    file.write_bytes(data)
    with pytest.raises(BadCheckpoint) as caught:
        links(file)
    assert wanted in str(caught.value)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_another_process_need_not_read_it_again(copy, tmp_path):
    """What a file held is remembered by its stamp; a changed file, or a doubt, has it read again."""
    memory = tmp_path / "memory"
    checkpoint._READ.clear()
    first = links(copy, memory=str(memory))
    (file,) = memory.glob("*")
    said = json.loads(file.read_text())
    (stamp,) = said
    forged = {stamp: dict.fromkeys(said[stamp], "0" * 64)}
    file.write_text(json.dumps(forged))
    checkpoint._READ.clear()
    assert links(copy, memory=str(memory))["checkpoint"] != first["checkpoint"]  # it was believed
    checkpoint._READ.clear()
    assert links(copy, memory=str(memory), thorough=True) == first  # in doubt it is read
    assert json.loads(file.read_text()) == said
    checkpoint._READ.clear()
    file.write_text("{")
    assert links(copy, memory=str(memory)) == first
    assert json.loads(file.read_text()) == said
