"""What a probe needs of a runtime: arrays in, an operation, bits out; devices, their software, switches, memory.

A probe names an `Operation` and never a library. Problems and goldens are tensors of torch on the host, whatever
computes the result: the same bytes go in, and the same bits must come out.

A new runtime is a module here with a constant `RUNTIME`, a name in `canaryd.model.RUNTIMES`, and a setting of
`worker.runtimes`. Nothing else imports such a module: `named` is the only way to it.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, cast

from canaryd.model import RUNTIMES, Device
from canaryd.probe import Skip
from canaryd.worker.numeric import stack

BURST_BYTES = 256 << 20
"""Memory that the results of one burst may hold: a quarter of `budget.memory`, eight bfloat16 products of 4096. An H200
multiplies those in 1.4 ms, and each look at comparisons makes it wait for the host."""
Change = Callable[[Any, int], None]
"""Changes a contiguous one-dimensional view of raw bits in place; the integer chooses where."""


class Unsupported(NotImplementedError):
    """The runtime has no kernel for an operation on this device: no evidence about the device."""


class Elsewhere(Unsupported):
    """The operation ran on another device than the one under test, or nothing proves where it ran."""


@dataclass(frozen=True)
class Packing:
    """How the weights of a product are quantised: groups of codes that share a scale and, in "affine", an offset."""

    mode: str
    """"affine", "mxfp4", "mxfp8" or "nvfp4"."""
    bits: int
    """Of a code."""
    group: int
    """Codes in a group."""

    @property
    def name(self) -> str:
        """The name in those of cases: "affine4x64", "mxfp4"."""
        return f"affine{self.bits}x{self.group}" if self.mode == "affine" else self.mode


@dataclass(frozen=True)
class Operation:
    """Something that a device computes from uploaded operands."""

    name: str
    """"matmul", "quantized" (x times weights that are stored as `packing` says: x, codes in words of 32 bits, scales,
    offsets in "affine"), "attention", a name of `canaryd.worker.numeric.indexing.OPERATIONS`, "rows" (out[i] =
    pool[index[i]]) or "columns" (out[:, j] = pool[:, index[j]]); one row of indices per matrix of a batch, whose pools
    may differ."""
    source: str = ""
    """matmul, quantized, attention: format of the operands, a name of `tensors.FORMATS`, "int8" or "uint8" (the left
    one); quantized: of x and of the result."""
    target: str = ""
    """matmul: format of the result."""
    kernel: str = ""
    """attention: one of `Runtime.attention_kernels`, or "" for the runtime's own choice."""
    mask: str = ""
    """attention: one of `attention.MASKS`."""
    turned: bool = False
    """rows, columns: return the transpose of what was gathered, which stays where it lies. quantized: weights are
    stored as (K, N), not as (N, K)."""
    packing: Packing | None = None
    """quantized: how the weights are stored."""
    together: int = 1
    """columns: each index is the number of a run of so many neighbours, which is taken whole."""


class KeyValues:
    """Keys and values of the positions seen so far; per layer an array (rows, KV heads, length, head size)."""

    def __init__(self, layers: int, zeros: Callable[[], Any]) -> None:
        """`zeros` makes the array of a layer, with room for all positions."""
        self.keys, self.values = ([zeros() for _ in range(layers)] for _ in range(2))
        self.used = 0

    def extend(self, layer: int, key: Any, value: Any) -> tuple[Any, Any]:
        """Append new positions of one layer; return all of that layer. `used` is the caller's to raise."""
        end = self.used + key.shape[2]
        self.keys[layer][:, :, self.used : end] = key
        self.values[layer][:, :, self.used : end] = value
        return self.keys[layer][:, :, :end], self.values[layer][:, :, :end]


