"""Slices of memory for WebGPU: storage buffers, which shaders write and compare.

As for torch's memory, a wrong cell is distinguished from a wrong transfer (`canaryd.worker.memory.cells`). The methods
take and return tensors in the host's memory.
"""

from __future__ import annotations

from typing import Any, cast

from canaryd.model import Device
from canaryd.worker.memory.slices import TILE, WORD, Expected, Slice
from canaryd.worker.numeric.tensors import torch
from canaryd.worker.runtime import interface, wgsl

AT_ONCE = 128
"""Number of rows that one shader call reads or writes: 8 MiB. The host reads differences only if a word is wrong."""


class Scratch:
    """Buffers that all slices of one device share: differences, a flag "something differs", and the expected words."""

    def __init__(self, device: Device, rows: int) -> None:
        """Allocate memory for at most `rows` rows."""
        self.runtime = cast("Any", interface.of(device))
        self.runtime.need(device)
        self.rows = min(rows, AT_ONCE)
        self.differences = self.runtime.new_buffer(self.rows * TILE * WORD)
        self.flag = self.runtime.new_buffer(4)
        self._tile: Any = None
        self._uploaded = self.runtime.new_buffer(TILE * WORD)

    def __len__(self) -> int:
        """Return the number of rows for which there is memory."""
        return self.rows

    def tile(self, expected: Expected) -> Any:
        """Return the buffer with the words that every row must hold; upload these words first if they have changed."""
        if self._tile is not expected.tile:
            self._tile = expected.tile
            self.runtime.write(self._uploaded, 0, expected.tile)
        return self._uploaded


class Words:
    """The words of a buffer, indexed by their number: one word is an int, a range is a copy in an int64 tensor."""

    def __init__(self, runtime: Any, buffer: Any, count: int) -> None:
        """Give access to the first `count` words of `buffer`."""
        self._runtime, self._buffer, self._count = runtime, buffer, count

    def __getitem__(self, at: Any) -> Any:
        """Return one word, or a tensor with the words of a range."""
        if isinstance(at, slice):
            start, stop, _ = at.indices(self._count)
            return self._runtime.read(self._buffer, start * WORD, (stop - start) * WORD).view(torch.int64)
        return int(self._runtime.read(self._buffer, int(at) * WORD, WORD).view(torch.int64))

    def __setitem__(self, at: Any, values: Any) -> None:
        """Write one word, or the words of a range."""
        start = at.start if isinstance(at, slice) else int(at)
        self._runtime.write(self._buffer, start * WORD, torch.as_tensor(values, dtype=torch.int64))


class BufferSlice(Slice):
    """One WebGPU buffer under test."""

    address = None

    def __init__(self, rows: int, first: int, device: Any, scratch: Scratch) -> None:  # noqa: ARG002  scratch knows it
        """Allocate a buffer of `rows` rows on the device of `scratch`; `first`: number of rows in earlier slices."""
        self.rows, self.first, self._scratch = rows, first, scratch
        self._runtime: Any = scratch.runtime
        self.words = self._runtime.new_buffer(rows * TILE * WORD)
        self.flat = Words(self._runtime, self.words, self.count)

    @property
    def device(self) -> Any:
        """The torch device of the tensors that the methods take and return: always the host."""
        return torch.device("cpu")

    def lock(self) -> bool:
        """Return False: pages are not locked, because the driver decides where a buffer is."""
        return False

    def write(self, part: range, expected: Expected) -> None:
        """Write the expected content to the group of rows `part`."""
        if expected.own:
            self._compute(wgsl.WRITE_OWN, part, self.words)
        else:
            self._compute(wgsl.WRITE_TILE, part, self._scratch.tile(expected), self.words)

    def difference(self, part: range, expected: Expected) -> Any:
        """Read rows once on the device; return int64 (rows, TILE) on the host, with a 1 for each wrong bit."""
        found, flag, size = self._scratch.differences, self._scratch.flag, len(part) * TILE
        if expected.own:
            self._compute(wgsl.DIFFERENCE_OWN, part, self.words, found)
        else:
            self._compute(wgsl.DIFFERENCE_TILE, part, self.words, self._scratch.tile(expected), found)
        self._runtime.write(flag, 0, torch.zeros(1, dtype=torch.int32))
        self._runtime.compute(wgsl.ANY, size, (), found, flag)
        if not self._runtime.read(flag, 0, 4).any():
            return torch.zeros((len(part), TILE), dtype=torch.int64)
        return self._runtime.read(found, 0, size * WORD).view(torch.int64).view(len(part), TILE)

    def get(self, at: Any) -> Any:
        """Return the words with the numbers `at`, read after all other words, so that no cache holds them."""
        self._runtime.compute(wgsl.READ, self.count, (), self.words, self._scratch.flag)
        (places,) = self._upload(at)
        found = self._runtime.new_buffer(len(at) * WORD)
        self._runtime.compute(wgsl.INDEX["gather"], len(at), (), self.words, places, found)
        return self._runtime.read(found, 0, len(at) * WORD).view(torch.int64)

    def put(self, at: Any, values: Any) -> None:
        """Write `values` to the words with the numbers `at`."""
        values = torch.as_tensor(values, dtype=torch.int64).expand(at.shape).contiguous()
        self._runtime.compute(wgsl.INDEX["scatter"], len(at), (), *self._upload(values, at), self.words)

    def invert(self, start: int, stop: int) -> None:
        """Invert every bit of the words start…stop - 1."""
        self._runtime.compute(wgsl.INVERT, stop - start, (start,), self.words)

    def _compute(self, shader: str, part: range, *buffers: Any) -> None:
        number = (self.first + part.start) * TILE
        words = (part.start * TILE, number & 0xFFFFFFFF, number >> 32)
        self._runtime.compute(shader, len(part) * TILE, words, *buffers)

    def _upload(self, *tensors: Any) -> list[Any]:
        made = [self._runtime.new_buffer(len(t) * WORD) for t in tensors]
        for buffer, tensor in zip(made, tensors, strict=True):
            self._runtime.write(buffer, 0, tensor)
        return made
