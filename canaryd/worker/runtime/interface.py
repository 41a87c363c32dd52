"""The interface of a runtime: upload arrays, run an operation, compare bits; list devices, software, switches, memory.

A probe requests an `Operation` and never calls a library. Problems and goldens (the right results) are tensors of torch
on the host for every runtime: the same bytes go in, and the same bits must come out.

A new runtime is a module here with a constant `RUNTIME`, a name in `canaryd.model.RUNTIMES`, and a setting of
`worker.runtimes`. Only the function `named` imports such a module.
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
"""Maximum bytes of results that are computed before the host reads their comparisons: eight bfloat16 products of size
4096. An H200 computes these in 1.4 ms, and waits for the host at each reading."""
OF_ROOM = 8
"""Part of the memory of a run beside a server that such results take (ours)."""


def burst_bytes(room: int) -> int:
    """Return the largest number of bytes of results in a burst; `room`: bytes that the run can take, 0: no limit."""
    return min(BURST_BYTES, room // OF_ROOM) if room else BURST_BYTES


Change = Callable[[Any, int], None]
"""A function that changes a contiguous one-dimensional view of raw bits in place; the integer selects the position."""


class Unsupported(NotImplementedError):
    """The runtime has no kernel for an operation on this device; this says nothing about the device's health."""


class Elsewhere(Unsupported):
    """The operation ran on another device than the one under test, or nothing proves where it ran."""


@dataclass(frozen=True)
class Packing:
    """The quantised form of a product's weights: groups of codes that share a scale and, in "affine", an offset."""

    mode: str
    """Kind of the scales and codes: "affine", "mxfp4", "mxfp8" or "nvfp4"."""
    bits: int
    """Number of bits of one code."""
    group: int
    """Number of codes in a group."""

    @property
    def name(self) -> str:
        """The part of a case's name that describes the packing, e.g. "affine4x64" or "mxfp4"."""
        return f"affine{self.bits}x{self.group}" if self.mode == "affine" else self.mode


@dataclass(frozen=True)
class Operation:
    """An operation that a device carries out on uploaded operands."""

    name: str
    """What to compute: "matmul"; "quantized" (x times weights packed as in `packing`; operands: x, codes in words of 32
    bits, scales, and offsets in "affine"); "blocks" (A times B, with a scale for each block along K; operands: those of
    `canaryd.worker.numeric.scaled.build`); "grouped" (rows of A times the matrix of their group; operands: A, B of each
    group, and the ends of the groups); "attention"; a name of `canaryd.worker.numeric.indexing.OPERATIONS`; "rows"
    (out[i] = pool[index[i]]); or "columns" (out[:, j] = pool[:, index[j]]). For a batch, "rows" and "columns" take one
    row of indices per matrix, and each matrix can have its own pool."""
    source: str = ""
    """Format of the operands of "matmul", "grouped", "quantized" and "attention": a name of `tensors.FORMATS`, or
    "int8" or "uint8" for the left operand of integers. For "quantized" the result has this format too. For "blocks" a
    name of `canaryd.worker.numeric.products.RECIPES`."""
    target: str = ""
    """Format of the result of "matmul", "blocks" and "grouped"; "" for other operations."""
    kernel: str = ""
    """Kernel of "attention": one of `Runtime.attention_kernels`, or "" for the kernel that the runtime chooses."""
    mask: str = ""
    """Mask of "attention", one of `attention.MASKS`; "" for other operations."""
    turned: bool = False
    """For "rows" and "columns", True: return a transposed view of the gathered matrix. For "quantized", True: the
    weights are stored as (K, N), not as (N, K)."""
    packing: Packing | None = None
    """The way in which the weights of "quantized" are stored; None for other operations."""
    together: int = 1
    """For "columns": number of neighbouring columns that one index selects."""


class KeyValues:
    """Keys and values of the positions so far: for each layer, two arrays (rows, KV heads, length, head size)."""

    def __init__(self, layers: int, zeros: Callable[[], Any]) -> None:
        """Allocate the arrays of each layer with `zeros`, which returns an array with room for all positions."""
        self.keys, self.values = ([zeros() for _ in range(layers)] for _ in range(2))
        self.used = 0

    def extend(self, layer: int, key: Any, value: Any) -> tuple[Any, Any]:
        """Append new positions of one layer; return its (keys, values) so far. The caller increases `used`."""
        end = self.used + key.shape[2]
        self.keys[layer][:, :, self.used : end] = key
        self.values[layer][:, :, self.used : end] = value
        return self.keys[layer][:, :, :end], self.values[layer][:, :, :end]


