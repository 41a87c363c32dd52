"""A graph of one matrix product in ONNX's format, without the onnx package: Protocol Buffers encoded by hand.

Field numbers: onnx.proto3 (ONNX IR version 8, opset 13).
"""

from __future__ import annotations

KINDS = {"float32": 1, "int8": 3, "int32": 6, "float16": 10, "float64": 11}
"""Format → `TensorProto.DataType`. bfloat16 is left out: few providers multiply it."""
IR, OPSET = 8, 13


def varint(value: int) -> bytes:
    """Return a whole number in LEB128, the variable-length encoding that WebAssembly also uses."""
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def _number(field: int, value: int) -> bytes:
    return varint(field << 3) + varint(value)


def _bytes(field: int, content: bytes | str) -> bytes:
    data = content.encode() if isinstance(content, str) else content
    return varint(field << 3 | 2) + varint(len(data)) + data


def _value(name: str, form: str, shape: tuple[int, ...]) -> bytes:
    dimensions = b"".join(_bytes(1, _number(1, size)) for size in shape)
    tensor = _number(1, KINDS[form]) + _bytes(2, dimensions)
    return _bytes(1, name) + _bytes(2, _bytes(1, tensor))


def product(source: str, target: str, M: int, N: int, K: int) -> bytes | None:
    """Return an ONNX model that multiplies a (M, K) by b (K, N) to give c (M, N); None if ONNX has no such product."""
    if source not in KINDS or target not in KINDS:
        return None
    operator = "MatMulInteger" if source == "int8" else "MatMul"
    node = _bytes(1, "a") + _bytes(1, "b") + _bytes(2, "c") + _bytes(3, "product") + _bytes(4, operator)
    graph = _bytes(1, node) + _bytes(2, "golden")
    graph += _bytes(11, _value("a", source, (M, K))) + _bytes(11, _value("b", source, (K, N)))
    graph += _bytes(12, _value("c", target, (M, N)))
    return _number(1, IR) + _bytes(2, "canaryd") + _bytes(7, graph) + _bytes(8, _bytes(1, "") + _number(2, OPSET))
