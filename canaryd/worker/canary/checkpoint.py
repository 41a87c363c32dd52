"""Fingerprints of a model on disk, a Hugging Face directory or a GGUF file: the first links of a canary's chain.

Each link changes for its own reason (docs/canaries.md). Tensors are digested one by one and combined in the order
of their names, so that neither another split into shards nor another header changes the result. Every byte is read: a
sample would miss the single flipped bit that this should find.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from canaryd.facts import printable
from canaryd.files import keep, recall

Progress = Callable[[float, str], None]
"""Called with the progress of the reading (0…1) and the file's name."""

BLOCK = 1 << 20
"""Bytes read at once."""
HEADER_LIMIT = 100_000_000
"""Bytes of a safetensors header (https://github.com/huggingface/safetensors, section "Format")."""
VOCABULARIES = (
    "sentencepiece.bpe.model",
    "spiece.model",
    "tekken.json",
    "tiktoken.model",
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
)
"""Files of which a tokenizer has at least one."""
_TOKENIZER = ("added_tokens.json", "merges.txt", "special_tokens_map.json", *VOCABULARIES)
_TEMPLATES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja")
_SINGLE = ("model.safetensors", "pytorch_model.bin")
"""What transformers loads first where it exists; otherwise the shards that NAME.index.json lists."""
_DTYPES = ("dtype", "torch_dtype")
_BOOKKEEPING = ("_name_or_path", "transformers_version")
"""Keys of config files that no bit of a result depends on."""

_GGUF_SCALARS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""`gguf_metadata_value_type` → bytes."""
_GGUF_STRING, _GGUF_ARRAY = 8, 9
_GGUF_DTYPES = ("general.file_type", "general.quantization_version")
_GGUF_SHARD = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


class BadCheckpoint(ValueError):
    """A path without a complete checkpoint; the text is one line: where, what is there, what was wanted."""

    def __init__(self, text: str) -> None:
        super().__init__(printable(text)[:1000])


@dataclass(frozen=True)
class Tensor:
    """One tensor, as in its file's header."""

    name: str
    dtype: str
    """As the file writes it: "BF16" in safetensors, the number of a `ggml_type` in GGUF; "" for a pickled file."""
    shape: tuple[int, ...]
    file: Path
    begin: int
    end: int
    """End of its bytes in the file."""

    @property
    def size(self) -> int:
        """Bytes."""
        return self.end - self.begin


def links(
    path: Path, *, memory: str = "", thorough: bool = False, progress: Progress = lambda _fraction, _text: None
) -> dict[str, str]:
    """Return link → 16 hex digits of SHA-256 for the checkpoint at `path`; links that it does not have are left out.

    "checkpoint" covers every byte of every tensor, which takes minutes for 100 GB (docs/canaries.md). A file that
    was read before, by this process or by one that left it in the directory `memory`, is read again only if its inode,
    size or times changed, or if `thorough`: a decaying disk changes none of them. Raises `BadCheckpoint`.
    """
    try:
        _recall(memory)
        before = len(_READ)
        found = tensors(path)
        chain = {
            "checkpoint": _hash(sorted(_contents(found, thorough=thorough, progress=progress))),
            **(_of_directory(path, found) if path.is_dir() else _of_gguf(_gguf_shards(path)[0], found)),
        }
    except OSError as error:
        raise BadCheckpoint(f"{error.filename or path}: cannot be read: {error.strerror}") from error
    if thorough or len(_READ) > before:
        keep(memory, KEPT, dict(list(_READ.items())[-REMEMBERED:]))
    return chain