class Operators(Protocol):
    """The operators of a language model in one runtime, computed as in serving with this runtime.

    Arrays also support +, *, @, slices, `shape`, `reshape` and `swapaxes`.
    """

    exponential: str
    """The format in which the runtime computes exponentials of float64 numbers: MLX uses float32."""

    def run(self, work: Callable[[], Any]) -> Any:
        """Call `work` and return its array, contiguous and completely computed; raise as `Runtime.run` does."""

    def embed(self, table: Any, tokens: Any) -> Any:
        """Return the rows of `table` with the numbers `tokens`."""

    def linear(self, x: Any, weight: Any, bias: Any) -> Any:
        """Return `x` times the transpose of `weight`, plus `bias` if it is not None."""

    def norm(self, x: Any, weight: Any, epsilon: float) -> Any:
        """Return `x` divided by the root of (its mean square + `epsilon`), times `weight` (RMS norm)."""

    def rotation(self, head: int, theta: float, like: Any) -> Callable[[Any, Any], Any]:
        """Return a function that takes (x, positions) and returns x (…, positions, head), rotated by the positions.

        The function pairs dimension i with i + head/2; `theta` is the base of the frequencies; `like` is an array on
        the device.
        """

    def attend(self, kernel: str, query: Any, key: Any, value: Any, *, causal: bool) -> Any:
        """Return the attention of query, key and value, computed by `kernel`, one of `Runtime.attention_kernels`."""

    def softmax(self, scores: Any, at: Any) -> Any:
        """Return each query's softmax over the keys up to its own position, given in `at`; in float32 or wider."""

    def silu(self, x: Any) -> Any:
        """Return x times its sigmoid."""

    def route(self, logits: Any, count: int) -> tuple[Any, Any]:
        """Return (shares, numbers) of the `count` most probable experts for each word, from logits (…, experts).

        Both arrays are (…, count). The shares of a word add up to 1; they are computed in float32 or wider.
        """

    def choose(self, logits: Any) -> Any:
        """Return the number of the word with the largest logit at each position: int64 (rows, positions)."""

    def join(self, arrays: list[Any]) -> Any:
        """Return the arrays joined along the second axis."""

    def positions(self, count: int, like: Any) -> Any:
        """Return the positions 0 … count - 1 (count,), on the device of the array `like`."""

    def cache(self, like: Any, layers: int, sizes: tuple[int, int, int, int]) -> KeyValues:
        """Return an empty cache for `layers` layers of arrays with these `sizes`, in the format of the array `like`."""


class Repeated(Protocol):
    """A burst of results (computed and compared as one group) that the device repeats without the host."""

    def launch(self) -> None:
        """Start the burst on the device once more, without waiting for it."""

    def answers(self) -> list[int]:
        """Wait for the last launch; return a number per result: 0 equal, 1 different, any other number not compared."""