class Operators(Protocol):
    """What a language model needs of a runtime beside the arithmetic of its arrays, as models are served through it.

    Arrays also know +, *, @, slices, `shape`, `reshape` and `swapaxes`.
    """

    exponential: str
    """The format in which exponentials of float64 are computed: MLX's are float32's."""

    def run(self, work: Callable[[], Any]) -> Any:
        """Return the array that `work` makes, contiguous, once it is there; raise as `Runtime.run` does."""

    def embed(self, table: Any, tokens: Any) -> Any:
        """Return the rows of a table that tokens name."""

    def linear(self, x: Any, weight: Any, bias: Any) -> Any:
        """Return x times the transpose of a weight, plus a bias or None."""

    def norm(self, x: Any, weight: Any, epsilon: float) -> Any:
        """Return x divided by the root of its mean square, times a weight."""

    def rotation(self, head: int, theta: float, like: Any) -> Callable[[Any, Any], Any]:
        """Return what turns (…, positions, head) by rotary positions (count,), halves in pairs."""

    def attend(self, kernel: str, query: Any, key: Any, value: Any, *, causal: bool) -> Any:
        """Return attention by one of `Runtime.attention_kernels`."""

    def softmax(self, scores: Any, at: Any) -> Any:
        """Return softmax over keys that are not behind the positions `at`, in float32 at least."""

    def silu(self, x: Any) -> Any:
        """Return x times its sigmoid."""

    def route(self, logits: Any, count: int) -> tuple[Any, Any]:
        """Return the `count` most probable experts (…, count) of logits (…, experts): their shares, and which they are.

        The shares add up to 1; they are computed in float32 at least.
        """

    def choose(self, logits: Any) -> Any:
        """Return the words (rows, positions) with the largest logits, int64."""

    def join(self, arrays: list[Any]) -> Any:
        """Join arrays along the second axis."""

    def positions(self, count: int, like: Any) -> Any:
        """Return the first positions (count,), on the device of the array `like`."""

    def cache(self, like: Any, layers: int, sizes: tuple[int, int, int, int]) -> KeyValues:
        """Return an empty cache of arrays of such sizes, in the format of the array `like`."""


class Repeated(Protocol):
    """A burst of results that the device computes and compares again and again without the host."""

    def launch(self) -> None:
        """Hand it to the device once more, and do not wait."""

    def answers(self) -> list[int]:
        """Wait for the last launch; return for each result 0 (equal), 1 (different), or else: it was not compared."""


