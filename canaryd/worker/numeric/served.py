"""The products and the attention of a served model: the sizes in its `config.json`, and the rows of a server's batches.

A library chooses a kernel by the sizes, and some kernels are wrong only above some size: tests of other sizes miss it.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from canaryd.facts import ALIGNED, Skipped
from canaryd.probe import Context
from canaryd.worker.numeric.cases import Case, product_case
from canaryd.worker.numeric.operands import CONTENTS
from canaryd.worker.numeric.sizes import asked_for
from canaryd.worker.numeric.tensors import FORMATS, Format
from canaryd.worker.runtime import interface

T = TypeVar("T")
ROWS = {"quick": (1, 16), "standard": (1, 8, 64, 512), "deep": (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)}
"""Level of thoroughness → numbers of rows of A (ours). In decoding, a row is one request of a batch; in prefill,
a row is one token of a chunk."""
MOST = {"quick": 64 << 20, "standard": 512 << 20, "deep": 2 << 30}
"""Level → bytes of the largest tested weight; only a deeper level has the time for a larger one (ours)."""
OF_ROOM = 4
"""Divisor: a weight takes at most the memory that is free beside a server, divided by this. Operands, results and a
copy on the host need the rest."""
SHARE = 0.05
"""Largest share of a run's time that one product may take, so that all other products can run too (ours)."""
LENGTHS = {
    "quick": {"decode": (1, 256), "prefill": (64, 64)},
    "standard": {"decode": (1, 1024), "prefill": (256, 256)},
    "deep": {"decode": (1, 4096), "prefill": (1024, 1024)},
}
"""Level → kind → (queries, keys) of one sequence's attention (ours); a prefill has a causal mask."""
ATTENDED = ("float64", "float32", "bfloat16", "float16")
"""Number formats in which attention is tested."""
LARGEST_CONFIG = 1 << 20


class Unreadable(ValueError):
    """Raised if a `config.json` gives no sizes; the text contains the file and the reason."""


@dataclass(frozen=True)
class Weight:
    """One weight matrix of a layer, as servers lay it out: N outputs, K inputs."""

    name: str
    N: int
    K: int


