"""The built-in canary model: a small decoder-only transformer over bytes, in plain torch, and its files.

RMSNorm, rotary positions, grouped-query attention, SwiGLU, KV cache, tied head. The same code prefills, decodes and
scores, in every floating-point format; 16-bit formats take norms, rotations and softmax in float32, as serving does.
All of the model's arithmetic is here; docs/canaries.md explains its purpose.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from canaryd.facts import DTYPES as DTYPES  # noqa: PLC0414 - part of the model
from canaryd.facts import printable
from canaryd.worker.numeric.tensors import bytes_of, torch

POSITIONS = 128
"""Longest sequence."""
Watch = Callable[[str, Any], Any]
"""Called with every tensor where its format rounds it ("2.query", "logits"); returns the tensor to go on with."""

_SAFETENSORS = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_SAFETENSORS |= {"I64": "int64", "I32": "int32", "U32": "uint32", "I8": "int8", "U8": "uint8"}
_SAFETENSORS |= {"F8_E4M3": "float8_e4m3fn"}
_HEADER_LIMIT = 1 << 20
"""Bytes that a header of our files may have; the format itself allows 100 MB."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a model."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    inner: int
    vocabulary: int = 256
    theta: int = 10_000
    """Base of the rotary frequencies: J. Su et al., "RoFormer", arXiv 2104.09864, section 3.2.2."""

    @property
    def head(self) -> int:
        """Size of one attention head."""
        return self.hidden // self.heads

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Return every weight's name and shape; matrices are (out, in)."""
        named: dict[str, tuple[int, ...]] = {"embedding": (self.vocabulary, self.hidden), "norm": (self.hidden,)}
        for i in range(self.layers):
            named |= {
                f"{i}.attention_norm": (self.hidden,),
                f"{i}.query": (self.hidden, self.hidden),
                f"{i}.key": (self.kv_heads * self.head, self.hidden),
                f"{i}.value": (self.kv_heads * self.head, self.hidden),
                f"{i}.output": (self.hidden, self.hidden),
                f"{i}.inner_norm": (self.hidden,),
                f"{i}.gate": (self.inner, self.hidden),
                f"{i}.up": (self.inner, self.hidden),
                f"{i}.down": (self.hidden, self.inner),
            }
        return named


class KeyValues:
    """Keys and values of the positions seen so far; per layer a tensor (rows, KV heads, length, head size)."""

    def __init__(self, like: Any, layers: int, sizes: tuple[int, int, int, int]) -> None:
        """Make tensors of `sizes`, in the format and on the device of the tensor `like`."""
        self.keys = [like.new_zeros(sizes) for _ in range(layers)]
        self.values = [like.new_zeros(sizes) for _ in range(layers)]
        self.used = 0

    def extend(self, layer: int, key: Any, value: Any) -> tuple[Any, Any]:
        """Append new positions of one layer; return all of that layer."""
        end = self.used + key.shape[2]
        self.keys[layer][:, :, self.used : end] = key
        self.values[layer][:, :, self.used : end] = value
        return self.keys[layer][:, :, :end], self.values[layer][:, :, :end]

    def positions(self, count: int) -> Any:
        """Return the positions (count,) of the next tokens."""
        return torch.arange(self.used, self.used + count, device=self.keys[0].device)

    def advance(self, count: int) -> None:
        """Put `count` more positions in use."""
        self.used += count


class Canary:
    """A model with its weights in one format on one device."""

    def __init__(self, shape: Shape, weights: Mapping[str, Any], watch: Watch | None = None) -> None:
        self.shape = shape
        self.weights = weights
        self.watch = watch
        self.rotations = _rotations(shape, _wide(weights["embedding"]))

    def to(self, target: Any, dtype: str) -> Canary:
        """Return a copy on torch device `target` in format `dtype`; every format holds the weights exactly."""
        kind = getattr(torch, dtype)
        copies = {name: tensor.clone().to(kind).to(target) for name, tensor in self.weights.items()}
        return Canary(self.shape, copies, self.watch)

    def cached(self, rows: int, length: int) -> tuple[Any, int, tuple[int, int, int, int]]:
        """Return what `KeyValues` takes to hold `rows` of `length` positions."""
        return self.weights["embedding"], self.shape.layers, (rows, self.shape.kv_heads, length, self.shape.head)

    def forward(self, tokens: Any, cache: KeyValues | None = None) -> Any:
        """Return the logits (rows, T, vocabulary) of tokens (rows, T) that follow those in `cache`."""
        weights, count = self.weights, tokens.shape[1]
        at = cache.positions(count) if cache else torch.arange(count, device=tokens.device)
        x = self._see("embedding", torch.nn.functional.embedding(tokens, weights["embedding"]))
        for i in range(self.shape.layers):
            x = self._see(f"{i}.middle", x + self._attention(i, x, at, cache))
            x = self._see(f"{i}.out", x + self._inner(i, x))
        if cache:
            cache.advance(count)
        x = self._norm("norm", x)
        return self._see("logits", torch.nn.functional.linear(x, weights["embedding"]))

    def _see(self, name: str, tensor: Any) -> Any:
        return tensor if self.watch is None else self.watch(name, tensor)

    def _linear(self, name: str, x: Any) -> Any:
        return self._see(name, torch.nn.functional.linear(x, self.weights[name]))

    def _norm(self, name: str, x: Any) -> Any:
        wide = _wide(x)
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
        return self._see(name, (scaled * self.weights[name].to(wide.dtype)).to(x.dtype))

    def _rotate(self, name: str, x: Any, at: Any) -> Any:
        a, b = _wide(x).chunk(2, -1)
        cos, sin = (table[at] for table in self.rotations)
        return self._see(name, torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype))

    def _attention(self, i: int, x: Any, at: Any, cache: KeyValues | None) -> Any:
        rows, count, _ = x.shape
        groups, size = self.shape.kv_heads, self.shape.head
        seen = self._norm(f"{i}.attention_norm", x)
        query, key, value = (
            self._linear(f"{i}.{name}", seen).view(rows, count, -1, size).transpose(1, 2)
            for name in ("query", "key", "value")
        )
        query = self._rotate(f"{i}.rotated_query", query, at)
        key = self._rotate(f"{i}.rotated_key", key, at)
        if cache:
            key, value = cache.extend(i, key, value)
        key, value = self._see(f"{i}.keys", key), self._see(f"{i}.values", value)
        query = query.reshape(rows, groups, -1, count, size)  # query heads of one group share their keys and values
        scores = self._see(f"{i}.scores", torch.matmul(query, key.unsqueeze(2).transpose(-1, -2)) * size**-0.5)
        later = torch.arange(key.shape[2], device=x.device) > at[:, None]
        scores = scores.masked_fill(later, -math.inf)
        chances = self._see(f"{i}.softmax", torch.softmax(_wide(scores), -1).to(x.dtype))
        mixed = self._see(f"{i}.mixed", torch.matmul(chances, value.unsqueeze(2)))
        return self._linear(f"{i}.output", mixed.flatten(1, 2).transpose(1, 2).reshape(rows, count, -1))

    def _inner(self, i: int, x: Any) -> Any:
        seen = self._norm(f"{i}.inner_norm", x)
        gate = torch.nn.functional.silu(self._linear(f"{i}.gate", seen))
        return self._linear(f"{i}.down", self._see(f"{i}.active", gate * self._linear(f"{i}.up", seen)))