class Runtime(Protocol):
    """One way to devices. Arrays are the runtime's own and opaque to everybody else.

    What a runtime does not define is as it stands here.
    """

    name: str
    """As in `Device.runtime`."""
    attention_kernels: tuple[str, ...]
    """The kernels of attention among which a caller can choose."""
    left_integers: tuple[str, ...]
    """Formats of A in integer products, whose B is int8."""
    packings: tuple[Packing, ...] = ()
    """How weights may be stored in products with quantised weights; empty where it has no such product."""
    gathers: bool = False
    """Whether it runs "rows" and "columns", so that a device makes fresh operands itself."""
    operators: Operators | None = None
    """What the exact canary runs on; None where it does not run through this runtime."""
    pins: bool = False
    """Whether work on a CPU runs on the core that the calling thread is pinned to (`tensors.on_core`)."""

    cannot_repeat: str = ""
    """Why a burst could not be repeated in this process: torch may take later ones for a part of it."""

    rounds: bool = True
    """Whether it rounds to nearest, ties to even: where not, goldens of class R are not tested through it."""

    def devices(self) -> list[Device]:
        """Return the devices that this process can use. Raises `Skip` where a package is missing."""

    def stack(self, device: Device, instruction_set: str) -> dict[str, str]:
        """Return the software that a result on `device` may depend on."""

    def need(self, device: Device) -> None:
        """Raise `Skip` with the reason and the remedy where `device` cannot be used."""

    def strict(self, device: Device) -> AbstractContextManager[dict[str, str]]:
        """Set every switch that may change a result's bits to its exact position; yield what is set; put all back."""

    def upload(self, tensors: tuple[Any, ...], device: Device) -> tuple[Any, ...]:
        """Copy host tensors into new memory of the device, strides kept."""

    def run(self, operation: Operation, operands: tuple[Any, ...], out: Any) -> Any:
        """Compute and return the result, contiguous; `out` is an earlier result whose memory may be reused, or None.

        Raises `Unsupported`, or an error that `errors.is_refusal` knows, where there is no kernel.
        """

    def agree(self, results: list[Any], golden: Any) -> list[bool]:
        """Compare uploaded results with an uploaded golden bit for bit, on the device where it can compare."""

    def download(self, array: Any) -> Any:
        """Return an array as a host tensor with the same bits; a copy, unless the device is a processor."""

    def changed(self, array: Any, change: Change, choice: int) -> Any:
        """Return an array with `change` applied to its bits in storage order, in place where arrays can be changed."""

    def spoil(self, results: list[Any]) -> None:
        """Overwrite results once they are compared: the next ones may land in their memory, and a kernel that writes
        nothing must not find it right already.
        """  # noqa: D205  the sentence needs two lines

    def burst(self, golden: Any) -> int:  # noqa: ARG002
        """Return how many results to compute before one look at their comparisons: one where each is waited for."""
        return 1

    def room(self, like: Any, count: int) -> list[Any]:  # noqa: ARG002
        """Return memory for `count` results of a kind, for `run` to reuse; None where each has memory of its own."""
        return [None] * count

    def repeats(self, device: Device) -> bool:  # noqa: ARG002
        """Return whether `repeated` works here: elsewhere the host hands each operation to the device."""
        return False

    def repeated(self, device: Device, burst: Callable[[], tuple[list[Any], Any]]) -> Repeated:
        """Return what repeats a burst, which returns its results and their golden, on the same memory.

        Raises what the runtime raises where this burst cannot be repeated.
        """
        raise Unsupported(f"{self.name} repeats {burst} on {device.name} through the host alone")

    def memory(self, device: Device) -> tuple[int | None, int | None]:  # noqa: ARG002
        """Return the bytes of the device's memory that are free to this process, and all; None where unknown."""
        return None, None

    def limit_memory(self, device: Device, size: int) -> None:
        """Take at most `size` bytes of the device's memory, where the runtime knows such a limit."""
        del device, size

    def synchronize(self, device: Device) -> None:
        """Wait until the device has finished."""

    def let_go(self) -> None:
        """Wait until the devices of this process have finished, and give their memory back."""


@functools.lru_cache(maxsize=len(RUNTIMES))
def named(name: str) -> Runtime:
    """Return a runtime by its name; its package is imported then, or found missing when it is used."""
    return cast("Runtime", importlib.import_module(f"canaryd.worker.runtime.{name}").RUNTIME)


def let_go() -> None:
    """Let go of the devices of every runtime that this process has loaded."""
    for module in filter(None, (sys.modules.get(f"{__package__}.{name}") for name in RUNTIMES)):
        module.RUNTIME.let_go()


def of(device: Device) -> Runtime:
    """Return the runtime through which a device is tested."""
    return named(device.runtime)


def imported(name: str, *modules: str) -> tuple[list[Any], str]:
    """Return the modules of the package `name`, or as often None and why it cannot be imported."""
    try:
        return [importlib.import_module(module) for module in modules], ""
    except Exception as error:  # noqa: BLE001  a broken installation raises anything
        return [None] * len(modules), f"{sys.executable} cannot import {name}: {type(error).__name__}: {error}"


def numbered(runtime: str, unit: str, index: int, model: str, detail: Mapping[str, str], *, on_host: bool) -> Device:
    """Return a device that its runtime only numbers: its uuid is made of the host's; `on_host`: it is the processor."""
    cpu = stack.cpu()
    return Device(
        uuid=f"{runtime.upper()}-{unit.upper()}-{cpu.uuid.removeprefix('CPU-')}{f'-{index}' if index else ''}",
        backend=f"{runtime}-{unit}",
        index=index,
        model=model,
        weak_identity=True,
        detail={"architecture": cpu.detail["architecture"], **detail},
        card=cpu.uuid if on_host else "",
    )


def operators_of(device: Device) -> Operators:
    """Return what the exact canary runs on; raise `Skip` where it does not run through the device's runtime."""
    found = of(device).operators
    if found is None:
        raise Skip(f"the exact canary does not run through {device.runtime}")
    return found
