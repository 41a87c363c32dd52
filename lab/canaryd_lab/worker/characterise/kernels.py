"""Name the kernel that serves each class of products, aligned and ragged, and say where it was another one before.

The classes and sizes are those of `exact_matmul` at standard on a fast device. A kernel is chosen by formats, sizes and
strides, not by values, so the operands are zeros.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from canaryd.files import keep, recall
from canaryd.model import Device
from canaryd.probe import Context
from canaryd.worker.numeric.launches import launched
from canaryd.worker.numeric.products import computing, format_pairs, label_of
from canaryd.worker.numeric.sizes import choose, shapes_of
from canaryd.worker.numeric.tensors import FORMATS, strict_switches, torch, upload
from canaryd_lab.observation import Claim, Seen
from canaryd_lab.worker.characterise.bench import SEED, Bench

FAST = 1e18
"""Speed (operations per second) for which the sizes are chosen: the same ones on every device with as many units."""
INT8_SIZES = (4096, 4096, 4096)


class _Class(NamedTuple):
    """A class of products: its name, formats of operands and result, layouts, and batch (if any), M, N and K."""

    name: str
    source: str
    target: str
    layout: str
    sizes: tuple[int, ...]


def kernels(bench: Bench) -> None:
    """Record for each class of products the names of its kernels, and the former names where these were others."""
    if bench.device.backend not in ("cuda", "rocm"):
        bench.add("kernels", Claim.OPEN, Seen.NOT_OFFERED, "torch's profiler names kernels of CUDA and ROCm only")
        return
    name = f"product kernels-{bench.device.uuid}"
    known = recall(bench.memory, name)
    before: dict[str, str] = known if isinstance(known, dict) else {}
    with strict_switches():
        for one in _classes(bench.device):
            if names := _record(bench, one, before):
                before = {**before, one.name: names}
    keep(bench.memory, name, before)


def _record(bench: Bench, one: _Class, before: Mapping[str, str]) -> str:
    """Record the kernels of a class; return their names, or "" if they are unknown."""
    if bench.out_of_time(one.name, Claim.OPEN):
        return ""
    try:
        names, why = _named(bench.device, one)
    except Exception as caught:  # noqa: BLE001  whatever a device raises is a result
        bench.note_error(one.name, Claim.OPEN, caught)
        return ""
    values: dict[str, float | int | str] = {"sizes": "x".join(map(str, one.sizes)), "kernel": names}
    if names and before.get(one.name, names) != names:
        values["before"] = before[one.name]
        why = "another kernel than before: what the former one passed proves nothing about this one"
    bench.add(one.name, Claim.OPEN, Seen.MEASURED if names else Seen.NOT_OFFERED, why, values=values)
    return names


def _classes(device: Device) -> Iterator[_Class]:
    ctx = Context(device=device, level="standard", seed=SEED, budget=1.0)
    for source, target in format_pairs(device):
        label = label_of(source, target)
        for kind, layout in itertools.product(*shapes_of(device, source)):
            *sides, batch = choose(ctx, FAST, kind, f"{label}/zeros/{kind}/{layout}")
            sizes = (batch, *sides) if batch else tuple(sides)
            yield _Class(f"{label}/{kind}/{layout}", source, target, layout, sizes)
    yield _Class("int8>int32/square/nt", "int8", "int32", "nt", INT8_SIZES)


def _named(device: Device, one: _Class) -> tuple[str, str]:
    """Return (digest and names of the kernels, or ""; the reason why they are unknown, or "")."""
    *batch, M, N, K = one.sizes
    dtype = torch.int8 if one.source == "int8" else FORMATS[one.source].dtype
    a, b = (_zeros(dtype, batch, how, *of) for how, of in zip(one.layout, ((M, K), (K, N)), strict=True))
    operands = upload((a, b), device)
    compute = computing(device, one.source, one.target)
    result = compute(operands, None)  # loads the kernel
    return launched(device, partial(compute, operands, result))


def _zeros(dtype: Any, batch: Sequence[int], how: str, rows: int, columns: int) -> Any:
    sides = (rows, columns) if how == "n" else (columns, rows)
    made = torch.zeros((*batch, *sides), dtype=dtype)
    return made if how == "n" else made.mT
