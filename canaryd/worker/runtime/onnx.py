"""The runtime of ONNX Runtime: the CPU, and devices of all its other execution providers. No other module imports it.

Each upload builds a graph of one node whose last operand is a constant, which the provider copies into its own memory
(CoreML accepts no other right operand in a product). A provider that cannot run a node silently leaves it to the CPU.
So every session must prove where its nodes ran; a result without proof is not evidence.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from canaryd.model import Device
from canaryd.probe import Skip
from canaryd.worker.numeric import stack as host
from canaryd.worker.numeric.tensors import bytes_of, flat_bits, host_same_bits, torch, visible_cores
from canaryd.worker.runtime.interface import Change, Elsewhere, Operation, Runtime, Unsupported, imported, numbered

(onnx, ort), _why_not = imported("onnxruntime and onnx", "onnx", "onnxruntime")

PROVIDERS = {
    "cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider", "tensorrt": "TensorrtExecutionProvider",
    "rocm": "ROCMExecutionProvider", "migraphx": "MIGraphXExecutionProvider", "coreml": "CoreMLExecutionProvider",
    "cann": "CANNExecutionProvider", "openvino": "OpenVINOExecutionProvider", "qnn": "QNNExecutionProvider",
    "directml": "DmlExecutionProvider", "xnnpack": "XnnpackExecutionProvider",
}  # fmt: skip
"""Unit → execution provider. Providers that compute in a network service or a browser are left out: they use no device
of this host."""
PROCESSOR = ("cpu", "xnnpack")
"""Units that are the host's CPU."""
SWITCHES: Mapping[str, Mapping[str, str]] = {"cuda": {"use_tf32": "0"}}
"""Unit → options with which its provider rounds no operand. CUDA's default, use_tf32=1, rounds."""
NAMED = 8
"""Maximum number of nodes that a message names."""
RECORD = "session.record_ep_graph_assignment_info"
OPSET, IR = 23, 11
"""Versions in the graphs. OPSET is the first opset with Attention; IR belongs to the ONNX release with it (1.18)."""


class Operands(tuple[Any, ...]):  # noqa: SLOT001  it could hold no session then
    """Uploaded operands and the session made for them."""

    session: Any = None


Node = tuple[str, list[str], str, dict[str, Any]]
"""One node of a graph: operator, inputs, outputs separated by spaces, attributes."""


@dataclass(frozen=True)
class _Graph:
    """A graph, with the shape and the format of its result."""

    nodes: list[Node]
    dtype: Any
    shape: tuple[int, ...]
    constants: Mapping[str, Any]
    """Name → tensor, for constants of the graph that are not operands."""