def served_cases(ctx: Context, speeds: Mapping[str, float]) -> Iterator[Case | Skipped]:
    """Yield a case for each product of the configured models, or the reason why a product is left out.

    The setting `shapes_of` is a list of model directories or `config.json` files; without it, the engine gives the
    directories of the endpoints that the device serves. Each number of rows is tested with one class of contents, in
    rotation; if cases are requested by name, with all classes. `speeds`: format → operations per second. Raises
    `ValueError` if the setting is not such a list.
    """
    free, _ = interface.of(ctx.device).memory(ctx.device)
    names = list(CONTENTS)
    for model in _models(ctx, "exact_matmul", weights, speeds):
        if isinstance(model, Skipped):
            yield model
            continue
        form, found = model
        for number, M in enumerate(rows(ctx.level, ctx.seed, every=bool(ctx.cases))):
            contents = names if ctx.cases else [names[(ctx.seed // 2 + number) % len(names)]]
            for content, weight in itertools.product(contents, found):
                kind = f"{weight.name}-{M}"
                asked = asked_for(ctx, f"{form}/{content}/{kind}/nt")
                part = replace(weight, N=asked[1], K=asked[2]) if asked else shard(ctx, FORMATS[form], weight)
                case = product_case(ctx.device, form, form, content, kind, "nt", (M, part.N, part.K, 0))
                why = too_much(ctx, FORMATS[form], part, M, speeds[form], free)
                yield Skipped(case=case.name, reason=why) if why else case


def served_attention(ctx: Context) -> Iterator[tuple[str, str, tuple[int, ...]] | Skipped]:
    """Yield (format, kind, sizes) of the attention of each configured model, or the reason why it is left out.

    The models are those of the setting `shapes_of`; the sizes are B, H, G, L, S and D. Raises `ValueError` if the
    setting is not a list of paths.
    """
    free, _ = interface.of(ctx.device).memory(ctx.device)
    limits = [limit // OF_ROOM for limit in (ctx.room, free) if limit]
    for model in _models(ctx, "exact_attention", heads, ATTENDED):
        if isinstance(model, Skipped):
            yield model
            continue
        form, (queries, keys, size) = model
        for kind, (L, S) in LENGTHS[ctx.level].items():
            scores = queries * L * S  # where a kernel keeps them
            elements = queries * L * size + 2 * keys * S * size + scores
            if limits and elements * FORMATS[form].dtype.itemsize > min(limits):
                yield Skipped(case=f"{form}/served-{kind}", reason=f"the run may take {min(limits) >> 20} MiB at once")
            else:
                yield form, f"served-{kind}", (1, queries, keys, L, S, size)


def _models(
    ctx: Context, probe: str, sizes: Callable[[Mapping[str, Any], int], T], tested: Collection[str]
) -> Iterator[tuple[str, T] | Skipped]:
    """Yield (format, `sizes` of the configuration) of each model in the setting `shapes_of`, or why it is left out.

    The engine gives "ranks", the number of devices that share each model of an endpoint (tensor parallelism).
    """
    for path in shapes_of(ctx.settings, probe):
        try:
            form, found = _read(path, sizes, ctx.settings.get("ranks", {}).get(str(path), 1))
        except Unreadable as error:
            yield Skipped(case="served", reason=str(error))
            continue
        unknown = Skipped(case=f"{form}/served", reason=f"{path} is in {form}, which is not tested here")
        yield (form, found) if form in tested else unknown


def heads(config: Mapping[str, Any], ranks: int = 1) -> tuple[int, int, int]:
    """Return the numbers of query heads and key/value heads of a rank, and the head size.

    Raises `KeyError` if one is missing. A model whose heads `ranks` does not divide evenly is taken as a whole.
    """
    own = config.get("text_config") or config
    queries = int(own["num_attention_heads"])
    keys = int(own.get("num_key_value_heads") or queries)
    size = int(own.get("head_dim") or own["hidden_size"] // queries)
    if min(queries, keys, size) < 1 or queries % keys:
        raise ValueError("a number of heads is not positive, or the heads of queries do not share those of keys")
    # With more ranks than heads of keys, each has one.
    evenly = queries % ranks == 0 and queries // ranks % max(1, keys // ranks) == 0
    ranks = ranks if evenly else 1
    return queries // ranks, max(1, keys // ranks), size


def shapes_of(settings: Mapping[str, Any], probe: str = "exact_matmul") -> list[Path]:
    """Return the paths in a probe's setting `shapes_of`; raise `ValueError` if it is not a list of absolute paths."""
    named = settings.get("shapes_of", [])
    if not isinstance(named, list) or not all(isinstance(name, str) and name.startswith("/") for name in named):
        raise ValueError(f"probes.{probe}.settings.shapes_of: {named!r} is no list of absolute paths")
    return [Path(name) for name in named]


def read(path: Path) -> tuple[str, list[Weight]]:
    """Return the format and the weights of a model, from its directory or `config.json`; raise `Unreadable`."""
    return _read(path, weights, 1)


def _read(path: Path, sizes: Callable[[Mapping[str, Any], int], T], ranks: int) -> tuple[str, T]:
    file = path / "config.json" if path.is_dir() else path
    try:
        with file.open("rb") as stream:
            config = json.loads(stream.read(LARGEST_CONFIG))
        return str(config.get("dtype") or config.get("torch_dtype") or "bfloat16"), sizes(config, ranks)
    except OSError as error:
        raise Unreadable(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, AttributeError, KeyError, ZeroDivisionError) as error:
        raise Unreadable(f"{file} has no sizes of a language model: {type(error).__name__} {error}") from error


def weights(config: Mapping[str, Any], ranks: int = 1) -> list[Weight]:
    """Return the weights of one decoder layer and of the output head, from the names in Hugging Face's `config.json`.

    Query, key and value are one matrix, gate and up another, as servers fuse them. Where there are experts, gate, up
    and down are those of one expert. Of `ranks` devices each has a share: of the outputs, for o and down of the inputs
    (Megatron-LM, arXiv 1909.08053, section 3). A model that they cannot share is taken as a whole. Raises `KeyError`
    for a size that is missing.
    """
    own = config.get("text_config") or config
    hidden, heads = int(own["hidden_size"]), int(own["num_attention_heads"])
    head = int(own.get("head_dim") or hidden // heads)
    kv_heads = int(own.get("num_key_value_heads") or heads)
    inner, vocabulary = int(own.get("moe_intermediate_size") or own["intermediate_size"]), int(own["vocab_size"])
    if heads % ranks == inner % ranks == 0:
        heads, kv_heads, inner, vocabulary = (
            heads // ranks,
            max(1, kv_heads // ranks),
            inner // ranks,
            -(-vocabulary // ranks),
        )
    found = [
        Weight("qkv", (heads + 2 * kv_heads) * head, hidden),
        Weight("gate_up", 2 * inner, hidden),
        Weight("head", vocabulary, hidden),
        Weight("o", hidden, heads * head),
        Weight("down", hidden, inner),
    ]
    if any(min(w.N, w.K) < 1 for w in found):
        raise ValueError("a size is not positive")
    return found


def rows(level: str, turn: int, *, every: bool) -> Sequence[int]:
    """Return the numbers of rows to multiply at a level; at "quick" only one, by `turn`, unless `every` is true."""
    return ROWS[level] if level != "quick" or every else (ROWS[level][turn % len(ROWS[level])],)


def shard(ctx: Context, source: Format, weight: Weight) -> Weight:
    """Return a weight; on an accelerator only as many of its outputs as the level takes, as if several GPUs shared it.

    What is not tested at one level is tested at a deeper one.
    """
    outputs = MOST[ctx.level] // (weight.K * source.dtype.itemsize) // ALIGNED * ALIGNED
    return replace(weight, N=outputs) if ctx.device.unit != "cpu" and 0 < outputs < weight.N else weight


def too_much(ctx: Context, source: Format, weight: Weight, M: int, speed: float, free: int | None) -> str:
    """Return the reason why a product with `M` rows takes too much memory or time for this run, or "" if it does not.

    `speed` is in operations per second; `free` is the device's free memory in bytes, or None if it is unknown.
    """
    size = weight.N * weight.K * source.dtype.itemsize
    most = min([MOST[ctx.level], *(limit // OF_ROOM for limit in (ctx.room, free) if limit)])
    if size > most:
        return f"the weight has {size >> 20} MiB; this run takes those of at most {most >> 20} MiB"
    seconds = 2.0 * M * weight.N * weight.K / speed
    if seconds > ctx.budget * SHARE:
        return f"one product would take about {seconds:.2g} s of the {ctx.budget:g} s of this level"
    return ""
