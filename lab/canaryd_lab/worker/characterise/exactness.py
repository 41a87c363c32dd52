"""Find the operations of a device that give the one right answer, by format, content, layout, shape and kernel.

If a switch that may change bits is on, results are only measured.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

from canaryd.model import RUNTIMES, Device
from canaryd.worker.numeric import attention
from canaryd.worker.numeric.cases import refusal
from canaryd.worker.numeric.characterised import room_of
from canaryd.worker.numeric.operands import CONTENTS, Product, build
from canaryd.worker.numeric.products import FORMAT_PAIRS, LAYOUTS, label_of, multiply
from canaryd.worker.numeric.seeds import derive
from canaryd.worker.numeric.stack import float8
from canaryd.worker.numeric.tensors import FORMATS, allowing, torch
from canaryd.worker.runtime import interface
from canaryd.worker.runtime.interface import Operation
from canaryd_lab.observation import Claim, Seen
from canaryd_lab.worker.characterise.bench import SEED, Bench

SHAPES = {
    "tile": (64, 64, 128, 0),
    "deep": (32, 32, 2048, 0),
    "decode": (1, 256, 256, 0),
    "ragged": (61, 77, 131, 0),
    "tall": (256, 32, 128, 0),
    "batched": (32, 32, 64, 4),
}
"""Name of a shape → (M, N, K, batch); batch 0 means no batch."""
SIXTEENTHS = {
    "tile": (64, 64, 128, 0),
    "deep": (32, 32, 2048, 0),
    "decode": (16, 256, 256, 0),
    "tall": (256, 32, 128, 0),
}
"""Name of a shape → (M, N, K, batch) for FP8, whose kernels need multiples of 16 and have no batch."""
ATTENTION_SHAPES = {
    "prefill": (1, 2, 2, 64, 64, 64), "grouped": (1, 4, 2, 33, 80, 64), "decode": (2, 2, 1, 1, 320, 64),
    "long": (1, 2, 2, 8, 1024, 128),
}  # fmt: skip
"""Name of a shape → (B, H, G, L, S, D), the sizes of an attention problem."""
ATTENTION_FORMATS = ("float64", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Switch:
    """A switch that may change the bits of a product."""

    name: str
    sources: tuple[str, ...]
    """Beginnings of the names of the operand formats that the switch affects."""
    backends: tuple[str, ...]
    turn_on: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
    fast: bool = False
    """Whether the switch is FP8's fast accumulation, which is an argument of the product's call."""


@contextlib.contextmanager
def _library(name: str) -> Iterator[None]:
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library(name)
    try:
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(before)


SWITCHES = (
    Switch("tf32", ("float32",), ("cuda", "rocm"), partial(allowing, "allow_tf32")),
    Switch(
        "fp16 reduced-precision reduction",
        ("float16",),
        ("cuda", "rocm"),
        partial(allowing, "allow_fp16_reduced_precision_reduction"),
    ),
    Switch(
        "bf16 reduced-precision reduction",
        ("bfloat16",),
        ("cuda", "rocm"),
        partial(allowing, "allow_bf16_reduced_precision_reduction"),
    ),
    Switch("fp16 accumulation", ("float16",), ("cuda",), partial(allowing, "allow_fp16_accumulation")),
    Switch("fp8 fast accumulation", ("float8",), ("cuda", "rocm"), fast=True),
)
LIBRARIES = {
    "cublas": (("cuda", "rocm"), partial(_library, "cublas")),
    "cublaslt": (("cuda", "rocm"), partial(_library, "cublaslt")),
    "without onednn": (("cpu",), lambda: torch.backends.mkldnn.flags(enabled=False)),
}
"""Name of another library for products → (backends that have it, function that selects it)."""


def switches_of(source: str) -> list[Switch]:
    """Return the switches that may change the bits of products of an operand format."""
    return [s for s in SWITCHES if source.startswith(s.sources)]


def product_of(device: Device, source: str, target: str, content: str, layout: str, shape: tuple[int, ...]) -> Product:
    """Return a product whose sums use all the bits that canaryd assumes the device's partial sums to have."""
    M, N, K, batch = shape
    room = room_of(device, source, target, batched=batch > 0)
    return Product(content, FORMATS[source], FORMATS[target], room, M, N, K, batch, layout)