class _Onnx(Runtime):
    """The runtime of ONNX Runtime's execution providers. Arrays are host tensors; a session copies them both ways."""

    name = "onnx"
    attention_kernels = ("ATTENTION",)
    left_integers = ("int8", "uint8")

    def __init__(self) -> None:
        self._device: Device | None = None
        self._limit: dict[str, str] = {}

    def devices(self) -> list[Device]:
        self._import()
        offered = ort.get_available_providers()
        return [d for unit, provider in PROVIDERS.items() if provider in offered for d in _devices(unit, provider)]

    def stack(self, device: Device, instruction_set: str) -> dict[str, str]:  # noqa: ARG002  it chooses by itself
        return {
            **host.surroundings(device),
            "onnxruntime": ort.__version__,
            "onnx": onnx.__version__,
            "provider": _provider(device),
            **SWITCHES.get(device.unit, {}),
            "visible_cores": str(len(visible_cores())),
        }

    def need(self, device: Device) -> None:
        self._import()
        if _provider(device) not in ort.get_available_providers():
            offered = ", ".join(ort.get_available_providers())
            raise Skip(f"this onnxruntime has no {_provider(device)}; it has {offered}")
        if not hasattr(ort.InferenceSession, "get_provider_graph_assignment_info"):
            raise Skip(f"onnxruntime {ort.__version__} cannot prove where a node runs: install 1.24 or newer")
        self._device = device

    def _import(self) -> None:
        if ort is None:
            raise Skip(f"{_why_not}. Install both there: pip install onnx onnxruntime, or the build for your device")

    @contextlib.contextmanager
    def strict(self, device: Device) -> Iterator[dict[str, str]]:
        self.need(device)
        yield {"graph_optimization_level": "all", **SWITCHES.get(device.unit, {})}

    def upload(self, tensors: tuple[Any, ...], device: Device) -> tuple[Any, ...]:
        """Return copies of host tensors with a new session, which brings them to the device."""
        self.need(device)
        return Operands(t.clone(memory_format=torch.preserve_format) for t in tensors)

    def run(self, operation: Operation, operands: tuple[Any, ...], out: Any) -> Any:
        assert self._device is not None
        if self._device.unit == "coreml" and operation.source in ("float32", "float64"):
            raise Unsupported("the Neural Engine multiplies float32 in float16; Core ML does not tell which unit ran")
        graph = _graph(operation, operands, self._device.unit)
        named = {f"x{i}": _stored(t) for i, t in enumerate(operands) if t.numel()}
        constant = list(named)[-1] if len(named) > 1 else ""
        session = getattr(operands, "session", None)
        if session is None:
            session = _session(self._device, operation, graph, named, constant, self._limit)
            if isinstance(operands, Operands):
                operands.session = session
        result = torch.empty(graph.shape, dtype=graph.dtype) if out is None else out
        if out is None:
            self.spoil([result])  # a kernel that writes nothing must not be right by chance
        binding = session.io_binding()
        for name, tensor in named.items():
            if name != constant:
                binding.bind_input(name, "cpu", 0, kind(tensor.dtype), list(tensor.shape), tensor.data_ptr())
        binding.bind_output("out", "cpu", 0, kind(result.dtype), list(result.shape), result.data_ptr())
        session.run_with_iobinding(binding)
        return result

    def agree(self, results: list[Any], golden: Any) -> list[bool]:
        """Return for each result whether its bits equal the golden's; the host compares, because results lie there."""
        return [host_same_bits(result, golden) for result in results]

    def download(self, array: Any) -> Any:
        """Return a copy of a result: the result lies on the host, in memory that the next result overwrites."""
        return array.clone()

    def changed(self, array: Any, change: Change, choice: int) -> Any:
        change(flat_bits(array), choice)
        return array

    def spoil(self, results: list[Any]) -> None:
        for result in results:
            flat_bits(result).fill_(-1 if result.element_size() > 1 else 255)

    def limit_memory(self, device: Device, size: int) -> None:
        """Limit the device memory of later sessions, if the provider has an option for it."""
        if device.unit in ("cuda", "rocm"):
            self._limit = {"gpu_mem_limit": str(size)}

    def synchronize(self, device: Device) -> None:
        """Return at once: a session returns only when its result is complete."""

    def let_go(self) -> None:
        """Return at once: sessions are freed with their operands."""


def _provider(device: Device) -> str:
    return device.detail.get("provider") or PROVIDERS[device.unit]


def _devices(unit: str, provider: str) -> Iterator[Device]:
    cpu = host.cpu()
    cards = [d.device for d in ort.get_ep_devices() if d.ep_name == provider] if hasattr(ort, "get_ep_devices") else []
    for index in range(max(1, len(cards))):
        facts = dict(cards[index].metadata) if cards and unit not in PROCESSOR else {}
        bus = facts.get("pci_bus_id", "")
        detail = {"provider": provider, "onnxruntime": str(ort.__version__), **({"bus_id": bus} if bus else {})}
        model = cpu.model if unit in PROCESSOR else facts.get("Description", "") or f"{provider} {index}"
        yield numbered("onnx", unit, index, model, detail, on_host=unit in PROCESSOR)


def kind(dtype: Any) -> int:
    """Return ONNX's number for a torch format."""
    names = {"float64": "DOUBLE", "float32": "FLOAT"}
    name = str(dtype).removeprefix("torch.")
    number = getattr(onnx.TensorProto, names.get(name, name.upper()), None)
    if number is None:
        raise Unsupported(f"ONNX has no {name}")
    return int(number)


def _stored(tensor: Any) -> Any:
    """Return a tensor in the order of its memory; for a transposed view, that is the tensor before transposition."""
    return tensor if tensor.is_contiguous() else tensor.transpose(-1, -2)


