"""The runtime of JAX: the only library for TPUs, and one more (XLA) for CPUs and GPUs. Only this module imports JAX.

By default JAX multiplies float32 in bfloat16 on TPUs and in TF32 on GPUs, so every product sets its algorithm
(`jax.lax.DotAlgorithmPreset`) and is refused if the device lacks this algorithm. Arrays cannot be changed: a method
that changes an array returns a new one.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from canaryd.model import Device
from canaryd.probe import Skip
from canaryd.worker.numeric import stack as host
from canaryd.worker.numeric.tensors import bytes_of, flat_bits, torch, visible_cores
from canaryd.worker.runtime.interface import Change, Operation, Runtime, Unsupported, imported, numbered

(jax, jnp, np), _why_not = imported("jax", "jax", "jax.numpy", "numpy")
if jax is not None:
    jax.config.update("jax_enable_x64", True)  # else float64 and int64 become half as wide, silently

UNITS = ("cpu", "tpu", "cuda", "rocm")
"""Names of JAX's platforms."""
ALGORITHMS = {
    ("float64", "float64"): "F64_F64_F64",
    ("float32", "float32"): "F32_F32_F32",
    ("tfloat32", "float32"): "TF32_TF32_F32",
    ("bfloat16", "float32"): "BF16_BF16_F32",
    ("bfloat16", "bfloat16"): "BF16_BF16_F32",
    ("float16", "float32"): "F16_F16_F32",
    ("float16", "float16"): "F16_F16_F16",
    ("int8", "int32"): "",
    ("uint8", "int32"): "",
}
"""(format of the operands, format of the result) → name of the algorithm; integers need no algorithm."""


@dataclass(frozen=True)
class _Array:
    """A JAX array, and a flag: whether its last two dimensions are exchanged in memory."""

    data: Any
    turned: bool = False