def tensors(path: Path) -> list[Tensor]:
    """Return all tensors of a checkpoint, from the headers of its files alone; raises `BadCheckpoint` and `OSError`.

    A pickled file (.bin) counts as one tensor with its name, because reading its content would run its code.
    """
    if path.is_dir():
        read: Callable[[Path], list[Tensor]] = _safetensors
        files, wanted = _shards(path)
        if files[0].suffix == ".bin":
            read = _pickled
    elif path.is_file():
        read, files, wanted = (lambda file: _Gguf(file).tensors), _gguf_shards(path), {}
    else:
        raise BadCheckpoint(f"{path}: does not exist; wanted a Hugging Face directory or a GGUF file")
    for file in files:
        if not file.is_file():
            raise BadCheckpoint(f"{file}: a shard of this checkpoint is missing; fetch the checkpoint again")
    found: dict[str, Tensor] = {}
    for file in files:
        for tensor in read(file):
            if tensor.name in found:
                raise BadCheckpoint(f"{file}: tensor {tensor.name} is also in {found[tensor.name].file.name}")
            found[tensor.name] = tensor
    for name, shard in wanted.items():
        if read is _safetensors and (name not in found or found[name].file.name != shard):
            raise BadCheckpoint(f"{path / shard}: lacks tensor {name}, which the index lists there")
    if not found:
        raise BadCheckpoint(f"{path}: has no tensor; wanted the weights of a model")
    return list(found.values())


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:16]


# ---------------------------------------------------------------------------------------------------------------------
# The weights' bytes.

_READ: dict[str, dict[str, str]] = {}
"""`_stamp` of a file → digests of its tensors."""
KEPT = "checkpoints"
"""Name under which it is kept between processes."""
REMEMBERED = 1000
"""Files that are remembered; the oldest are forgotten first."""


def _recall(memory: str) -> None:
    """Load the digests of an earlier process; ignore a file that is something else, it will be overwritten."""
    found = recall(memory, KEPT)
    if isinstance(found, dict) and all(isinstance(v, dict) for v in found.values()):
        _READ.update((stamp, digests) for stamp, digests in found.items() if stamp not in _READ)


def _contents(found: Iterable[Tensor], *, thorough: bool, progress: Progress) -> Iterator[tuple[str, Any, str]]:
    """Yield name, shape and digest of every tensor. The dtype is a link of its own."""
    files: dict[Path, list[Tensor]] = {}
    for tensor in found:
        files.setdefault(tensor.file, []).append(tensor)
    total, done = sum(t.size for group in files.values() for t in group) or 1, 0
    for file, group in files.items():
        with file.open("rb") as stream:
            known = _stamp(file, stream)
            if thorough or _READ.get(known, {}).keys() != {tensor.name for tensor in group}:
                digests = {}
                for tensor in sorted(group, key=lambda t: t.begin):
                    digest = hashlib.sha256()
                    for block in _blocks(stream, tensor):
                        progress(done / total, file.name)
                        digest.update(block)
                        done += len(block)
                    digests[tensor.name] = digest.hexdigest()
                if _stamp(file, stream) != known:
                    raise BadCheckpoint(f"{file}: changed while it was read; try again when nothing writes to it")
                _READ[known] = digests
            yield from ((t.name, t.shape, _READ[known][t.name]) for t in group)


def _stamp(file: Path, stream: BinaryIO) -> str:
    """Return a text that changes whenever the file is written: programs cannot set ctime."""
    now = os.fstat(stream.fileno())
    return f"{file.resolve()} {now.st_dev} {now.st_ino} {now.st_size} {now.st_mtime_ns} {now.st_ctime_ns}"


def _blocks(stream: BinaryIO, tensor: Tensor) -> Iterator[bytes]:
    left = tensor.size
    stream.seek(tensor.begin)
    while left:
        block = stream.read(min(BLOCK, left))
        if not block:
            raise BadCheckpoint(f"{tensor.file}: ends within tensor {tensor.name}")
        left -= len(block)
        yield block


# ---------------------------------------------------------------------------------------------------------------------
# Hugging Face directories.


def _of_directory(path: Path, found: Iterable[Tensor]) -> dict[str, str]:
    dtypes: list[tuple[str, Any]] = []
    config = _stripped(_json(path / "config.json"), dtypes)
    generation = _stripped(_json(path / "generation_config.json", missing={}), [])
    settings = _json(path / "tokenizer_config.json", missing={})
    inline = settings.pop("chat_template", None)
    template: dict[str, Any] = {"chat_template": inline} if inline else {}
    template |= {str(f.relative_to(path)): _file(f) for pattern in _TEMPLATES for f in sorted(path.glob(pattern))}
    tokenizer: dict[str, Any] = {name: _file(path / name) for name in _TOKENIZER if (path / name).is_file()}
    tokenizer |= {"tokenizer_config.json": settings} if settings else {}
    return {
        "config": _hash([config, generation]),
        "dtype": _hash([dtypes, {t.name: t.dtype for t in found}]),
        **({"tokenizer": _hash(tokenizer)} if tokenizer else {}),
        **({"template": _hash(template)} if template else {}),
    }