def _rotations(shape: Shape, like: Any) -> tuple[Any, Any]:
    """Return cosines and sines (positions, half a head), made in float64 on the host for all devices."""
    half = shape.head // 2
    angles = [[position * shape.theta ** (-k / half) for k in range(half)] for position in range(POSITIONS)]
    cosines, sines = (
        torch.tensor([[turn(a) for a in row] for row in angles], dtype=torch.float64).to(like.dtype).to(like.device)
        for turn in (math.cos, math.sin)
    )
    return cosines, sines


def _wide(x: Any) -> Any:
    """Return float32 for 16-bit tensors, the tensor itself otherwise."""
    return x.to(torch.float32) if x.element_size() == 2 else x


def decode(model: Canary, prompts: Any, count: int) -> tuple[Any, Any]:
    """Prefill `prompts` (rows, P), then decode greedily from the KV cache, one token at a time.

    Returns tokens (rows, count) and the logits (rows, count, vocabulary) that each was chosen by.
    """
    cache = KeyValues(*model.cached(prompts.shape[0], prompts.shape[1] + count - 1))
    logits = [model.forward(prompts, cache)[:, -1]]
    tokens = [logits[0].argmax(-1)]
    while len(tokens) < count:
        logits.append(model.forward(tokens[-1][:, None], cache)[:, -1])
        tokens.append(logits[-1].argmax(-1))
    return torch.stack(tokens, 1), torch.stack(logits, 1)


def score(model: Canary, prompts: Any, continuation: Any) -> tuple[Any, Any]:
    """Score a given `continuation` (rows, count) of `prompts` in one pass; returns the same as `decode`."""
    logits = model.forward(torch.cat((prompts, continuation[:, :-1]), 1))[:, prompts.shape[1] - 1 :].contiguous()
    return logits.argmax(-1), logits


# ---------------------------------------------------------------------------------------------------------------------
# Files: the safetensors format (https://github.com/huggingface/safetensors, section "Format").


class BadFile(ValueError):
    """A damaged file; the text says what is wrong where."""

    def __init__(self, text: str) -> None:
        super().__init__(printable(text)[:1000])


def write_safetensors(tensors: Mapping[str, Any], metadata: Mapping[str, str]) -> bytes:
    """Return the bytes of a safetensors file that holds host tensors and texts."""
    return b"".join(parts_of_safetensors(tensors, metadata))


def parts_of_safetensors(tensors: Mapping[str, Any], metadata: Mapping[str, str]) -> Iterator[bytes]:
    """Yield such a file's header, then the bytes of one tensor after the other: a large file never stands in memory."""
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


def read_safetensors(data: bytes, *, header_limit: int = _HEADER_LIMIT) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the tensors and texts of a safetensors file; raise `BadFile` for anything that the format forbids.

    The tensors must cover the data without gap or overlap, as the format demands. `header_limit` is in bytes.
    """
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or size > min(header_limit, len(data) - 8):
        raise BadFile(f"{len(data)} bytes with a header of {size}: wanted at most {header_limit}, inside the file")
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


def save(model: Canary) -> bytes:
    """Return the file of a model: its weights and, as texts, its sizes."""
    return write_safetensors(model.weights, {name: str(size) for name, size in asdict(model.shape).items()})


def load(data: bytes) -> Canary:
    """Return the model that `save` wrote; raise `BadFile` where sizes and tensors do not match."""
    weights, metadata = read_safetensors(data)
    try:
        shape = Shape(**{name: int(text) for name, text in metadata.items()})
        wanted = shape.tensors() if shape.layers <= len(weights) else {}
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise BadFile(f"__metadata__ does not give the sizes of a model: {error}") from error
    found = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    if found != wanted:
        differ = sorted(name for name in {*found, *wanted} if found.get(name) != wanted.get(name))
        raise BadFile(f"{differ[0]}: {found.get(differ[0])}, wanted {wanted.get(differ[0])}")
    return Canary(shape, weights)
