"""The runtime of MLX, for CPUs, Metal on Macs, and CUDA. No other module imports MLX.

Arrays lie in memory that the host shares, so their bits are read and changed in place. MLX has no integer products, and
no products whose result has another format than the operands.
"""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from canaryd.model import Device
from canaryd.probe import Skip
from canaryd.worker.numeric import stack as host
from canaryd.worker.numeric.tensors import bytes_of, flat_bits, torch, visible_cores
from canaryd.worker.runtime.interface import (
    Change,
    KeyValues,
    Operation,
    Packing,
    Runtime,
    Unsupported,
    imported,
    numbered,
)

(mx,), _why_not = imported("mlx", "mlx.core")

TF32 = "MLX_ENABLE_TF32"
"""Environment variable that MLX reads at its first product; if it is not set, it counts as 1. With 1, MLX rounds
float32 operands of products, attention, convolutions and quantised products to TF32 on CUDA and the newest Metal (mlx,
mlx/utils.h, enable_tf32)."""
PACKINGS = (
    *(Packing("affine", bits, group) for bits in (4, 8) for group in (32, 64, 128)),
    *(Packing("mxfp4", 4, 32), Packing("mxfp8", 8, 32), Packing("nvfp4", 4, 16)),
)
"""The packings of mlx 0.32; mode "affine" is limited to the widths with which models are served."""
_WIDTHS = {1: "uint8", 2: "uint16", 4: "uint32", 8: "uint64"}


class _Operators:
    """The operators of a language model, called as mlx-lm calls them."""

    exponential = "float32"

    def run(self, work: Callable[[], Any]) -> Any:
        return _there(work)

    def embed(self, table: Any, tokens: Any) -> Any:
        return table[tokens]

    def linear(self, x: Any, weight: Any, bias: Any) -> Any:
        return x @ weight.T if bias is None else mx.addmm(bias, x, weight.T)

    def norm(self, x: Any, weight: Any, epsilon: float) -> Any:
        return mx.fast.rms_norm(x, weight, epsilon)

    def rotation(self, head: int, theta: float, like: Any) -> Callable[[Any, Any], Any]:  # noqa: ARG002  MLX has its own
        """Return MLX's own function that rotates x; it uses only the first of the positions."""
        return lambda x, at: mx.fast.rope(x, head, traditional=False, base=theta, scale=1.0, offset=at[0])

    def attend(self, kernel: str, query: Any, key: Any, value: Any, *, causal: bool) -> Any:  # noqa: ARG002  it has one
        mask = "causal" if causal else None
        return mx.fast.scaled_dot_product_attention(query, key, value, scale=query.shape[-1] ** -0.5, mask=mask)

    def softmax(self, scores: Any, at: Any) -> Any:
        later = mx.arange(scores.shape[-1]) > at[:, None]
        return mx.softmax(mx.where(later, mx.array(-mx.inf, dtype=scores.dtype), scores), axis=-1, precise=True)

    def silu(self, x: Any) -> Any:
        return x * mx.sigmoid(x)

    def route(self, logits: Any, count: int) -> tuple[Any, Any]:
        """Return (shares, experts) like `Operators.route`; softmax covers the chosen experts only, as in mlx-lm."""
        chosen = mx.argpartition(-logits, kth=count - 1, axis=-1)[..., :count]
        return mx.softmax(mx.take_along_axis(logits, chosen, axis=-1), axis=-1, precise=True), chosen

    def choose(self, logits: Any) -> Any:
        return mx.argmax(logits, axis=-1).astype(mx.int64)

    def join(self, arrays: list[Any]) -> Any:
        return mx.concatenate(arrays, axis=1)

    def positions(self, count: int, like: Any) -> Any:  # noqa: ARG002  on the default device
        return mx.arange(count)

    def cache(self, like: Any, layers: int, sizes: tuple[int, int, int, int]) -> KeyValues:
        return KeyValues(layers, lambda: mx.zeros(sizes, dtype=like.dtype))