def _stripped(config: Any, dtypes: list[tuple[str, Any]], place: str = "") -> Any:
    """Return a config without its dtypes, which go to `dtypes` with their places, and without bookkeeping."""
    if not isinstance(config, dict):
        return config
    kept = {}
    for key, value in sorted(config.items()):
        if key in _DTYPES:
            dtypes.append((place, value))
        elif key not in _BOOKKEEPING:
            kept[key] = _stripped(value, dtypes, f"{place}{key}.")
    return kept


def _shards(path: Path) -> tuple[list[Path], Mapping[str, str]]:
    """Return the files that transformers would load, in the order of their names, and the file of each tensor.

    Some of the files may be missing.
    """
    if not (path / "config.json").is_file():
        raise BadCheckpoint(f"{path}: has no config.json; wanted a Hugging Face directory, or a GGUF file itself")
    for single in _SINGLE:
        if (path / single).is_file():
            return [path / single], {}
        index = path / f"{single}.index.json"
        if index.is_file():
            wanted = _json(index).get("weight_map")
            if not isinstance(wanted, dict) or not wanted:
                raise BadCheckpoint(f"{index}: has no weight_map; wanted tensor names with their files")
            for name in wanted.values():
                if not isinstance(name, str) or Path(name).name != name:
                    raise BadCheckpoint(f"{index}: weight_map names {name!r}; wanted files of the same directory")
            return [path / name for name in sorted(set(wanted.values()))], wanted
    names = ", ".join(f"{single} or {single}.index.json" for single in _SINGLE)
    raise BadCheckpoint(f"{path}: has no weights; wanted {names}")


