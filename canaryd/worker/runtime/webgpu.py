"""The runtime of WebGPU: any GPU with a Vulkan, Metal or Direct3D 12 driver. No other module imports wgpu.

The shaders are plain WGSL, which uses shader units and no matrix units. WGSL guarantees results that are exactly
representable. It guarantees no rounding mode, subnormals, infinities, NaN or sign of zero (WGSL, section 15.7,
"Floating Point Evaluation"): goldens that need more are refused.
"""

from __future__ import annotations

import contextlib
import functools
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from canaryd.model import Device
from canaryd.probe import Skip
from canaryd.worker.numeric import stack as host
from canaryd.worker.numeric.tensors import bits, bytes_of, flat_bits, torch, visible_cores
from canaryd.worker.runtime import wgsl
from canaryd.worker.runtime.interface import Change, Operation, Runtime, Unsupported, imported, numbered

(wgpu, extras), _why_not = imported("wgpu", "wgpu", "wgpu.backends.wgpu_native.extras")

UNITS = {"Vulkan": "vulkan", "Metal": "metal", "D3D12": "d3d12"}
"""Interface of an adapter → name of the unit. OpenGL is left out because it shows the same GPUs again."""
LIMITS = ("max-buffer-size", "max-storage-buffer-binding-size")
FLOATS = {"float16": (0x7C00, 0x7FFF), "float32": (0x7F800000, 0x7FFFFFFF)}
"""Format → mask of the exponent's bits, and mask of all bits except the sign."""


@dataclass(frozen=True)
class _Array:
    """A buffer of the device that holds the raw bytes of a tensor, padded to whole words."""

    buffer: Any
    dtype: Any
    shape: tuple[int, ...]
    """The shape of the tensor as the caller sees it; `turned` does not change it."""
    turned: bool = False
    """Whether the last two dimensions are exchanged in memory."""

    @property
    def nbytes(self) -> int:
        """Number of bytes without the padding."""
        return int(torch.Size(self.shape).numel()) * int(self.dtype.itemsize)


