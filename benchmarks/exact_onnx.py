"""The exact canary as a graph of ONNX Runtime for processors: prefill and decoding from a KV cache, in one graph.

The graph's inputs are tokens, their positions, the keys that each token may see, and the keys and values of earlier
positions. Attention is ONNX's operator of this name, or products and a softmax ("eager"). Norms, rotations and softmax
are computed as in `run.Runner`. An operator for which the provider has no kernel is `Unsupported`. ONNX Runtime itself
widens float16 to float32.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from canaryd.probe import Skip
from canaryd.worker.exact_canary.shape import EPSILON, THETA, Shape
from canaryd.worker.numeric.tensors import torch
from canaryd.worker.runtime.interface import Unsupported
from canaryd.worker.runtime.onnx import IR, OPSET, RUNTIME, initializer, kind, onnx, ort
from canaryd.worker.runtime.torch import rotary_angles

PROVIDER = "CPUExecutionProvider"
KERNELS = ("eager", "attention")
"""Ways to compute attention: products and a softmax, or ONNX's operator."""


def version() -> str:
    """Return ONNX Runtime's version."""
    return str(ort.__version__)


def why_not() -> str:
    """Return the reason why ONNX Runtime cannot be used here, or "" if it can."""
    try:
        RUNTIME.devices()
    except Skip as error:
        return str(error)
    return ""


