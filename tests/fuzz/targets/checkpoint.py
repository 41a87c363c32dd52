"""Models on disk: Hugging Face directories and GGUF files as `checkpoint.links` reads them, and what it remembers.

Only `BadCheckpoint`, one printable line; never more memory than the file has bytes, whatever its header announces. A
link is 16 hex digits, and the same files give the same links, with and without a memory of them.
"""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from typing import Any

from canaryd.worker.canary import checkpoint
from tests.fuzz.material import Choices, dumps, modes, seed, warped
from tests.fuzz.properties import in_time, one_line, scratch

HEADER = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
    "b": {"dtype": "BF16", "shape": [2, 1], "data_offsets": [8, 12]},
}
CONFIG = {"model_type": "llama", "torch_dtype": "bfloat16", "text_config": {"dtype": "float32", "layers": [1, 2]}}
INDEX = {"metadata": {"total_size": 12}, "weight_map": {"a": "one.safetensors", "b": "one.safetensors"}}
TOKENIZER = {"chat_template": "{{ x }}", "eos_token": "</s>"}


def _safetensors(header: Any) -> bytes:
    text = dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(range(12))


def _linked(path: Path, size: int) -> None:
    checkpoint._READ.clear()
    with in_time(size):
        try:
            found = checkpoint.links(path)
        except checkpoint.BadCheckpoint as error:
            one_line(str(error))
            return
    assert found
    assert all(re.fullmatch("[0-9a-f]{16}", digest) for digest in found.values()), found
    memory = path.parent / "memory"
    assert checkpoint.links(path, memory=str(memory)) == found
    checkpoint._READ.clear()
    assert checkpoint.links(path, memory=str(memory)) == found


def _directory(data: bytes) -> None:
    choices = Choices(data)
    with scratch.fresh() as place:
        model = place / "model"
        model.mkdir()
        spoilt = [choices.below(3) == 0 for _ in range(5)]
        files = {
            "config.json": CONFIG,
            "tokenizer_config.json": TOKENIZER,
            "generation_config.json": {"temperature": 1},
        }
        for bad, (name, said) in zip(spoilt, files.items(), strict=False):
            (model / name).write_text(dumps(warped(said, choices) if bad else said))
        header = warped(HEADER, choices) if spoilt[3] else HEADER
        if choices.flag():
            (model / "model.safetensors.index.json").write_text(dumps(warped(INDEX, choices) if spoilt[4] else INDEX))
            (model / "one.safetensors").write_bytes(_safetensors(header))
        else:
            (model / "model.safetensors").write_bytes(_safetensors(header))
        (model / "tokenizer.json").write_bytes(choices.take(8))
        _linked(model, 10_000)


def _weights(data: bytes) -> None:
    with scratch.fresh() as place:
        (place / "model").mkdir()
        (place / "model/config.json").write_text("{}")
        (place / "model/model.safetensors").write_bytes(data)
        _linked(place / "model", len(data))


def _gguf(data: bytes) -> None:
    with scratch.fresh() as place:
        (place / "m.gguf").write_bytes(b"GGUF" + data)
        _linked(place / "m.gguf", len(data))


def _text(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def gguf(choices: Choices) -> bytes:
    """A GGUF file of keys and tensors with numbers here and there that announce too much."""

    def number(usual: int) -> int:
        return usual if choices.below(12) else int(choices.of((0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1, 16, 17)))

    keys = [_text(b"general.name") + struct.pack("<I", 8) + _text(b"m")]
    for _ in range(choices.below(4)):
        kind = choices.below(14)
        value = choices.take(8).ljust(8, b"\1")[: checkpoint._GGUF_SCALARS.get(kind, 8)]
        if kind == 8:
            value = struct.pack("<Q", number(3)) + b"abc"
        if kind == 9:
            value = struct.pack("<IQ", number(4) % 2**32, number(2)) + b"\1" * 8
        name = choices.of(
            (b"general.alignment", b"tokenizer.chat_template", b"split.count", b"\xff\n", b"general.file_type")
        )
        keys.append(_text(name) + struct.pack("<I", kind) + value)
    infos = [
        _text(choices.of((b"a", b"b", b"\x1b[2J")))
        + struct.pack("<I", number(1) % 2**32)
        + struct.pack("<QIQ", number(4), number(0) % 2**32, number(32 * i))
        for i in range(choices.below(3))
    ]
    head = struct.pack("<IQQ", number(3) % 2**32, number(len(infos)), number(len(keys)))
    return head + b"".join(keys) + b"".join(infos) + b"\0" * choices.below(200)


def _built(data: bytes) -> None:
    _gguf(gguf(Choices(data)))


def _memory(data: bytes) -> None:
    """What an earlier process has left: any bytes only make it read again."""
    with scratch.fresh() as place:
        (place / "model").mkdir()
        (place / "model/config.json").write_text("{}")
        file = place / "model/model.safetensors"
        file.write_bytes(_safetensors(HEADER))
        checkpoint._READ.clear()
        wanted = checkpoint.links(place / "model")
        with file.open("rb") as stream:
            stamp = checkpoint._stamp(file, stream)
        choices = Choices(data)
        kept = choices.rest() if choices.flag() else dumps(warped({stamp: {"a": "00"}}, choices)).encode()
        (place / "memory").mkdir()
        (place / "memory/checkpoints.json").write_bytes(kept)
        checkpoint._READ.clear()
        found = checkpoint.links(place / "model", memory=str(place / "memory"))
        assert found.keys() == wanted.keys()
        assert all(re.fullmatch("[0-9a-f]{16}", digest) for digest in found.values())
        checkpoint._READ.clear()


target = modes(_directory, _weights, _gguf, _built, _memory)


def seeds() -> list[bytes]:
    return [
        *(seed(mode, bytes(range(n, n + 60))) for mode in (0, 3, 4) for n in range(0, 190, 20)),
        seed(1, _safetensors(HEADER)),
        *(seed(2, gguf(Choices(bytes(range(n, n + 60))))) for n in range(0, 190, 20)),
        seed(4, b"\1" + json.dumps({}).encode()),
    ]