def _session(
    device: Device,
    operation: Operation,
    graph: _Graph,
    named: Mapping[str, Any],
    constant: str,
    limit: Mapping[str, str],
) -> Any:
    """Return a session that has proved that every node runs on the device's provider.

    Raises `Unsupported` if no provider has a kernel, `Elsewhere` if a node runs on another provider.
    """
    helper, provider = onnx.helper, _provider(device)
    given = {name: tensor for name, tensor in named.items() if name != constant}
    constants = {**graph.constants, **({constant: named[constant]} if constant else {})}
    model = helper.make_model(
        helper.make_graph(
            [_node(number, node) for number, node in enumerate(graph.nodes, 1)],
            operation.name,
            [helper.make_tensor_value_info(n, kind(t.dtype), list(t.shape)) for n, t in given.items()],
            [helper.make_tensor_value_info("out", kind(graph.dtype), list(graph.shape))],
            [initializer(n, t) for n, t in constants.items()],
        ),
        opset_imports=[helper.make_opsetid("", OPSET)],
        ir_version=IR,
    )
    options = ort.SessionOptions()
    options.log_severity_level = 4  # the proof of placement says what a provider did not take
    options.add_session_config_entry(RECORD, "1")
    own = {**SWITCHES.get(device.unit, {}), **limit}
    if operation.source == "tfloat32":
        own["use_tf32"] = "1"
    if device.unit in ("cuda", "tensorrt", "rocm", "migraphx", "cann", "directml"):
        own["device_id"] = str(device.index)
    both = [(provider, own)] + ([("CPUExecutionProvider", {})] if device.unit != "cpu" else [])
    try:
        session = ort.InferenceSession(model.SerializeToString(), options, providers=both)
    except Exception as error:
        if type(error).__name__ in ("NotImplemented", "InvalidGraph"):
            raise Unsupported(re.sub(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ", "", str(error))) from error
        raise
    _prove(session, provider, operation)
    return session


def _prove(session: Any, provider: str, operation: Operation) -> None:
    """Raise `Elsewhere` unless the session's own list of placements shows that every node ran on `provider`."""
    try:
        parts = session.get_provider_graph_assignment_info()
    except Exception as error:  # it raises its own kinds
        raise Elsewhere(f"nothing proves where {operation.name} ran: {error}") from error
    ran = [(part.ep_name, n) for part in parts for n in part.get_nodes()]
    if not ran:
        raise Elsewhere(f"nothing proves where {operation.name} ran: no placement was recorded for {provider}")
    if away := [(n.name or n.op_type, where) for where, n in ran if where != provider]:
        each = [f"{node} ran on {where}" for node, where in dict.fromkeys(away)]
        listed = ", ".join(each[:NAMED]) + (f" and {len(each) - NAMED} more" if len(each) > NAMED else "")
        raise Elsewhere(f"{provider} did not take {operation.name}: {listed}")


def _node(number: int, node: Node) -> Any:
    op, inputs, outputs, attributes = node
    return onnx.helper.make_node(op, inputs, outputs.split(), name=f"{number}:{op}", **attributes)


def initializer(name: str, tensor: Any) -> Any:
    """Return a tensor as a constant of a graph."""
    return onnx.helper.make_tensor(name, kind(tensor.dtype), list(tensor.shape), bytes_of(tensor), raw=True)


def _graph(operation: Operation, operands: tuple[Any, ...], unit: str) -> _Graph:
    if operation.source == "tfloat32" and "use_tf32" not in SWITCHES.get(unit, {}):
        raise Unsupported("only CUDA's provider rounds float32 operands to TF32")
    if operation.name == "matmul":
        return _matmul(operation, *operands)
    if operation.name == "attention":
        return _attention(operation, *operands)
    return _index(operation, *operands)


def _matmul(operation: Operation, a: Any, b: Any) -> _Graph:
    integers = operation.source in ("int8", "uint8")
    dtype = getattr(torch, operation.target)
    if not integers and dtype != a.dtype:
        raise Unsupported(f"ONNX gives products of {operation.source} in {operation.source} alone")
    shape = (*a.shape[:-1], b.shape[-1])
    turned = [not t.is_contiguous() for t in (a, b)]
    if a.dim() == 2 and not integers:  # Gemm reads transposed operands where they lie
        attributes = {name: 1 for name, on in zip(("transA", "transB"), turned, strict=True) if on}
        return _Graph([("Gemm", ["x0", "x1"], "out", attributes)], dtype, shape, {})
    order = [*range(a.dim() - 2), a.dim() - 1, a.dim() - 2]
    nodes: list[Node] = []
    names = ["x0", "x1"]
    for i, on in enumerate(turned):
        if on:
            nodes.append(("Transpose", [names[i]], f"t{i}", {"perm": order}))
            names[i] = f"t{i}"
    nodes.append(("MatMulInteger" if integers else "MatMul", names, "out", {}))
    return _Graph(nodes, dtype, shape, {})


def _attention(operation: Operation, query: Any, key: Any, value: Any, allowed: Any) -> _Graph:  # noqa: ARG001
    names, constants = ["x0", "x1", "x2"], {}
    attributes: dict[str, Any] = {"scale": query.shape[-1] ** -0.5}
    L, S = query.shape[2], key.shape[2]
    if operation.mask == "causal" and L == S:
        attributes["is_causal"] = 1
    elif operation.mask == "causal":
        constants["mask"] = torch.ones((L, S), dtype=torch.bool).tril()
        names.append("mask")
    elif operation.mask in ("bool", "float"):
        names.append("x3")
    return _Graph([("Attention", names, "out", attributes)], query.dtype, tuple(query.shape), constants)


def _index(operation: Operation, *operands: Any) -> _Graph:
    if operation.name not in _INDEX:
        raise Unsupported(f"ONNX has no {operation.name}")
    nodes, constants, shape = _INDEX[operation.name](operands[0].shape[0], *operands)
    return _Graph(nodes, operands[0].dtype, shape, {n: torch.as_tensor(c) for n, c in constants.items()})


Indexed = tuple[list[Node], dict[str, Any], tuple[int, ...]]


def _one(
    op: str, inputs: str, shape: tuple[int, ...], constants: dict[str, Any], outputs: str = "out", **attributes: Any
) -> Indexed:
    return [(op, inputs.split(), outputs, attributes)], constants, shape


def _experts(n: int, *_: Any) -> Indexed:
    nodes: list[Node] = [
        ("Mul", ["x1", "n"], "m", {}),
        ("Add", ["m", "places"], "keys", {}),
        ("TopK", ["keys", "all"], "sorted order", {"largest": 0}),
        ("Gather", ["x0", "order"], "tokens", {}),
        ("Gather", ["x1", "order"], "number", {}),
        ("Mul", ["number", "salt"], "salted", {}),
        ("BitwiseXor", ["tokens", "salted"], "changed", {}),
        ("ScatterElements", ["zeros", "order", "changed"], "out", {}),
    ]
    zeros = torch.zeros(n, dtype=torch.int64)
    constants = {"n": n, "places": torch.arange(n), "all": [n], "salt": 0x9E3779B9, "zeros": zeros}
    return nodes, constants, (n,)


_INDEX: dict[str, Callable[..., Indexed]] = {
    "gather": lambda n, *_: _one("GatherElements", "x0 x1", (n,), {}),
    "embedding": lambda _, table, index: _one("Gather", "x0 x1", (len(index), table.shape[1]), {}),
    "scatter": lambda n, *_: _one("ScatterElements", "zeros x1 x0", (n,), {"zeros": torch.zeros(n, dtype=torch.int64)}),
    "index_add": lambda n, *_: _one(
        "ScatterElements", "ones x1 x0", (n // 8,), {"ones": torch.ones(n // 8, dtype=torch.int64)}, reduction="add"
    ),
    "cumsum": lambda n, *_: _one("CumSum", "x0 axis", (n,), {"axis": 0}),
    "sort": lambda n, *_: _one("TopK", "x0 all", (n,), {"all": [n]}, "out places", largest=0),
    "topk": lambda n, *_: _one("TopK", "x0 most", (n // 16,), {"most": [n // 16]}, "values out"),
    "modulo": lambda n, *_: _one("Mod", "x0 x1", (n,), {}),
    "experts": _experts,
}
RUNTIME = _Onnx()
