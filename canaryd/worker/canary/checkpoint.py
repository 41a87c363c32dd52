"""Digests of a model on disk, a Hugging Face directory or a GGUF file: the first links (entries) of a canary's chain.

Each link changes with one kind of change (docs/canaries.md). Every byte of the weights is read, because a sample would
miss the single flipped bit that this check must find.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from canaryd.facts import printable
from canaryd.files import keep, recall

Progress = Callable[[float, str], None]
"""A function that is called with the share of the bytes read so far (0…1) and the file's name."""

BLOCK = 1 << 20
"""Number of bytes that are read at once."""
VOCABULARIES = (
    *("sentencepiece.bpe.model", "spiece.model", "tekken.json", "tiktoken.model", "tokenizer.json", "tokenizer.model"),
    *("vocab.json", "vocab.txt"),
)
"""Names of vocabulary files; every tokenizer has at least one of them."""
_TOKENIZER = ("added_tokens.json", "merges.txt", "special_tokens_map.json", *VOCABULARIES)
_TEMPLATES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja")
_SINGLE = ("model.safetensors", "pytorch_model.bin")
"""Files that transformers loads first if they exist; otherwise it loads the shards listed in NAME.index.json."""
_DTYPES = ("dtype", "torch_dtype")
_BOOKKEEPING = ("_name_or_path", "transformers_version")
"""Keys of config files that change no bit of a result."""
_GGUF_SHARD = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
_KEPT = "checkpoints"
"""Name under which `_READ` is stored between processes."""
_REMEMBERED = 1000
"""Maximum number of files whose digests are stored; the oldest are dropped first."""
_READ: dict[str, str] = {}
"""`_stamp` of a file → SHA-256 of the file's bytes, for files that were read before."""


class BadCheckpoint(ValueError):
    """A path without a complete checkpoint; the one-line text says what the path contains and what is needed."""

    def __init__(self, text: str) -> None:
        super().__init__(printable(text)[:1000])


def links(
    path: Path, *, memory: str = "", thorough: bool = False, progress: Progress = lambda _fraction, _text: None
) -> dict[str, str]:
    """Return link (name of what is digested) → 16 hex digits of SHA-256, for the links that the checkpoint has.

    "checkpoint" covers every byte of the files of weights, which takes minutes for 100 GB. If this
    process or the directory `memory` has a file's digest, the file is read again only in two cases: its inode, size or
    times changed; or `thorough` is true, because a decaying disk changes none of these. Raises `BadCheckpoint`.
    """
    found = recall(memory, _KEPT)
    if isinstance(found, dict):
        _READ.update((s, digest) for s, digest in found.items() if isinstance(digest, str) and s not in _READ)
    before = len(_READ)
    try:
        files = weights(path)
        chain = {"checkpoint": _hash(_digests(files, thorough=thorough, progress=progress))}
        chain |= _of_directory(path) if path.is_dir() else {}
    except OSError as error:
        raise BadCheckpoint(f"{error.filename or path}: cannot be read: {error.strerror}") from error
    if thorough or len(_READ) > before:
        keep(memory, _KEPT, dict(list(_READ.items())[-_REMEMBERED:]))
    return chain


def weights(path: Path) -> list[Path]:
    """Return the files of weights that a loader would read, sorted by name; raise `BadCheckpoint` if one is missing."""
    if path.is_dir():
        files = _shards(path)
    elif path.is_file():
        files = _gguf_shards(path)
    else:
        raise BadCheckpoint(f"{path}: does not exist; wanted a Hugging Face directory or a GGUF file")
    for file in files:
        if not file.is_file():
            raise BadCheckpoint(f"{file}: a shard of this checkpoint is missing; fetch the checkpoint again")
    return files


def _shards(path: Path) -> list[Path]:
    """Return the files of weights that transformers would load; some may be missing."""
    if not (path / "config.json").is_file():
        raise BadCheckpoint(f"{path}: has no config.json; wanted a Hugging Face directory, or a GGUF file itself")
    for single in _SINGLE:
        if (path / single).is_file():
            return [path / single]
        index = path / f"{single}.index.json"
        if index.is_file():
            wanted = _json(index).get("weight_map")
            shards = wanted.values() if isinstance(wanted, dict) else ()
            if not shards or not all(isinstance(name, str) and Path(name).name == name for name in shards):
                raise BadCheckpoint(f"{index}: wanted a weight_map of tensor names and files of the same directory")
            return [path / name for name in sorted(set(shards))]
    names = ", ".join(f"{single} or {single}.index.json" for single in _SINGLE)
    raise BadCheckpoint(f"{path}: has no weights; wanted {names}")


def _gguf_shards(file: Path) -> list[Path]:
    """Return all files of a split GGUF model, as llama.cpp names them: NAME-00001-of-00003.gguf."""
    match = _GGUF_SHARD.search(file.name)
    if not match:
        return [file]
    name, count = file.name[: match.start()], int(match.group(2))
    return [file.with_name(f"{name}-{number:05d}-of-{count:05d}.gguf") for number in range(1, count + 1)]


def _digests(files: list[Path], *, thorough: bool, progress: Progress) -> list[str]:
    """Return the SHA-256 of every file; files read before are read again only if they changed or `thorough` is true."""
    total, done, digests = sum(file.stat().st_size for file in files) or 1, 0, []
    for file in files:
        with file.open("rb") as stream:
            stamp = _stamp(file, stream)
            if thorough or stamp not in _READ:
                digest = hashlib.sha256()
                while block := stream.read(BLOCK):
                    progress(min(1.0, done / total), file.name)
                    digest.update(block)
                    done += len(block)
                if _stamp(file, stream) != stamp:
                    raise BadCheckpoint(f"{file}: changed while it was read; try again when nothing writes to it")
                _READ[stamp] = digest.hexdigest()
            digests.append(_READ[stamp])
    return digests


def _stamp(file: Path, stream: BinaryIO) -> str:
    """Return a text that changes whenever the file is written: it includes the ctime, which programs cannot set."""
    now = os.fstat(stream.fileno())
    return f"{file.resolve()} {now.st_dev} {now.st_ino} {now.st_size} {now.st_mtime_ns} {now.st_ctime_ns}"


def _of_directory(path: Path) -> dict[str, str]:
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
        "dtype": _hash(dtypes),
        **({"tokenizer": _hash(tokenizer)} if tokenizer else {}),
        **({"template": _hash(template)} if template else {}),
    }


def _stripped(config: Any, dtypes: list[tuple[str, Any]], place: str = "") -> Any:
    """Return a config without dtypes and bookkeeping keys; add (path of keys, dtype) to `dtypes` for each dtype."""
    if not isinstance(config, dict):
        return config
    kept = {}
    for key, value in sorted(config.items()):
        if key in _DTYPES:
            dtypes.append((place, value))
        elif key not in _BOOKKEEPING:
            kept[key] = _stripped(value, dtypes, f"{place}{key}.")
    return kept


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


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:16]
