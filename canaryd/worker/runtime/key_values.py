"""The keys and values that a model running on torch keeps of earlier positions."""

from __future__ import annotations

from typing import Any

from canaryd.worker.numeric.tensors import torch


class KeyValues:
    """Keys and values of the positions seen so far; per layer a tensor (rows, KV heads, length, head size)."""

    def __init__(self, like: Any, layers: int, sizes: tuple[int, int, int, int]) -> None:
        """Make tensors of `sizes`, in the format and on the device of the tensor `like`."""
        self.keys = [like.new_zeros(sizes) for _ in range(layers)]
        self.values = [like.new_zeros(sizes) for _ in range(layers)]
        self.used = 0

    def extend(self, layer: int, key: Any, value: Any) -> tuple[Any, Any]:
        """Append new positions of one layer; return all of that layer."""
        end = self.used + key.shape[2]
        self.keys[layer][:, :, self.used : end] = key
        self.values[layer][:, :, self.used : end] = value
        return self.keys[layer][:, :, :end], self.values[layer][:, :, :end]

    def positions(self, count: int) -> Any:
        """Return the positions (count,) of the next tokens."""
        return torch.arange(self.used, self.used + count, device=self.keys[0].device)

    def advance(self, count: int) -> None:
        """Put `count` more positions in use."""
        self.used += count