def products(source: str, target: str, bench: Bench) -> None:
    """Verify a pair of formats in every content, layout and shape, then with each library, then with each switch on."""
    source = float8(bench.device, source)
    name = label_of(source, target)
    if source == "tfloat32" and bench.device.unit != "cuda":
        bench.add(name, Claim.STRICT, Seen.NOT_OFFERED, "TF32 is a format of NVIDIA's tensor cores")
        return
    scaled = source.startswith("float8")
    shapes, layouts = (SIXTEENTHS, ("nt",)) if scaled else (SHAPES, LAYOUTS)
    compute = bench.computes(Operation("matmul", source, target))
    with bench.runtime.strict(bench.device):
        tiny = partial(build, product_of(bench.device, source, target, "permute", "nt", (32, 32, 32, 0)), SEED)
        bench.verify(f"{name}/permute/nt/tiny", tiny, compute)
        if bench.seen[-1].seen is Seen.REFUSED:
            return  # there is no kernel for the format: one line, not hundreds
        for content, shape, layout in _mixed(CONTENTS, shapes, layouts):
            problem = _builder(bench.device, source, target, content, layout, shapes[shape])
            bench.verify(f"{name}/{content}/{layout}/{shape}", problem, compute)
        for library, (backends, choose) in LIBRARIES.items():
            _varied(bench, source, target, f"library {library}", backends, choose, compute)
        for switch in switches_of(source):
            fast = partial(multiply, source, target, fast=True) if switch.fast else compute
            _varied(bench, source, target, f"switch {switch.name}", switch.backends, switch.turn_on, fast)


def _mixed(*lists: Iterable[str]) -> list[tuple[str, ...]]:
    """Return all combinations of the lists in an irregular order, so that an early end has tried some of each kind."""
    return sorted(itertools.product(*lists), key=lambda choice: derive(SEED, " ".join(choice)))


def _builder(device: Device, source: str, target: str, content: str, layout: str, sizes: tuple[int, ...]) -> Any:
    seed = derive(SEED, f"{source} {target} {content} {layout} {sizes}")
    return partial(build, product_of(device, source, target, content, layout, sizes), seed)


def _varied(
    bench: Bench, source: str, target: str, what: str, backends: tuple[str, ...], choose: Any, compute: Any
) -> None:
    """Measure a pair of formats again in the variant `what`: with a switch on (`choose`) or with another library."""
    name = f"{label_of(source, target)}/{what}"
    if bench.device.backend not in backends:
        bench.add(name, Claim.OPEN, Seen.NOT_OFFERED, f"not offered here: {what} is for {', '.join(backends)}")
        return
    try:
        with choose():
            for content, shape in itertools.product(CONTENTS, ("tile", "deep")):
                problem = _builder(bench.device, source, target, content, "nt", SHAPES[shape])
                bench.verify(f"{name}/{content}/nt/{shape}", problem, compute, Claim.OPEN)
    except (AttributeError, RuntimeError) as error:  # this torch does not have the switch
        bench.add(name, Claim.OPEN, Seen.NOT_OFFERED, f"not offered here: {error}")


def attentions(kernel: str, bench: Bench) -> None:
    """Verify one attention kernel in every format, content, mask and shape."""
    refused: dict[tuple[str, ...], str] = {}
    with bench.runtime.strict(bench.device):
        for form, mask, shape, content in _mixed(
            ATTENTION_FORMATS, attention.MASKS, ATTENTION_SHAPES, attention.CONTENTS
        ):
            name = f"{kernel.lower()}/{form}/{content}/{mask}/{shape}"
            bits = attention.value_bits(bench.device, form, kernel)
            spec = attention.Attention(content, FORMATS[form], mask, *ATTENTION_SHAPES[shape], bits)
            compute = bench.computes(Operation("attention", form, form, kernel, mask))
            if (form, mask, shape) not in refused:  # asked with zeros first, which cost nothing to make
                refused[form, mask, shape] = _refusal(bench, name, spec, compute)
            if refused[form, mask, shape]:
                bench.add(name, Claim.STRICT, Seen.REFUSED, refused[form, mask, shape])
                continue
            bench.verify(name, partial(attention.build, spec, derive(SEED, name)), compute)


def _refusal(bench: Bench, name: str, spec: attention.Attention, compute: Any) -> str:
    try:
        return refusal(bench.device, attention.blank(spec), compute)
    except Exception as caught:  # noqa: BLE001  whatever a device raises is a result
        bench.note_error(f"{name}/zeros", Claim.STRICT, caught)
    return ""


PRODUCT_PARTS = tuple((label_of(s, t), partial(products, s, t)) for s, t in FORMAT_PAIRS)
ATTENTION_PARTS = tuple(
    (runtime, kernel.lower(), partial(attentions, kernel))
    for runtime in RUNTIMES
    for kernel in interface.named(runtime).attention_kernels
)
"""For every attention kernel: (runtime, name of the part, function that carries it out)."""