class Runtime(Protocol):
    """One library that reaches devices. Only the runtime itself looks into its arrays.

    The methods below are the defaults for runtimes that do not override them.
    """

    name: str
    """The runtime's name, as in `Device.runtime`."""
    attention_kernels: tuple[str, ...]
    """The attention kernels among which a caller can choose."""
    left_integers: tuple[str, ...]
    """Formats of the left operand A in integer products; the right operand B is int8."""
    packings: tuple[Packing, ...] = ()
    """Possible packings of the weights in quantised products; empty if the runtime has no such product."""
    gathers: bool = False
    """Whether the runtime has the operations "rows" and "columns", with which a device makes fresh operands itself."""
    operators: Operators | None = None
    """The operators for the exact canary; None if the exact canary does not run through this runtime."""
    pins: bool = False
    """Whether work on a CPU runs on the core that the calling thread is pinned to (`tensors.on_core`)."""

    cannot_repeat: str = ""
    """The reason why repeating a burst failed in this process, or "". After a failure torch may mix later bursts with
    that one, so none is tried."""

    rounds: bool = True
    """Whether the runtime rounds to nearest, ties to even; if not, cases whose golden needs rounding are not tested."""

    def devices(self) -> list[Device]:
        """Return the devices that this process can use. Raises `Skip` if a package is missing."""

    def stack(self, device: Device, instruction_set: str) -> dict[str, str]:
        """Return the versions of the software (name → version) on which a result of `device` may depend."""

    def need(self, device: Device) -> None:
        """Raise `Skip` with the reason and the remedy if `device` cannot be used."""

    def strict(self, device: Device) -> AbstractContextManager[dict[str, str]]:
        """Set every switch that may change a result's bits to its exact value during the block; yield the settings."""

    def upload(self, tensors: tuple[Any, ...], device: Device) -> tuple[Any, ...]:
        """Return copies of host tensors in new memory of the device; the strides stay the same."""

    def run(self, operation: Operation, operands: tuple[Any, ...], out: Any) -> Any:
        """Compute and return the contiguous result; `out` is an earlier result whose memory may be reused, or None.

        Raises `Unsupported`, or an error for which `errors.is_refusal` is true, if there is no kernel.
        """

    def agree(self, results: list[Any], golden: Any) -> list[bool]:
        """Return for each uploaded result whether its bits equal the golden's; the device compares if it can."""

    def download(self, array: Any) -> Any:
        """Return an array as a host tensor with the same bits; only a processor's array may be returned uncopied."""

    def changed(self, array: Any, change: Change, choice: int) -> Any:
        """Return an array after `change` was called on its raw bits with `choice`, in place if that is possible."""

    def spoil(self, results: list[Any]) -> None:
        """Overwrite results after a comparison. A kernel that writes nothing then leaves no right result behind."""

    def burst(self, golden: Any, most: int = BURST_BYTES) -> int:  # noqa: ARG002
        """Return the number of results like `golden` in one burst of `most` bytes; at least 1."""
        return 1

    def room(self, like: Any, count: int) -> list[Any]:  # noqa: ARG002
        """Return `count` arrays like `like` for the results of `run`; each is None if `run` cannot use given memory."""
        return [None] * count

    def repeats(self, device: Device) -> bool:  # noqa: ARG002
        """Return whether `repeated` works on the device; if not, the host starts each operation separately."""
        return False

    def repeated(self, device: Device, burst: Callable[[], tuple[list[Any], Any]]) -> Repeated:
        """Return an object that runs `burst` again and again on the same memory.

        `burst` computes results and returns (results, golden). Raises the runtime's exception if this is impossible.
        """
        raise Unsupported(f"{self.name} repeats {burst} on {device.name} through the host alone")

    def memory(self, device: Device) -> tuple[int | None, int | None]:  # noqa: ARG002
        """Return (free bytes of the device's memory for this process, total bytes), each None if it is unknown."""
        return None, None

    def limit_memory(self, device: Device, size: int) -> None:
        """Limit this process to `size` bytes of the device's memory, if the runtime supports such a limit."""
        del device, size

    def synchronize(self, device: Device) -> None:
        """Wait until the device has finished all work."""

    def let_go(self) -> None:
        """Wait until the devices of this process have finished, and release their memory."""


@functools.lru_cache(maxsize=len(RUNTIMES))
def named(name: str) -> Runtime:
    """Return the runtime with this name. If its package is missing, only the use of the runtime raises an error."""
    return cast("Runtime", importlib.import_module(f"canaryd.worker.runtime.{name}").RUNTIME)


def let_go() -> None:
    """Release the devices of every runtime that this process has loaded."""
    for module in filter(None, (sys.modules.get(f"{__package__}.{name}") for name in RUNTIMES)):
        module.RUNTIME.let_go()


def of(device: Device) -> Runtime:
    """Return the runtime through which a device is tested."""
    return named(device.runtime)


def imported(name: str, *modules: str) -> tuple[list[Any], str]:
    """Import a package; return ([its modules], ""), or ([None for each module], the reason) if this failed."""
    try:
        return [importlib.import_module(module) for module in modules], ""
    except Exception as error:  # noqa: BLE001  a broken installation raises anything
        return [None] * len(modules), f"{sys.executable} cannot import {name}: {type(error).__name__}: {error}"


def numbered(runtime: str, unit: str, index: int, model: str, detail: Mapping[str, str], *, on_host: bool) -> Device:
    """Return a device that its runtime knows only by number, with a uuid from the host's; `on_host`: if it is a CPU."""
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
    """Return the operators for the exact canary; raise `Skip` if the device's runtime does not run exact canaries."""
    found = of(device).operators
    if found is None:
        raise Skip(f"the exact canary does not run through {device.runtime}")
    return found
