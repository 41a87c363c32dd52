"""Models on disk: Hugging Face directories as `checkpoint.links` reads them, and what it remembers.

Only `BadCheckpoint`, one printable line. A link is 16 hex digits, and the same files give the same links, with and
without a memory of them.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from canaryd.worker.canary import checkpoint
from tests.fuzz.material import Choices, dumps, modes, seed, warped
from tests.fuzz.properties import in_time, one_line, scratch

CONFIG = {"model_type": "llama", "torch_dtype": "bfloat16", "text_config": {"dtype": "float32", "layers": [1, 2]}}
INDEX = {"metadata": {"total_size": 12}, "weight_map": {"a": "one.safetensors", "b": "one.safetensors"}}
TOKENIZER = {"chat_template": "{{ x }}", "eos_token": "</s>"}


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
        spoilt = [choices.below(3) == 0 for _ in range(4)]
        files = {
            "config.json": CONFIG,
            "tokenizer_config.json": TOKENIZER,
            "generation_config.json": {"temperature": 1},
        }
        for bad, (name, said) in zip(spoilt, files.items(), strict=False):
            (model / name).write_text(dumps(warped(said, choices) if bad else said))
        if choices.flag():
            (model / "model.safetensors.index.json").write_text(dumps(warped(INDEX, choices) if spoilt[3] else INDEX))
            (model / "one.safetensors").write_bytes(b"weights")
        else:
            (model / "model.safetensors").write_bytes(b"weights")
        (model / "tokenizer.json").write_bytes(choices.take(8))
        _linked(model, 10_000)


def _memory(data: bytes) -> None:
    """What an earlier process has left: any bytes only make it read again."""
    with scratch.fresh() as place:
        (place / "model").mkdir()
        (place / "model/config.json").write_text("{}")
        file = place / "model/model.safetensors"
        file.write_bytes(b"weights")
        checkpoint._READ.clear()
        wanted = checkpoint.links(place / "model")
        with file.open("rb") as stream:
            stamp = checkpoint._stamp(file, stream)
        choices = Choices(data)
        kept = choices.rest() if choices.flag() else dumps(warped({stamp: "00"}, choices)).encode()
        (place / "memory").mkdir()
        (place / "memory/checkpoints.json").write_bytes(kept)
        checkpoint._READ.clear()
        found = checkpoint.links(place / "model", memory=str(place / "memory"))
        assert found.keys() == wanted.keys()
        assert all(re.fullmatch("[0-9a-f]{16}", digest) for digest in found.values())
        checkpoint._READ.clear()


target = modes(_directory, _memory)


def seeds() -> list[bytes]:
    return [
        *(seed(mode, bytes(range(n, n + 60))) for mode in (0, 1) for n in range(0, 190, 20)),
        seed(1, b"\1" + json.dumps({}).encode()),
    ]