def _json(file: Path, missing: dict[str, Any] | None = None) -> dict[str, Any]:
    if missing is not None and not file.is_file():
        return dict(missing)
    try:
        value = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise BadCheckpoint(f"{file}: is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise BadCheckpoint(f"{file}: holds {type(value).__name__}; wanted an object")
    return value


def _file(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _pickled(file: Path) -> list[Tensor]:
    return [Tensor(file.name, "", (), file, 0, file.stat().st_size)]


def _safetensors(file: Path) -> list[Tensor]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(8)
        length = int.from_bytes(start, "little")
        if len(start) < 8 or not 2 <= length <= min(HEADER_LIMIT, size - 8):
            raise BadCheckpoint(f"{file}: {size} bytes: not a safetensors file, or truncated within its header")
        text = stream.read(length)
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        body = 8 + length
        found = [
            Tensor(
                str(n), str(e["dtype"]), tuple(map(int, e["shape"])), file, *(body + int(o) for o in e["data_offsets"])
            )
            for n, e in header.items()
        ]
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError, RecursionError) as error:
        raise BadCheckpoint(f"{file}: the header is not that of a safetensors file: {error!r:.200}") from error
    at = body
    for tensor in sorted(found, key=lambda t: (t.begin, t.end)):
        if tensor.begin != at or tensor.size < 0:
            raise BadCheckpoint(
                f"{file}: tensor {tensor.name} is at {tensor.begin}…{tensor.end}, wanted a start at {at}"
            )
        at = tensor.end
    if at != size:
        wrong = "is truncated" if at > size else "has data after its last tensor"
        raise BadCheckpoint(f"{file}: {wrong}: {size} bytes, its header needs {at}; fetch the checkpoint again")
    return found


# ---------------------------------------------------------------------------------------------------------------------
# GGUF: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian.


def _of_gguf(first: Path, found: Iterable[Tensor]) -> dict[str, str]:
    """Return the links of the keys in the first shard: only it has all keys, and it may have no tensor."""
    groups: dict[str, dict[str, str]] = {"config": {}, "dtype": {t.name: t.dtype for t in found}}
    for key, value in _Gguf(first).keys.items():
        if key.startswith("split."):
            continue
        link = "config"
        if key in _GGUF_DTYPES:
            link = "dtype"
        elif key.startswith("tokenizer."):
            link = "template" if key.startswith("tokenizer.chat_template") else "tokenizer"
        groups.setdefault(link, {})[key] = hashlib.sha256(value).hexdigest()
    return {link: _hash(group) for link, group in groups.items()}


def _gguf_shards(file: Path) -> list[Path]:
    """Return all files of a split model, as llama.cpp names them: NAME-00001-of-00003.gguf."""
    match = _GGUF_SHARD.search(file.name)
    if not match:
        return [file]
    name, count = file.name[: match.start()], int(match.group(2))
    return [file.with_name(f"{name}-{number:05d}-of-{count:05d}.gguf") for number in range(1, count + 1)]


class _Gguf:
    """The header of one file: keys with their values as raw bytes (type in front), and tensors."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.size = file.stat().st_size
        with file.open("rb") as self._stream:
            magic = self._stream.read(4)
            if magic != b"GGUF":
                raise BadCheckpoint(f"{file}: begins with {magic!r}; wanted a Hugging Face directory or a GGUF file")
            version, count, pairs = self._unpack("IQQ")
            if version not in (2, 3):
                raise BadCheckpoint(f"{file}: GGUF version {version}; wanted 2 or 3, little-endian")
            self.keys = {self._string().decode(errors="replace"): self._value() for _ in range(pairs)}
            infos = [(self._string().decode(errors="replace"), *self._info()) for _ in range(count)]
            alignment = int.from_bytes(self.keys.get("general.alignment", bytes(4) + b"\x20")[4:], "little")
            if alignment < 1:
                raise BadCheckpoint(f"{file}: general.alignment is 0; wanted a multiple of 8")
            body = math.ceil(self._stream.tell() / alignment) * alignment
        # A tensor's type gives its end; between it and the next tensor there is only padding.
        begins = sorted({body + offset for *_, offset in infos})
        ends = dict(zip(begins, [*begins[1:], self.size], strict=False))  # a first shard may have only keys
        self.tensors = [
            Tensor(name, kind, shape, file, body + offset, ends[body + offset]) for name, shape, kind, offset in infos
        ]
        if begins and begins[-1] >= self.size:
            raise BadCheckpoint(f"{file}: is truncated: {self.size} bytes, but a tensor begins at {begins[-1]}")

    def _take(self, count: int) -> bytes:
        if count > self.size or len(data := self._stream.read(count)) < count:
            raise BadCheckpoint(f"{self.file}: is truncated or damaged within its header")
        return data

    def _unpack(self, layout: str) -> tuple[int, ...]:
        return struct.unpack(f"<{layout}", self._take(struct.calcsize(f"<{layout}")))

    def _string(self) -> bytes:
        return self._take(*self._unpack("Q"))

    def _value(self) -> bytes:
        (kind,) = self._unpack("I")
        return struct.pack("<I", kind) + self._bare(kind)

    def _bare(self, kind: int) -> bytes:
        if kind in _GGUF_SCALARS:
            return self._take(_GGUF_SCALARS[kind])
        if kind == _GGUF_STRING:
            text = self._string()
            return struct.pack("<Q", len(text)) + text
        if kind != _GGUF_ARRAY:
            raise BadCheckpoint(f"{self.file}: a value of type {kind}; wanted one of 0…12")
        inner, count = self._unpack("IQ")
        if inner == _GGUF_ARRAY:
            raise BadCheckpoint(f"{self.file}: an array of arrays, which models do not have")
        head = struct.pack("<IQ", inner, count)
        if inner in _GGUF_SCALARS:
            return head + self._take(_GGUF_SCALARS[inner] * count)
        return head + b"".join(self._bare(inner) for _ in range(count))

    def _info(self) -> tuple[tuple[int, ...], str, int]:
        (dimensions,) = self._unpack("I")
        if dimensions > 16:
            raise BadCheckpoint(f"{self.file}: a tensor of {dimensions} dimensions; the header is damaged")
        shape = self._unpack(f"{dimensions}Q")
        kind, offset = self._unpack("IQ")
        return shape, str(kind), offset
