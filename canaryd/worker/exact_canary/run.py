"""Run an exact canary operator by operator as a serving engine does, in any runtime and format.

Attention is eager or uses the runtime's kernels. Eager attention rounds its scores to the model's format.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from canaryd.model import TORCH
from canaryd.worker.exact_canary.shape import CHOSEN, EPSILON, THETA, Shape
from canaryd.worker.runtime.interface import KeyValues, Operators, named

Watch = Callable[[str, Any], Any]
"""A function that is called with the name of a place ("2.query", "logits") and the tensor that was rounded there. It
returns the tensor to continue with."""


class Runner:
    """A model's weights in one format on one device, ready for inference."""

    def __init__(
        self,
        shape: Shape,
        weights: Mapping[str, Any],
        kernel: str = "",
        watch: Watch | None = None,
        operators: Operators | None = None,
    ) -> None:
        """Hold `weights`, which lie on a device. `kernel`: "" for eager attention; `operators`: None for torch's."""
        operators = operators or cast("Operators", named(TORCH).operators)
        self.shape, self.weights, self.kernel, self.watch, self.operators = shape, weights, kernel, watch, operators
        self._turn = operators.rotation(shape.head, THETA, self._like)

    @property
    def _like(self) -> Any:
        return self.weights["lm_head.weight"]

    def cached(self, rows: int, length: int) -> tuple[Any, int, tuple[int, int, int, int]]:
        """Return the arguments (like, layers, sizes) of `Operators.cache` for `rows` rows and `length` positions."""
        shape = self.shape
        return self._like, shape.layers, (rows, shape.kv_heads, length, shape.head)

    def forward(self, tokens: Any, cache: KeyValues | None = None, last: int = 0) -> Any:
        """Return logits (rows, T, vocabulary) of `tokens`, which follow `cache`; only of the `last` ones if not 0."""
        count = tokens.shape[1]
        at = self.operators.positions(count, tokens) + (cache.used if cache else 0)
        x = self._see("embedding", self.operators.embed(self.weights["model.embed_tokens.weight"], tokens))
        for i in range(self.shape.layers):
            x = self._see(f"{i}.middle", x + self._attention(i, x, at, cache))
            x = self._see(f"{i}.out", x + self._inner(i, x))
        if cache:
            cache.used += count
        x = self._norm("norm", x[:, -last:] if last else x, "model.norm")
        return self._see("logits", self.operators.linear(x, self._like, None))

    def decode(self, prompts: Any, count: int) -> tuple[Any, Any]:
        """Prefill prompts (rows, P), then decode greedily; return (tokens (rows, count), their logits)."""
        cache = self.operators.cache(*self.cached(prompts.shape[0], prompts.shape[1] + count - 1))
        logits = [self.forward(prompts, cache, last=1)]
        tokens = [self._see("word", self.operators.choose(logits[0]))]
        while len(tokens) < count:
            logits.append(self.forward(tokens[-1], cache))
            tokens.append(self._see("word", self.operators.choose(logits[-1])))
        return self.operators.join(tokens), self.operators.join(logits)

    def _see(self, name: str, tensor: Any) -> Any:
        return tensor if self.watch is None else self.watch(name, tensor)

    def _linear(self, name: str, module: str, x: Any) -> Any:
        bias = self.weights.get(f"{module}.bias")
        return self._see(name, self.operators.linear(x, self.weights[f"{module}.weight"], bias))

    def _norm(self, name: str, x: Any, module: str) -> Any:
        return self._see(name, self.operators.norm(x, self.weights[f"{module}.weight"], EPSILON))

    def _attention(self, i: int, x: Any, at: Any, cache: KeyValues | None) -> Any:
        s, module = self.shape, f"model.layers.{i}.self_attn"
        rows, count, _ = x.shape
        seen = self._norm(f"{i}.attention_norm", x, f"model.layers.{i}.input_layernorm")
        query, key, value = (
            self._linear(f"{i}.{name}", f"{module}.{name[0]}_proj", seen)
            .reshape(rows, count, -1, s.head)
            .swapaxes(1, 2)
            for name in ("query", "key", "value")
        )
        query = self._see(f"{i}.rotated_query", self._turn(query, at))
        key = self._see(f"{i}.rotated_key", self._turn(key, at))
        if cache:
            key, value = cache.extend(i, key, value)
        key, value = self._see(f"{i}.keys", key), self._see(f"{i}.values", value)
        mixed = (
            self.operators.attend(self.kernel, query, key, value, causal=count > 1)
            if self.kernel
            else self._eager(i, query, key, value, at)
        )
        mixed = self._see(f"{i}.mixed", mixed.swapaxes(1, 2).reshape(rows, count, -1))
        return self._linear(f"{i}.output", f"{module}.o_proj", mixed)

    def _eager(self, i: int, query: Any, key: Any, value: Any, at: Any) -> Any:
        rows, heads, count, size = query.shape
        grouped = query.reshape(rows, self.shape.kv_heads, -1, count, size)
        scores = self._see(f"{i}.scores", grouped @ key[:, :, None].swapaxes(-1, -2) * size**-0.5)
        chances = self._see(f"{i}.softmax", self.operators.softmax(scores, at))
        return (chances @ value[:, :, None]).reshape(rows, heads, count, size)

    def _inner(self, i: int, x: Any) -> Any:
        module = f"model.layers.{i}.mlp"
        seen = self._norm(f"{i}.inner_norm", x, f"model.layers.{i}.post_attention_layernorm")
        if self.shape.experts:
            return self._see(f"{i}.down", self._mixture(i, seen))
        return self._neurons(f"{i}", [f"{module}.{part}_proj" for part in ("gate", "up", "down")], seen)

    def _neurons(self, place: str, modules: list[str], seen: Any) -> Any:
        gate = self.operators.silu(self._linear(f"{place}.gate", modules[0], seen))
        up = self._linear(f"{place}.up", modules[1], seen)
        return self._linear(f"{place}.down", modules[2], self._see(f"{place}.active", gate * up))

    def _mixture(self, i: int, seen: Any) -> Any:
        """Return the sum of all experts' results in layer `i` times their shares; experts not chosen have share 0."""
        module = f"model.layers.{i}.block_sparse_moe"
        logits = self._linear(f"{i}.router", f"{module}.gate", seen)
        shares, chosen = self.operators.route(logits, CHOSEN)
        shares, chosen = self._see(f"{i}.shares", shares), self._see(f"{i}.chosen", chosen)
        total = 0
        for expert in range(self.shape.experts):
            names = [f"{module}.experts.{expert}.{part}" for part in ("w1", "w3", "w2")]
            share = self._see(f"{i}.expert{expert}.share", ((chosen == expert) * shares).sum(-1)[..., None])
            total = total + self._neurons(f"{i}.expert{expert}", names, seen) * share
        return total