@dataclass
class _Graph:
    """The nodes and constants of one graph. Each method adds nodes and returns the name of their output."""

    shape: Shape
    weights: Mapping[str, Any]
    kernel: str
    nodes: list[Any] = field(default_factory=list)
    constants: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.dtype = self.weights["lm_head.weight"].dtype
        self.wide = torch.float32 if self.dtype.itemsize == 2 else self.dtype

    def add(self, op: str, *inputs: str, name: str = "", **attributes: Any) -> str:
        """Append a node of type `op` with one output; return the output's name."""
        out = name or f"{len(self.nodes)}.{op}"
        self.nodes.append(onnx.helper.make_node(op, list(inputs), [out], **attributes))
        return out

    def number(self, name: str, value: Any, dtype: Any) -> str:
        """Add a constant, unless one of this name exists; return the name."""
        self.constants.setdefault(name, torch.as_tensor(value, dtype=dtype))
        return name

    def integers(self, *values: int) -> str:
        """Add a list of integers as a constant; return its name."""
        return self.number(f"integers {values}", list(values), torch.int64)

    def cast(self, x: str, dtype: Any) -> str:
        """Add a conversion of x to a number format; return its name."""
        return self.add("Cast", x, to=kind(dtype))

    def linear(self, x: str, module: str, name: str = "") -> str:
        """Add x times a module's weight, plus its bias if it has one; return the result's name."""
        weight = f"{module}.weight"
        self.constants.setdefault(weight, self.weights[weight].T.contiguous())
        if f"{module}.bias" not in self.weights:
            return self.add("MatMul", x, weight, name=name)
        self.constants[f"{module}.bias"] = self.weights[f"{module}.bias"]
        return self.add("Add", self.add("MatMul", x, weight), f"{module}.bias", name=name)

    def norm(self, x: str, module: str) -> str:
        """Add x divided by the root of its mean square, times the module's gains; return the result's name."""
        wide = self.cast(x, self.wide)
        mean = self.add("ReduceMean", self.add("Mul", wide, wide), self.integers(-1))
        root = self.add("Sqrt", self.add("Add", mean, self.number("epsilon", EPSILON, self.wide)))
        self.constants[f"{module}.weight"] = self.weights[f"{module}.weight"]
        return self.add("Mul", self.cast(self.add("Div", wide, root), self.dtype), f"{module}.weight")

    def heads(self, x: str, count: int) -> str:
        """Add the change of x from (rows, T, count * head) to (rows, count, T, head); return the result's name."""
        parts = self.add("Reshape", x, self.integers(0, 0, count, self.shape.head))
        return self.add("Transpose", parts, perm=[0, 2, 1, 3])

    def turn(self, x: str) -> str:
        """Add rotary positions to x; return the result's name."""
        half = self.shape.head // 2
        a, b = (
            self.add("Slice", x, self.integers(low), self.integers(low + half), self.integers(-1)) for low in (0, half)
        )
        left = self.add("Sub", self.add("Mul", a, "cos"), self.add("Mul", b, "sin"))
        right = self.add("Add", self.add("Mul", b, "cos"), self.add("Mul", a, "sin"))
        return self.add("Concat", left, right, axis=-1)

    def attention(self, i: int, x: str) -> str:
        """Add the attention block of layer i, with outputs for all keys and values so far; return the result's name."""
        s, module = self.shape, f"model.layers.{i}.self_attn"
        seen = self.norm(x, f"model.layers.{i}.input_layernorm")
        query, key, value = (
            self.heads(self.linear(seen, f"{module}.{name}_proj"), count)
            for name, count in (("q", s.heads), ("k", s.kv_heads), ("v", s.kv_heads))
        )
        query = self.turn(query)
        key = self.add("Concat", f"{i}.past_keys", self.turn(key), axis=2, name=f"{i}.keys")
        value = self.add("Concat", f"{i}.past_values", value, axis=2, name=f"{i}.values")
        if self.kernel == "attention":
            mixed = self.add("Attention", query, key, value, "allowed", scale=s.head**-0.5)
        else:
            mixed = self.plain(query, key, value)
        mixed = self.add("Transpose", mixed, perm=[0, 2, 1, 3])
        return self.linear(self.add("Reshape", mixed, self.integers(0, 0, -1)), f"{module}.o_proj")

    def plain(self, query: str, key: str, value: str) -> str:
        """Add attention as products and a softmax; return the result's name."""
        s, group = self.shape, self.shape.heads // self.shape.kv_heads
        grouped = self.add("Reshape", query, self.integers(0, s.kv_heads, group, -1, s.head))
        turned = self.add("Transpose", self.add("Unsqueeze", key, self.integers(2)), perm=[0, 1, 2, 4, 3])
        scale = self.number("scale", s.head**-0.5, self.dtype)
        scores = self.add("Mul", self.add("MatMul", grouped, turned), scale)
        scores = self.add("Where", "allowed", scores, self.number("never", -math.inf, self.dtype))
        chances = self.cast(self.add("Softmax", self.cast(scores, self.wide), axis=-1), self.dtype)
        mixed = self.add("MatMul", chances, self.add("Unsqueeze", value, self.integers(2)))
        return self.add("Reshape", mixed, self.integers(0, s.heads, -1, s.head))

    def inner(self, i: int, x: str) -> str:
        """Add the MLP of layer i; return the result's name."""
        module = f"model.layers.{i}.mlp"
        seen = self.norm(x, f"model.layers.{i}.post_attention_layernorm")
        gate, up = (self.linear(seen, f"{module}.{name}_proj") for name in ("gate", "up"))
        opened = self.add("Mul", gate, self.add("Sigmoid", gate))
        return self.linear(self.add("Mul", opened, up), f"{module}.down_proj")

    def whole(self) -> Any:
        """Return the whole model as an ONNX object."""
        shape, angles = self.shape, rotary_angles(self.shape.head, THETA)
        for name, table in (("cos", angles.cos()), ("sin", angles.sin())):
            self.add("Gather", self.number(f"{name} table", table, self.dtype), "positions", name=name)
        self.constants["embedding"] = self.weights["model.embed_tokens.weight"]
        x = self.add("Gather", "embedding", "tokens")
        for i in range(shape.layers):
            x = self.add("Add", x, self.attention(i, x))
            x = self.add("Add", x, self.inner(i, x))
        self.linear(self.norm(x, "model.norm"), "lm_head", name="logits")
        cache = ["rows", shape.kv_heads, "length", shape.head]
        both = [(i, part) for i in range(shape.layers) for part in ("keys", "values")]
        inputs = [
            ("tokens", torch.int64, ["rows", "count"]),
            ("positions", torch.int64, ["count"]),
            ("allowed", torch.bool, ["count", "whole"]),
            *((f"{i}.past_{part}", self.dtype, cache) for i, part in both),
        ]
        outputs = [
            ("logits", self.dtype, ["rows", "count", shape.vocabulary]),
            *((f"{i}.{part}", self.dtype, ["rows", shape.kv_heads, "whole", shape.head]) for i, part in both),
        ]
        infos = [[onnx.helper.make_tensor_value_info(n, kind(t), d) for n, t, d in some] for some in (inputs, outputs)]
        graph = onnx.helper.make_graph(
            self.nodes, "exact canary", *infos, [initializer(name, tensor) for name, tensor in self.constants.items()]
        )
        return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", OPSET)], ir_version=IR)