class _Jax(Runtime):
    """The runtime of JAX's devices."""

    name = "jax"
    attention_kernels = ("XLA",)
    left_integers = ("int8", "uint8")
    pins = False  # a thread of XLA's own computes

    def __init__(self) -> None:
        self._device: Any = None

    def devices(self) -> list[Device]:
        return [_device(unit, index, found) for unit in UNITS for index, found in enumerate(_found(unit))]

    def stack(self, device: Device, instruction_set: str) -> dict[str, str]:  # noqa: ARG002  XLA chooses by itself
        return {
            **host.surroundings(device),
            "jax": jax.__version__,
            "jaxlib": jax.lib.__version__,
            "platform_version": device.detail["platform_version"],
            **{name: os.environ[name] for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS") if os.environ.get(name)},
            "visible_cores": str(len(visible_cores())),
        }

    def need(self, device: Device) -> None:
        there = _found(device.unit)
        if device.index >= len(there):
            raise Skip(f"{device.name} is not visible: JAX finds {len(there)} devices of its kind")
        self._device = there[device.index]

    @contextlib.contextmanager
    def strict(self, device: Device) -> Iterator[dict[str, str]]:
        """Yield the precisions: each product sets its own algorithm, and attention multiplies float32 in float32."""
        self.need(device)
        with jax.default_matmul_precision("highest"):
            yield {"algorithm": "named for each product", "jax_default_matmul_precision": "highest"}

    def upload(self, tensors: tuple[Any, ...], device: Device) -> tuple[Any, ...]:
        self.need(device)
        return tuple(map(self._array, tensors))

    def run(self, operation: Operation, operands: tuple[Any, ...], out: Any) -> Any:  # noqa: ARG002  results are new
        if self._device.platform == "tpu" and operation.source in ("float32", "tfloat32", "float64"):
            raise Unsupported(f"a TPU multiplies bfloat16, and {operation.source} in several parts")
        turned = tuple(a.turned for a in operands)
        compute = _compiled(_compute, static_argnums=(0, 1))
        try:
            return _Array(compute(operation, turned, *(a.data for a in operands)).block_until_ready())
        except ValueError as error:  # arguments, which JAX checks before it computes
            raise Unsupported(str(error)) from error
        except jax.errors.JaxRuntimeError as error:
            if str(error).startswith("UNIMPLEMENTED"):
                raise Unsupported(str(error)) from error
            raise

    def agree(self, results: list[Any], golden: Any) -> list[bool]:
        return [bool(_compiled(_same)(result.data, golden.data)) for result in results]

    def download(self, array: Any) -> Any:
        held = jax.device_get(array.data)
        dtype = getattr(torch, str(held.dtype).replace("bool_", "bool"))
        raw = torch.frombuffer(bytearray(held.tobytes()), dtype=torch.uint8)
        tensor = raw.view(dtype).view(tuple(held.shape))
        return tensor.transpose(-1, -2) if array.turned else tensor

    def changed(self, array: Any, change: Change, choice: int) -> Any:
        tensor = self.download(array)
        change(flat_bits(tensor), choice)
        return self._array(tensor)

    def spoil(self, results: list[Any]) -> None:
        """Invert every result in the same memory: each array is donated to XLA, which reuses its memory."""
        for result in results:
            _compiled(_inverted, donate_argnums=0)(result.data).block_until_ready()

    def synchronize(self, device: Device) -> None:
        """Wait for the device by a transfer: it is the last work in the device's queue."""
        self.need(device)
        (jax.device_put(0, self._device) + 0).block_until_ready()

    def let_go(self) -> None:
        """Delete the compiled functions; arrays are freed with the objects that hold them."""
        if jax is not None:
            jax.clear_caches()

    def _array(self, tensor: Any) -> _Array:
        turned = not tensor.is_contiguous()
        stored = tensor.transpose(-1, -2) if turned else tensor
        name = str(stored.dtype).removeprefix("torch.")
        # By NumPy, which JAX needs anyway: JAX would compile a program for each new shape.
        held = np.frombuffer(bytes_of(stored), dtype=jnp.dtype(name)).reshape(tuple(stored.shape))
        return _Array(jax.device_put(held, self._device, may_alias=False).block_until_ready(), turned)


def _found(unit: str) -> list[Any]:
    """Return JAX's devices of one platform, or [] if JAX has no plugin for the platform. Raises `Skip` without JAX."""
    if jax is None:
        raise Skip(f"{_why_not}. Install it there: pip install jax, 'jax[cuda13]' or 'jax[tpu]'")
    try:
        return list(jax.local_devices(backend=unit))
    except RuntimeError:  # "Unknown backend", or no device of it
        return []


def _device(unit: str, index: int, found: Any) -> Device:
    detail = {
        "jax": str(jax.__version__),
        "platform_version": str(found.client.platform_version).replace("\n", " "),
    }
    if coordinates := getattr(found, "coords", None):
        core = getattr(found, "core_on_chip", None)  # of a TPU; GPUs have coordinates alone
        detail["coordinates"] = f"{tuple(coordinates)}" + ("" if core is None else f", core {core}")
    model = host.cpu().model if unit == "cpu" else str(found.device_kind)
    return numbered("jax", unit, index, model, detail, on_host=unit == "cpu")


def _bits(array: Any) -> Any:
    """Return an array's raw bits as unsigned integers of the same width."""
    return array if array.dtype == bool else jax.lax.bitcast_convert_type(array, f"uint{8 * array.dtype.itemsize}")


def _same(a: Any, b: Any) -> Any:
    return jnp.all(_bits(a) == _bits(b))


def _inverted(array: Any) -> Any:
    return ~array if array.dtype == bool else jax.lax.bitcast_convert_type(~_bits(array), array.dtype)


@functools.lru_cache
def _compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Return `function` compiled by XLA, once for each shape; `_Jax.let_go` deletes the compiled code."""
    return jax.jit(function, **options)  # type: ignore[no-any-return]


def _compute(operation: Operation, turned: tuple[bool, ...], *operands: Any) -> Any:
    if operation.name == "matmul":
        return _matmul(operation, turned, *operands)
    if operation.name == "attention":
        return _attention(operation, *operands)
    return _INDEX[operation.name](*operands)


def _matmul(operation: Operation, turned: tuple[bool, ...], a: Any, b: Any) -> Any:
    name = ALGORITHMS.get((operation.source, operation.target))
    if name is None:
        raise Unsupported(f"no algorithm of JAX is named for {operation.source} into {operation.target}")
    last, batch = a.ndim - 1, tuple(range(a.ndim - 2))
    summed = (last - 1 if turned[0] else last,), (last if turned[1] else last - 1,)
    algorithm = getattr(jax.lax.DotAlgorithmPreset, name) if name else None
    return jax.lax.dot_general(
        a, b, (summed, (batch, batch)), precision=algorithm, preferred_element_type=operation.target
    )


def _attention(operation: Operation, query: Any, key: Any, value: Any, allowed: Any) -> Any:
    given = [jnp.swapaxes(each, 1, 2) for each in (query, key, value)]  # heads come behind positions
    out = jax.nn.dot_product_attention(
        *given,
        scale=query.shape[-1] ** -0.5,
        is_causal=operation.mask == "causal",
        mask=allowed if operation.mask == "bool" else None,
        bias=allowed if operation.mask == "float" else None,
        implementation="xla",
    )
    return jnp.swapaxes(out, 1, 2)


def _experts(tokens: Any, expert: Any) -> Any:
    order = jnp.argsort(expert, stable=True)
    changed = jnp.take(tokens, order) ^ (jnp.take(expert, order) * 0x9E3779B9)
    return jnp.zeros_like(tokens).at[order].set(changed)


_INDEX: dict[str, Callable[..., Any]] = {
    "gather": lambda table, index: jnp.take(table, index, axis=0),
    "embedding": lambda table, index: jnp.take(table, index, axis=0),
    "scatter": lambda values, place: jnp.zeros_like(values).at[place].set(values),
    "index_add": lambda values, place: jnp.ones((values.size // 8,), dtype=values.dtype).at[place].add(values),
    "cumsum": lambda values: jnp.cumsum(values, axis=0),
    "sort": lambda values: jnp.sort(values, axis=0),
    "topk": lambda values: jax.lax.top_k(values, values.size // 16)[1].astype(values.dtype),
    "modulo": lambda values, by: jnp.remainder(values, by),  # noqa: PLW0108  JAX may be missing
    "bucketize": lambda values, edges: jnp.searchsorted(edges, values).astype(values.dtype),
    "experts": _experts,
}
RUNTIME = _Jax()