class _Webgpu(Runtime):
    """The runtime of WebGPU's adapters; its arrays are buffers on the device."""

    name = "webgpu"
    attention_kernels = ()  # WGSL gives exp within 3 + 2 |x| units in the last place: no one right answer
    left_integers = ("int8", "uint8")
    rounds = False

    def __init__(self) -> None:
        self._opened: dict[str, Any] = {}
        self._gpu: Any = None

    def devices(self) -> list[Device]:
        if not (found := [_device(*each) for each in _adapters()]):
            raise Skip(
                "wgpu finds no adapter: install the GPU's Vulkan driver; Debian's mesa-vulkan-drivers has a"
                " software renderer"
            )
        return found

    def stack(self, device: Device, instruction_set: str) -> dict[str, str]:  # noqa: ARG002
        facts = {name: device.detail[name] for name in ("wgpu", "driver", "renderer", "units")}
        return {**host.surroundings(device), **facts, "visible_cores": str(len(visible_cores()))}

    def need(self, device: Device) -> None:
        if device.name not in self._opened:
            adapters = {_device(adapter, unit, index).name: adapter for adapter, unit, index in _adapters()}
            if device.name not in adapters:
                raise Skip(f"{device.name} is not visible: wgpu finds {', '.join(adapters) or 'no adapter'}")
            adapter = adapters[device.name]
            self._opened[device.name] = adapter.request_device_sync(
                required_features=[f for f in ("shader-f16",) if f in adapter.features],
                required_limits={name: adapter.limits[name] for name in LIMITS},
            )
        self._gpu = self._opened[device.name]

    @contextlib.contextmanager
    def strict(self, device: Device) -> Iterator[dict[str, str]]:
        """Yield what WGSL guarantees about results, as name → text; WGSL has no switch to set."""
        self.need(device)
        yield {"guarantee": "WGSL: exactly representable results alone", "units": device.detail["units"]}

    def upload(self, tensors: tuple[Any, ...], device: Device) -> tuple[Any, ...]:
        """Return copies of host tensors in new buffers; raise `Unsupported` for values that WGSL does not guarantee."""
        self.need(device)
        return tuple(map(self._array, tensors))

    def run(self, operation: Operation, operands: tuple[Any, ...], out: Any) -> Any:
        if operation.name == "matmul":
            return self._product(operation, operands[0], operands[1], out)
        if operation.name in wgsl.INDEX:
            return self._index(operation.name, operands, out)
        raise Unsupported(f"canaryd has no WGSL for {operation.name}")

    def agree(self, results: list[Any], golden: Any) -> list[bool]:
        flags = [self.new_buffer(4) for _ in results]
        count, rest = -(-golden.nbytes // 4), golden.nbytes % 4
        kept = (1 << 8 * rest) - 1 if rest else 0xFFFFFFFF
        for result, flag in zip(results, flags, strict=True):
            self.compute(wgsl.DIFFERS, count, (kept,), result.buffer, golden.buffer, flag)
        return [not any(self._gpu.queue.read_buffer(flag)) for flag in flags]

    def download(self, array: Any) -> Any:
        raw = bytearray(self._gpu.queue.read_buffer(array.buffer))[: array.nbytes]
        shape = (*array.shape[:-2], array.shape[-1], array.shape[-2]) if array.turned else array.shape
        tensor = torch.frombuffer(raw, dtype=array.dtype).view(shape)
        return tensor.transpose(-1, -2) if array.turned else tensor

    def changed(self, array: Any, change: Change, choice: int) -> Any:
        tensor = self.download(array)
        change(flat_bits(tensor), choice)
        self._gpu.queue.write_buffer(array.buffer, 0, _raw(tensor))
        return array

    def spoil(self, results: list[Any]) -> None:
        for result in results:
            self.compute(wgsl.FILL, result.buffer.size // 4, (), result.buffer)

    def synchronize(self, device: Device) -> None:
        """Wait for the device by a read: it is the last work in the device's queue."""
        self.need(device)
        self._gpu.queue.read_buffer(self.new_buffer(4))

    def let_go(self) -> None:
        """Wait until the devices have finished, and close them."""
        for gpu in self._opened.values():
            gpu.destroy()
        self._opened.clear()

    @property
    def largest(self) -> int:
        """Size in bytes of the largest buffer that the most recently opened device allows."""
        return int(min(self._gpu.limits[name] for name in LIMITS))

    def new_buffer(self, size: int) -> Any:
        """Return zeroed new memory of the device. Raises `Unsupported` if `size` is more than `largest`."""
        if size > self.largest:
            raise Unsupported(f"{size} bytes: this adapter binds {self.largest} at most")
        usage = wgpu.BufferUsage.STORAGE | wgpu.BufferUsage.COPY_SRC | wgpu.BufferUsage.COPY_DST
        return self._gpu.create_buffer(size=max(4, -(-size // 4) * 4), usage=usage)

    def _array(self, tensor: Any) -> _Array:
        _refuse_content(tensor)
        array = _Array(self.new_buffer(tensor.nbytes), tensor.dtype, tuple(tensor.shape), not tensor.is_contiguous())
        if tensor.numel():
            self._gpu.queue.write_buffer(array.buffer, 0, _raw(tensor))
        return array

    def _result(self, dtype: Any, shape: tuple[int, ...], out: Any) -> _Array:
        """Return `out`, or a new array for a result, overwritten so that memory holds no right result by chance."""
        if out is not None:
            return out  # type: ignore[no-any-return]
        made = _Array(self.new_buffer(int(torch.Size(shape).numel()) * dtype.itemsize), dtype, shape)
        self.spoil([made])
        return made

    def _product(self, operation: Operation, a: _Array, b: _Array, out: Any) -> _Array:
        left, target = operation.source, operation.target
        if left == "float16" and "shader-f16" not in self._gpu.features:
            raise Unsupported("this adapter has no shader-f16")
        names = {
            ("float32", "float32"): ("float32", "float32"),
            ("float16", "float16"): ("float16", "float16"),
            ("float16", "float32"): ("float16>float32", "float16>float32"),
            ("int8", "int32"): ("int8", "int8"),
            ("uint8", "int32"): ("uint8", "int8"),
        }.get((left, target))
        if names is None:
            raise Unsupported(f"plain WGSL multiplies no {left} into {target}")
        M, K, N, batch = a.shape[-2], a.shape[-1], b.shape[-1], a.shape[0] if len(a.shape) == 3 else 1
        result = self._result(getattr(torch, target), (*a.shape[:-1], N), out)
        strides = (*((1, M) if a.turned else (K, 1)), *((1, K) if b.turned else (N, 1)))
        groups = (-(-N // wgsl.TILE), -(-M // wgsl.TILE), batch)
        self._dispatch(wgsl.product(*names), groups, (M, N, K, *strides, 0), a.buffer, b.buffer, result.buffer)
        return result

    def _index(self, name: str, operands: tuple[_Array, ...], out: Any) -> _Array:
        first, second = operands
        count = first.shape[0]
        more: tuple[int, ...] = ()
        shape: tuple[int, ...] = (count,)
        if name == "embedding":
            shape = (second.shape[0], first.shape[1])
            count, more = shape[0] * shape[1], (shape[1],)
        elif name == "index_add":
            shape = (count // 8,)
        elif name == "bucketize":
            more = (second.shape[0],)
        result = self._result(first.dtype, shape, out)
        if name == "index_add":
            self.compute(wgsl.ONES, shape[0], (), result.buffer)
        self.compute(wgsl.INDEX[name], count, more, first.buffer, second.buffer, result.buffer)
        return result

    def compute(self, shader: str, count: int, more: tuple[int, ...], *buffers: Any) -> None:
        """Run a shader of `wgsl.linear` for `count` elements; `more` has up to seven numbers: n[1], n[2], …."""
        groups = -(-count // wgsl.GROUP)
        wide = min(groups, 32768)
        words = (count, *more, *[0] * 7)[:8]
        self._dispatch(shader, (wide, -(-groups // wide), 1), words, *buffers)

    def _dispatch(self, shader: str, groups: tuple[int, ...], words: tuple[int, ...], *buffers: Any) -> None:
        gpu, pipeline = self._gpu, _pipeline(self._gpu, shader)
        given = self.new_buffer(4 * len(words))
        gpu.queue.write_buffer(given, 0, struct.pack(f"<{len(words)}I", *words))
        entries = [{"binding": i, "resource": {"buffer": b}} for i, b in enumerate((given, *buffers))]
        group = gpu.create_bind_group(layout=pipeline.get_bind_group_layout(0), entries=entries)
        encoder = gpu.create_command_encoder()
        work = encoder.begin_compute_pass()
        work.set_pipeline(pipeline)
        work.set_bind_group(0, group)
        work.dispatch_workgroups(*groups)
        work.end()
        gpu.queue.submit([encoder.finish()])


@functools.lru_cache(maxsize=64)
def _pipeline(gpu: Any, shader: str) -> Any:
    module = gpu.create_shader_module(code=shader)
    return gpu.create_compute_pipeline(layout="auto", compute={"module": module, "entry_point": "main"})


@functools.lru_cache(maxsize=1)
def _adapters() -> list[tuple[Any, str, int]]:
    """Return (adapter, unit, number within the unit) for every adapter; a software renderer has the unit "cpu"."""
    if wgpu is None:
        raise Skip(f"{_why_not}. Install it there: pip install wgpu")
    with contextlib.suppress(RuntimeError):  # set already
        extras.set_instance_extras(backends=["Vulkan", "Metal", "DX12"])
    found: list[tuple[Any, str, int]] = []
    for adapter in wgpu.gpu.enumerate_adapters_sync():
        unit = UNITS.get(adapter.info["backend_type"], "")
        unit = "cpu" if unit and adapter.info["adapter_type"] == "CPU" else unit
        if unit:
            found.append((adapter, unit, sum(u == unit for _, u, _ in found)))
    return found


def _device(adapter: Any, unit: str, index: int) -> Device:
    info, software = adapter.info, unit == "cpu"
    renderer = info["device"].partition(" (")[0]
    detail = {
        "wgpu": str(wgpu.__version__),
        "driver": info["description"],
        "renderer": info["device"],
        "units": "none of a GPU: software on the processor" if software else "shader units, no matrix units",
        "shader_f16": "yes" if "shader-f16" in adapter.features else "no",
    }
    model = f"{renderer}: software renderer on {host.cpu().model}" if software else info["device"]
    return numbered("webgpu", unit, index, model, detail, on_host=software)


def _raw(tensor: Any) -> bytes:
    """Return a tensor's bytes as they lie in memory, padded to whole words."""
    stored = tensor if tensor.is_contiguous() else tensor.transpose(-1, -2)
    return bytes_of(stored) + bytes(-tensor.nbytes % 4)


def _refuse_content(tensor: Any) -> None:
    """Raise `Unsupported` if WGSL lacks a tensor's format, or does not guarantee one of its values."""
    name = str(tensor.dtype).removeprefix("torch.")
    if not tensor.is_floating_point():
        return
    if name not in FLOATS:
        raise Unsupported(f"WGSL has no {name}")
    exponent, magnitude = FLOATS[name]
    raw = bits(tensor)
    if bool(((raw & exponent) == exponent).any()):
        raise Unsupported("WGSL guarantees neither infinities nor NaN")
    if bool((((raw & exponent) == 0) & ((raw & magnitude) != 0)).any()):
        raise Unsupported("WGSL guarantees no subnormals: they may be flushed to zero")
    if bool(((raw != 0) & ((raw & magnitude) == 0)).any()):
        raise Unsupported("WGSL does not guarantee the sign of zero")


RUNTIME = _Webgpu()