class Runner:
    """A session of ONNX Runtime with a model's weights in one format; its methods are those of `run.Runner`."""

    def __init__(self, shape: Shape, weights: Mapping[str, Any], kernel: str) -> None:
        """Build the graph and the session. Raises `Unsupported` if the provider has no kernel for the format."""
        self.shape, self.dtype = shape, weights["lm_head.weight"].dtype
        options = ort.SessionOptions()
        options.log_severity_level = 4
        options.intra_op_num_threads = 1
        model = _Graph(shape, weights, kernel).whole()
        try:
            self.session = ort.InferenceSession(model.SerializeToString(), options, providers=[PROVIDER])
        except Exception as error:
            if type(error).__name__ == "NotImplemented":
                said = re.sub(r"^.*NOT_IMPLEMENTED : | node with name ''", "", str(error))
                raise Unsupported(said) from error
            raise

    def forward(self, tokens: Any) -> Any:
        """Return the logits (rows, T, vocabulary) of tokens (rows, T)."""
        return self._infer(tokens, self._empty(len(tokens)))[0]

    def decode(self, prompts: Any, count: int) -> tuple[Any, Any]:
        """Prefill prompts (rows, P), then decode from the cache, greedily; return tokens (rows, count) and logits."""
        given, cache = prompts, self._empty(len(prompts))
        tokens: list[Any] = []
        logits: list[Any] = []
        while len(tokens) < count:
            whole, cache = self._infer(given, cache)
            logits.append(whole[:, -1:])
            given = logits[-1].argmax(-1)
            tokens.append(given)
        return torch.cat(tokens, 1), torch.cat(logits, 1)

    def _empty(self, rows: int) -> list[Any]:
        sizes = (rows, self.shape.kv_heads, 0, self.shape.head)
        return [torch.empty(sizes, dtype=self.dtype) for _ in range(2 * self.shape.layers)]

    def _infer(self, tokens: Any, cache: list[Any]) -> tuple[Any, list[Any]]:
        (rows, count), used = tokens.shape, cache[0].shape[2]
        at = torch.arange(used, used + count)
        allowed = torch.arange(used + count) <= at[:, None]
        names = [f"{i}.{part}" for i in range(self.shape.layers) for part in ("keys", "values")]
        given = {"tokens": tokens, "positions": at, "allowed": allowed}
        given |= {f"{i}.past_{part}": x for name, x in zip(names, cache, strict=True) for i, part in [name.split(".")]}
        logits = torch.full((rows, count, self.shape.vocabulary), math.nan, dtype=self.dtype)
        grown = [torch.full((*x.shape[:2], used + count, x.shape[3]), math.nan, dtype=self.dtype) for x in cache]
        binding = self.session.io_binding()
        for name, x in given.items():
            whole = x.contiguous()
            given[name] = whole
            binding.bind_input(name, "cpu", 0, kind(whole.dtype), list(whole.shape), whole.data_ptr())
        for name, x in zip(("logits", *names), (logits, *grown), strict=True):
            binding.bind_output(name, "cpu", 0, kind(x.dtype), list(x.shape), x.data_ptr())
        self.session.run_with_iobinding(binding)
        return logits, grown
