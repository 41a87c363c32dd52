"""Where tensors lie in files of weights: a safetensors file's or a GGUF file's own header, which is trusted."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

GGUF_SCALARS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""`gguf_metadata_value_type` → bytes."""


class Tensor(NamedTuple):
    """A tensor's bytes in its file."""

    name: str
    dtype: str
    """As the file writes it: "BF16" in safetensors, the number of a `ggml_type` in GGUF."""
    file: Path
    begin: int
    end: int


def tensors(path: Path) -> list[Tensor]:
    """Return the tensors of model.safetensors in a directory, or of a GGUF file."""
    file = path / "model.safetensors" if path.is_dir() else path
    with file.open("rb") as stream:
        return _gguf(file, stream) if file.suffix == ".gguf" else _safetensors(file, stream)


def _safetensors(file: Path, stream: BinaryIO) -> list[Tensor]:
    size = int.from_bytes(stream.read(8), "little")
    header = json.loads(stream.read(size))
    header.pop("__metadata__", None)
    return [Tensor(name, e["dtype"], file, *(8 + size + at for at in e["data_offsets"])) for name, e in header.items()]


def _gguf(file: Path, stream: BinaryIO) -> list[Tensor]:
    def take(layout: str) -> tuple[Any, ...]:
        return struct.unpack(f"<{layout}", stream.read(struct.calcsize(f"<{layout}")))

    def text() -> bytes:
        return stream.read(*take("Q"))

    def skip(kind: int) -> None:
        if kind == 8:
            text()
        elif kind == 9:
            inner, count = take("IQ")
            for _ in range(count):
                skip(inner)
        else:
            stream.read(GGUF_SCALARS[kind])

    _magic, _version, count, pairs = take("4sIQQ")
    for _ in range(pairs):
        text()
        skip(*take("I"))
    infos = []
    for _ in range(count):
        name, (dimensions,) = text().decode(), take("I")
        take(f"{dimensions}Q")
        infos.append((name, *take("IQ")))
    body = -(-stream.tell() // 32) * 32
    begins = [*sorted(body + offset for *_, offset in infos), file.stat().st_size]
    return [Tensor(n, str(k), file, body + o, begins[begins.index(body + o) + 1]) for n, k, o in infos]
