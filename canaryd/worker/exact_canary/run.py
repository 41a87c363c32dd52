"""Run an exact canary in plain torch, in the order of work of a serving engine: any format, eager or by SDPA kernels.

Norms, rotations and softmax of 16-bit formats are taken in float32, as serving does; eager attention writes its scores
in the model's format.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from canaryd.worker.canary.model import KeyValues, Watch
from canaryd.worker.exact_canary.shape import EPSILON, THETA, Shape
from canaryd.worker.numeric.attention import attend
from canaryd.worker.numeric.tensors import torch

LONGEST = 1024
"""Positions of the longest text: a prompt and its continuation have each place once (ours)."""


class Runner:
    """A model's weights in one format on one device, ready to infer."""

    def __init__(self, shape: Shape, weights: Mapping[str, Any], kernel: str = "", watch: Watch | None = None) -> None:
        """`kernel` is one of torch's SDPA kernels, or "" for eager attention."""
        self.shape, self.weights, self.kernel, self.watch = shape, weights, kernel, watch
        self.turns = self._turns()

    def cached(self, rows: int, length: int) -> tuple[Any, int, tuple[int, int, int, int]]:
        """Return what `KeyValues` takes to hold `rows` of `length` positions."""
        shape = self.shape
        return self.weights["lm_head.weight"], shape.layers, (rows, shape.kv_heads, length, shape.head)

    def forward(self, tokens: Any, cache: KeyValues | None = None, last: int = 0) -> Any:
        """Return the logits (rows, T, vocabulary) of tokens (rows, T) that follow those in `cache`; all, or `last`."""
        count = tokens.shape[1]
        at = cache.positions(count) if cache else torch.arange(count, device=tokens.device)
        x = self._see("embedding", torch.nn.functional.embedding(tokens, self.weights["model.embed_tokens.weight"]))
        for i in range(self.shape.layers):
            x = self._see(f"{i}.middle", x + self._attention(i, x, at, cache))
            x = self._see(f"{i}.out", x + self._inner(i, x))
        if cache:
            cache.advance(count)
        x = self._norm("norm", x[:, -last:] if last else x, "model.norm")
        return self._see("logits", torch.nn.functional.linear(x, self.weights["lm_head.weight"]))

    def decode(self, prompts: Any, count: int) -> tuple[Any, Any]:
        """Prefill prompts (rows, P), then decode greedily from the cache; tokens (rows, count) and their logits."""
        cache = KeyValues(*self.cached(prompts.shape[0], prompts.shape[1] + count - 1))
        logits = [self.forward(prompts, cache, last=1)]
        tokens = [self._see("word", logits[0].argmax(-1))]
        while len(tokens) < count:
            logits.append(self.forward(tokens[-1], cache))
            tokens.append(self._see("word", logits[-1].argmax(-1)))
        return torch.cat(tokens, 1), torch.cat(logits, 1)

    def score(self, whole: Any, count: int) -> Any:
        """Return the logits (rows, count, vocabulary) of the last `count` positions of whole texts, in one pass."""
        return self.forward(whole, last=count)

    def _see(self, name: str, tensor: Any) -> Any:
        return tensor if self.watch is None else self.watch(name, tensor)

    def _linear(self, name: str, module: str, x: Any) -> Any:
        bias = self.weights.get(f"{module}.bias")
        return self._see(name, torch.nn.functional.linear(x, self.weights[f"{module}.weight"], bias))

    def _norm(self, name: str, x: Any, module: str) -> Any:
        wide = x.to(torch.float32) if x.element_size() == 2 else x
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPSILON)
        return self._see(name, scaled.to(x.dtype) * self.weights[f"{module}.weight"])

    def _turns(self) -> tuple[Any, Any]:
        """Return cosines and sines (positions, half a head), made in float64 on the host."""
        like, half = self.weights["lm_head.weight"], self.shape.head // 2
        speeds = torch.tensor([THETA ** (-i / half) for i in range(half)], dtype=torch.float64)
        angles = torch.arange(LONGEST, dtype=torch.float64)[:, None] * speeds
        return angles.cos().to(like.dtype).to(like.device), angles.sin().to(like.dtype).to(like.device)

    def _rotate(self, name: str, x: Any, at: Any) -> Any:
        a, b = x.chunk(2, -1)
        cos, sin = (table[at] for table in self.turns)
        return self._see(name, torch.cat((a * cos - b * sin, b * cos + a * sin), -1))

    def _attention(self, i: int, x: Any, at: Any, cache: KeyValues | None) -> Any:
        s, module = self.shape, f"model.layers.{i}.self_attn"
        rows, count, _ = x.shape
        seen = self._norm(f"{i}.attention_norm", x, f"model.layers.{i}.input_layernorm")
        query, key, value = (
            self._linear(f"{i}.{name}", f"{module}.{name[0]}_proj", seen).view(rows, count, -1, s.head).transpose(1, 2)
            for name in ("query", "key", "value")
        )
        query = self._rotate(f"{i}.rotated_query", query, at)
        key = self._rotate(f"{i}.rotated_key", key, at)
        if cache:
            key, value = cache.extend(i, key, value)
        key, value = self._see(f"{i}.keys", key), self._see(f"{i}.values", value)
        mixed = (
            attend(self.kernel, query, key, value, causal=count > 1)
            if self.kernel
            else self._eager(i, query, key, value, at)
        )
        mixed = self._see(f"{i}.mixed", mixed.transpose(1, 2).reshape(rows, count, -1))
        return self._linear(f"{i}.output", f"{module}.o_proj", mixed)

    def _eager(self, i: int, query: Any, key: Any, value: Any, at: Any) -> Any:
        rows, heads, count, size = query.shape
        grouped = query.reshape(rows, self.shape.kv_heads, -1, count, size)
        scores = torch.matmul(grouped, key.unsqueeze(2).transpose(-1, -2)) * size**-0.5
        scores = self._see(f"{i}.scores", scores)
        later = torch.arange(key.shape[2], device=query.device) > at[:, None]
        scores = scores.masked_fill(later, -math.inf)
        wide = scores.to(torch.float32) if scores.element_size() == 2 else scores
        chances = self._see(f"{i}.softmax", torch.softmax(wide, -1).to(scores.dtype))
        return torch.matmul(chances, value.unsqueeze(2)).reshape(rows, heads, count, size)

    def _inner(self, i: int, x: Any) -> Any:
        module = f"model.layers.{i}.mlp"
        seen = self._norm(f"{i}.inner_norm", x, f"model.layers.{i}.post_attention_layernorm")
        gate = torch.nn.functional.silu(self._linear(f"{i}.gate", f"{module}.gate_proj", seen))
        up = self._linear(f"{i}.up", f"{module}.up_proj", seen)
        return self._linear(f"{i}.down", f"{module}.down_proj", self._see(f"{i}.active", gate * up))
