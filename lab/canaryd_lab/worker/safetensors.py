"""Read and write tensors in the safetensors format (https://github.com/huggingface/safetensors, section "Format")."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from canaryd.facts import printable
from canaryd.worker.numeric.tensors import bytes_of, torch

_SAFETENSORS = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_SAFETENSORS |= {"I64": "int64", "I32": "int32", "U32": "uint32", "I8": "int8", "U8": "uint8"}
_SAFETENSORS |= {"F8_E4M3": "float8_e4m3fn"}
HEADER_LIMIT = 100_000_000
"""Maximum bytes of a header, according to the format. Captures of decoding have thousands of tensors."""


class BadFile(ValueError):
    """A damaged file; the text says what is wrong and where."""

    def __init__(self, text: str) -> None:
        super().__init__(printable(text)[:1000])


def write_safetensors(tensors: Mapping[str, Any], metadata: Mapping[str, str]) -> bytes:
    """Return the bytes of a safetensors file that holds host tensors and texts."""
    return b"".join(parts_of_safetensors(tensors, metadata))


def parts_of_safetensors(tensors: Mapping[str, Any], metadata: Mapping[str, str]) -> Iterator[bytes]:
    """Yield a file's header, then the bytes of each tensor, so that memory never holds the whole file."""
    codes = {getattr(torch, name): code for code, name in _SAFETENSORS.items()}
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    at = 0
    for name, tensor in tensors.items():
        end = at + tensor.nbytes
        header[name] = {"dtype": codes[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for tensor in tensors.values():
        yield bytes_of(tensor.detach())


def read_safetensors(data: bytes) -> tuple[dict[str, Any], dict[str, str]]:
    """Return (name → tensor, name → text) of a safetensors file; raise `BadFile` if the file breaks the format.

    The tensors must cover the data without gap or overlap, as the format demands.
    """
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or size > min(HEADER_LIMIT, len(data) - 8):
        raise BadFile(f"{len(data)} bytes with a header of {size}: wanted at most {HEADER_LIMIT}, inside the file")
    try:
        header = json.loads(data[8 : 8 + size], object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise BadFile(f"the header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise BadFile("the header is not an object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise BadFile("__metadata__: wanted texts by name")
    body, tensors, at = bytearray(memoryview(data)[8 + size :]), {}, 0
    for name, entry in sorted(header.items(), key=lambda item: _begin(*item)):
        dtype = _SAFETENSORS.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
        shape, (begin, end) = entry["shape"], entry["data_offsets"]
        if dtype is None or not isinstance(shape, list) or not all(type(n) is int and n > 0 for n in shape):
            raise BadFile(f"{name}: wanted a known dtype and positive sizes, got {entry['dtype']!r} and {shape!r}")
        kind = getattr(torch, dtype)
        count = math.prod(shape)
        if begin != at or end - begin != count * kind.itemsize or end > len(body):
            raise BadFile(f"{name}: bytes {begin} to {end} of {len(body)}: wanted {count * kind.itemsize} from {at}")
        # One copy each: alignment is then the allocator's, not the file's.
        tensors[name] = torch.frombuffer(body, dtype=torch.uint8, count=end - begin, offset=begin).clone()
        tensors[name] = tensors[name].view(kind).view(shape)
        at = end
    if at != len(body):
        raise BadFile(f"{len(body) - at} bytes after the last tensor")
    return tensors, metadata


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({name for name, _ in pairs}) != len(pairs):
        raise ValueError("a name occurs twice")
    return dict(pairs)


def _begin(name: str, entry: Any) -> int:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise BadFile(f"{name}: wanted dtype, shape and data_offsets")
    offsets = entry["data_offsets"]
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(type(n) is int and n >= 0 for n in offsets):
        raise BadFile(f"{name}: data_offsets {offsets!r}: wanted two numbers of bytes")
    begin: int = offsets[0]
    return begin
