"""Captures and tensors: safetensors files, `capture.read`, `compare` of two, and evidence of two unequal tensors.

Only `ValueError` (`BadFile` is one), one printable line. Tensors cover the file; comparing a capture with itself never
names a fault, and of a spoilt one the result is strict JSON. Evidence counts what differs and writes out the first 64.
"""

from __future__ import annotations

import json
import math
import struct
from typing import Any

import torch
from canaryd_lab.worker.canary import capture, compare
from canaryd_lab.worker.safetensors import BadFile, read_safetensors, write_safetensors

from canaryd.codec import to_json
from canaryd.model import Device
from canaryd.worker.numeric.evidence import collect
from canaryd.worker.numeric.tensors import FORMATS, bits
from tests.fuzz.material import Choices, dumps, modes, seed, warped
from tests.fuzz.properties import in_time, one_line, plain, scratch

torch.set_num_threads(1)


def _taken_apart(data: bytes) -> tuple[dict[str, Any], bytes]:
    size = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + size]), data[8 + size :]


PROMPT = "reef"
SMALL = write_safetensors(
    {
        f"{PROMPT}/input": torch.tensor([[1, 2, 3]]),
        f"{PROMPT}/tokens": torch.tensor([[2, 3]]),
        f"{PROMPT}/0/0/out": torch.ones(1, 3, 8),
        f"{PROMPT}/0/head/logits": torch.arange(12.0).reshape(1, 3, 4),
    },
    {
        **dict.fromkeys(capture.ABOUT, ""),
        "schema": capture.SCHEMA,
        "device": json.dumps(to_json(Device(uuid="CPU-0", backend="cpu", index=0, model="a processor"))),
        "environment": json.dumps({"torch": "2.13"}),
        "dtype": "float32",
        "model": "/srv/m",
        "digest": "00",
        "prompts": json.dumps([PROMPT]),
        "path": "decode",
        "operators": "yes",
        "order": json.dumps([f"{PROMPT}/input", f"{PROMPT}/0/0/out", f"{PROMPT}/0/head/logits", f"{PROMPT}/tokens"]),
    },
)


def _put_together(header: Any, body: bytes) -> bytes:
    text = dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def _bytes(data: bytes) -> None:
    with in_time(len(data)):
        try:
            tensors, about = read_safetensors(data)
        except BadFile as error:
            one_line(str(error))
            return
    size = int.from_bytes(data[:8], "little")
    assert sum(t.numel() * t.element_size() for t in tensors.values()) == len(data) - 8 - size
    assert all(isinstance(k, str) and isinstance(v, str) for k, v in about.items())
    again, said = read_safetensors(write_safetensors(tensors, about))
    assert said == about
    assert again.keys() == tensors.keys()
    assert all(torch.equal(bits(again[name]), bits(tensors[name])) for name in tensors)


def _spoilt(data: bytes) -> None:
    """A capture whose header, texts or bytes are spoilt, against the sound one and against itself."""
    choices = Choices(data)
    header, body = _taken_apart(SMALL)
    about = header["__metadata__"]
    for name in ("device", "prompts", "order", "environment"):
        if choices.flag():
            about[name] = dumps(warped(json.loads(about[name]), choices))
    if choices.flag():
        header["__metadata__"] = about = warped(about, choices, most=2)
    if choices.flag():
        header = warped(header, choices, most=3)
    if choices.flag():
        flipped = bytearray(body)
        for _ in range(choices.below(4)):
            flipped[choices.below(len(flipped))] ^= 1 << choices.below(8)
        body = bytes(flipped)
    _compared(SMALL, _put_together(header, body))


FORMATTED = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.uint8)


def _renamed(data: bytes) -> None:
    """Tensors of any kind, shape and name under texts that are right."""
    choices = Choices(data)
    header, _ = _taken_apart(SMALL)
    about = dict(header["__metadata__"])
    about["path"] = choices.of(("decode", "forced"))
    about["operators"] = choices.of(("yes", "no"))
    tensors: dict[str, Any] = {}
    for name in (f"{PROMPT}/input", f"{PROMPT}/tokens"):
        tensors[name] = torch.tensor([[int(choices.below(300)) - 20 for _ in range(choices.below(4) + 1)]])
    for _ in range(choices.below(5)):
        step, layer = choices.of(("0", "1", "forced", "x", "-1")), choices.of(("0", "1", "input", "head"))
        operator = choices.of(("out", "logits", "embedding", "query"))
        name = f"{PROMPT if choices.below(8) else choices.text()}/{step}/{layer}/{operator}"
        kind = choices.of(FORMATTED)
        shape = [choices.below(4) + 1 for _ in range(choices.below(4))]
        filled = torch.frombuffer(bytearray(choices.take(64).ljust(64 * 8, b"\x3f")), dtype=torch.uint8)
        tensors[name] = filled[: math.prod(shape) * kind.itemsize].clone().view(kind).view(shape)
    about["order"] = json.dumps(list(tensors))
    try:
        file = write_safetensors(tensors, about)
    except (KeyError, ValueError, TypeError):
        return  # a format that no capture has
    _compared(SMALL, file)


def _compared(sound: bytes, spoilt: bytes) -> None:
    with scratch.fresh() as place, in_time(len(spoilt) + len(sound)):
        a, b = place / "a", place / "b"
        a.write_bytes(sound)
        b.write_bytes(spoilt)
        for one, two in ((a, b), (b, b), (b, a)):
            try:
                result = compare.answer({"a": str(one), "b": str(two)}, lambda *_: None)
            except ValueError as error:
                one_line(str(error))
                continue
            json.dumps(result, allow_nan=False, ensure_ascii=False).encode()
            assert result["verdict"]["kind"] in ("equal", "rounding", "fault", "different model", "incomparable")
            if one is two:
                assert all(row["equal"] for row in result["rows"] if row["operator"] != "tokens")


KINDS = [name for name in FORMATS if hasattr(torch, name)]


def _evidence(data: bytes) -> None:
    choices = Choices(data)
    kind = getattr(torch, choices.of(KINDS))
    shape = [choices.below(5) + 1 for _ in range(choices.below(3) + 1)]
    size = math.prod(shape) * kind.itemsize
    golden = (
        torch.frombuffer(bytearray(choices.take(size).ljust(size, b"\1")), dtype=torch.uint8).view(kind).view(shape)
    )
    observed = golden.clone()
    flat = bits(observed).view(-1)
    for _ in range(choices.below(6) + 1):
        flat[choices.below(flat.numel())] ^= 1 << choices.below(kind.itemsize * 8 - 1)
    differ = int((bits(golden) != bits(observed)).sum())
    if not differ:
        return
    found = collect(golden, observed)
    plain(found)
    one_line(found.pattern)
    assert found.wrong == differ <= found.total == golden.numel()
    assert len(found.first) == min(differ, 64)
    assert all(wanted != seen for _, wanted, seen in found.first)
    assert found.zeroed <= differ >= found.nonfinite
    assert all(0 < count <= differ for count in found.bits.values())


def _capture(data: bytes) -> None:
    """Any bytes as a capture."""
    _compared(SMALL, data)


target = modes(_bytes, _spoilt, _renamed, _evidence, _capture)


def seeds() -> list[bytes]:
    return [
        seed(0, SMALL),
        seed(4, SMALL),
        *(seed(mode, bytes(range(n, n + 60))) for mode in range(1, 4) for n in range(0, 190, 30)),
    ]