class _Mlx(Runtime):
    """The runtime of MLX's devices; its arrays are arrays of MLX."""

    name = "mlx"
    attention_kernels = ("FAST",)
    left_integers = ("int8",)
    packings = PACKINGS
    operators = _Operators()
    pins = False  # a thread of MLX's own computes

    def devices(self) -> list[Device]:
        self._import()
        found = [_device("cpu", 0, {})]
        for index in range(mx.device_count(mx.gpu)):
            facts = mx.device_info(mx.Device(mx.gpu, index))
            cuda = "pci_bus_id" in facts or "compute_capability_major" in facts
            found.append(_device("cuda" if cuda else "metal", index, facts))
        return found

    def stack(self, device: Device, instruction_set: str) -> dict[str, str]:
        facts = host.surroundings(device)
        return {
            **facts,
            "mlx": mx.__version__,
            TF32: os.environ.get(TF32, "1"),
            "instruction_set": instruction_set or "strict",
            "unit": device.unit,
            "architecture": device.detail.get("architecture", platform.machine()),
            "visible_cores": str(len(visible_cores())),
        }

    def need(self, device: Device) -> None:
        self._import()
        kind = mx.cpu if device.unit == "cpu" else mx.gpu
        if not mx.is_available(mx.Device(kind, device.index)):
            raise Skip(f"{device.name} is not visible: MLX finds {mx.device_count(kind)} devices of its kind")
        mx.set_default_device(mx.Device(kind, device.index))

    def _import(self) -> None:
        if mx is None:
            raise Skip(f"{_why_not}. Install it there: pip install mlx on a Mac, 'mlx[cpu]' or 'mlx[cuda13]' on Linux")

    @contextlib.contextmanager
    def strict(self, device: Device) -> Iterator[dict[str, str]]:
        """Yield {`TF32`: value}, the only switch that changes bits; its value is fixed when the worker starts."""
        self.need(device)
        yield {TF32: os.environ.get(TF32, "1")}

    def upload(self, tensors: tuple[Any, ...], device: Device) -> tuple[Any, ...]:
        self.need(device)
        return tuple(map(_array, tensors))

    def run(self, operation: Operation, operands: tuple[Any, ...], out: Any) -> Any:  # noqa: ARG002  results are new
        """Return the computed result; wait for it, because MLX evaluates lazily."""
        return _there(lambda: _compute(operation, operands))

    def agree(self, results: list[Any], golden: Any) -> list[bool]:
        right = mx.view(golden, _words(golden))
        same = mx.stack([mx.all(mx.view(r, _words(r)) == right) for r in results])
        return [bool(s) for s in same.tolist()]

    def download(self, array: Any) -> Any:
        return _seen(mx.contiguous(array)).clone()

    def changed(self, array: Any, change: Change, choice: int) -> Any:
        upright = memoryview(mx.view(array, _words(array))).c_contiguous
        change(flat_bits(_seen(array if upright else mx.swapaxes(array, -1, -2))), choice)
        return array

    def spoil(self, results: list[Any]) -> None:
        for result in results:
            flat_bits(_seen(result)).fill_(-1 if result.itemsize > 1 else 255)

    def memory(self, device: Device) -> tuple[int | None, int | None]:
        """Return (free, total) bytes of a CUDA device's memory; Metal does not report free memory, so free is None."""
        facts = mx.device_info(mx.Device(mx.gpu, device.index)) if mx is not None else {}
        return facts.get("free_memory"), facts.get("total_memory") or facts.get("memory_size")

    def limit_memory(self, device: Device, size: int) -> None:  # noqa: ARG002  it is the process's
        if mx is not None:
            mx.set_memory_limit(size)
            mx.set_cache_limit(size // 2)

    def synchronize(self, device: Device) -> None:  # noqa: ARG002  the default device is the one under test
        mx.synchronize()

    def let_go(self) -> None:
        if mx is not None:
            mx.synchronize()
            mx.clear_cache()


def _device(unit: str, index: int, facts: Any) -> Device:
    """Return a device; `facts` is what MLX says about the device, {} for the CPU."""
    uuid, bus = str(facts.get("uuid", "")), str(facts.get("pci_bus_id", ""))
    detail = {"mlx": str(mx.__version__), "architecture": str(facts.get("architecture", platform.machine()))}
    detail |= {name: value for name, value in (("bus_id", bus), ("gpu_uuid", uuid)) if value}
    model = host.cpu().model if unit == "cpu" else str(facts.get("device_name", ""))
    found = replace(
        numbered("mlx", unit, index, model, detail, on_host=unit == "cpu"), instruction_sets=("strict", "tf32")
    )
    if not uuid:
        return found
    return replace(found, uuid=f"MLX-{unit.upper()}-{uuid.removeprefix('GPU-')}", weak_identity=False)


def _words(array: Any) -> Any:
    """Return MLX's unsigned integer type that is as wide as an element of the array."""
    return getattr(mx, _WIDTHS[array.itemsize])


def _array(tensor: Any) -> Any:
    stored = tensor if tensor.is_contiguous() else tensor.transpose(-1, -2)
    dtype = getattr(mx, "bool_" if tensor.dtype == torch.bool else str(tensor.dtype).removeprefix("torch."), None)
    if dtype is None:
        raise Unsupported(f"MLX has no {str(tensor.dtype).removeprefix('torch.')}")
    if not tensor.numel():
        return mx.zeros(tuple(tensor.shape), dtype=dtype)
    array = mx.view(mx.array(memoryview(bytes_of(stored))), dtype).reshape(tuple(stored.shape))
    array = array if tensor.is_contiguous() else mx.swapaxes(array, -1, -2)
    mx.eval(array)
    return array


def _seen(array: Any) -> Any:
    """Return a host tensor that shares the memory of a contiguous array."""
    raw = torch.frombuffer(memoryview(mx.view(array, _words(array))), dtype=torch.uint8)
    dtype = torch.bool if array.dtype == mx.bool_ else getattr(torch, str(array.dtype).rpartition(".")[2])
    return raw.view(dtype).view(tuple(array.shape))


def _there(work: Callable[[], Any]) -> Any:
    """Call `work` and return its array, contiguous and completely computed."""
    try:
        result = mx.contiguous(work())
        mx.eval(result)
    except ValueError as error:  # arguments, which MLX checks before it computes
        raise Unsupported(str(error)) from error
    return result


def _matmul(operation: Operation, a: Any, b: Any) -> Any:
    if operation.source == "tfloat32" and os.environ.get(TF32, "1") == "0":
        raise Unsupported(f"{TF32}=0 keeps products of float32 in float32")
    if operation.source == "float32" and os.environ.get(TF32, "1") != "0":
        raise Unsupported(f"{TF32}=1 rounds float32 operands to TF32; see tfloat32")
    if operation.source != operation.target and (operation.source, operation.target) != ("tfloat32", "float32"):
        raise Unsupported(f"MLX gives products of {operation.source} in {operation.source} alone")
    return mx.matmul(a, b)


def _quantized(operation: Operation, x: Any, codes: Any, scales: Any, offsets: Any = None) -> Any:
    packing = operation.packing
    assert packing is not None
    words, how = mx.view(codes, mx.uint32), {"mode": packing.mode, "bits": packing.bits, "group_size": packing.group}
    return mx.quantized_matmul(x, words, scales, offsets, transpose=not operation.turned, **how)


def _attention(operation: Operation, query: Any, key: Any, value: Any, allowed: Any) -> Any:
    mask: Any = None
    if operation.mask == "causal":  # MLX aligns its own at the bottom right
        L, S = query.shape[2], key.shape[2]
        mask = "causal" if L == S else mx.tril(mx.ones((L, S), dtype=mx.bool_))
    elif operation.mask in ("bool", "float"):
        mask = allowed
    return mx.fast.scaled_dot_product_attention(query, key, value, scale=query.shape[-1] ** -0.5, mask=mask)


def _compute(operation: Operation, operands: tuple[Any, ...]) -> Any:
    if operation.name == "matmul":
        return _matmul(operation, *operands)
    if operation.name == "quantized":
        return _quantized(operation, *operands)
    if operation.name == "attention":
        return _attention(operation, *operands)
    return _INDEX[operation.name](*operands)


def _scatter(values: Any, place: Any) -> Any:
    out = mx.zeros_like(values)
    out[place] = values
    return out


def _experts(tokens: Any, expert: Any) -> Any:
    # A key of its own for every token: MLX does not promise that its sort is stable.
    order = mx.argsort(expert * tokens.size + mx.arange(tokens.size, dtype=mx.int64))
    number = mx.take(expert, order)
    out = mx.zeros_like(tokens)
    out[order] = mx.bitwise_xor(mx.take(tokens, order), number * 0x9E3779B9)
    return out


_INDEX: dict[str, Callable[..., Any]] = {
    "gather": lambda table, index: mx.take(table, index, axis=0),
    "embedding": lambda table, index: mx.take(table, index, axis=0),
    "scatter": _scatter,
    "index_add": lambda values, place: mx.ones((values.size // 8,), dtype=mx.int64).at[place].add(values),
    "cumsum": lambda values: mx.cumsum(values, axis=0),
    "sort": lambda values: mx.sort(values, axis=0),
    "topk": lambda values: mx.argsort(-values)[: values.size // 16].astype(mx.int64),
    "modulo": lambda values, by: mx.remainder(values, by),  # noqa: PLW0108  MLX may be missing
    "bucketize": lambda values, edges: mx.searchsorted(edges, values).astype(mx.int64),
    "experts": _experts,
}
RUNTIME = _Mlx()
