"""Run tiles (small products) on every unit of a device: on the cores of a processor or the SMs of a GPU."""

from __future__ import annotations

import contextlib
import importlib
import subprocess
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from canaryd.model import Device
from canaryd.worker.numeric.products import multiply
from canaryd.worker.numeric.stack import capability
from canaryd.worker.numeric.tensors import can_pin, on_core, torch, visible_cores
from canaryd.worker.runtime.interface import Unsupported
from canaryd.worker.units.tiles import MOVED, Launch, Tiles

FIRST_TENSOR_CORES = (8, 0)
"""Lowest compute capability for which Triton uses tensor cores for these formats. Checked by compiling with Triton 3.2,
3.4 and 3.9 for 7.5, 8.0, 8.9, 9.0, 10.0 and 12.0."""
STEP = 64
"""Number of elements along K that a block holds at a time: at least 32, which tensor cores need for int8."""


class Processor(Protocol):
    """A device that reports which of its units (cores or SMs) computed a result."""

    unit: str
    """Name of the units in `Place.unit`."""
    count: int
    """Number of units of the device."""

    def refuses(self, tiles: Tiles) -> str:
        """Return the reason why the device cannot compute these tiles, or "" if it can."""

    def launch(self, tiles: Tiles, operands: tuple[Any, ...], blocks: int, shift: int) -> Launch:
        """Compute the tiles in `blocks` blocks, spread over the units; `shift` moves the results within the memory."""


class Cores:
    """The cores of this host that the process may use. They compute one after the other, by pinning (affinity)."""

    unit = "core"

    def __init__(self) -> None:
        """Find the cores that this process may use."""
        self.cores = visible_cores()
        self.count = len(self.cores)

    def refuses(self, tiles: Tiles) -> str:  # noqa: ARG002  what a processor's library refuses it says itself
        """Return the reason why the cores cannot compute these tiles, or "" if they can."""
        return "" if can_pin() else "no core can be named where a process may not choose the core that it runs on"

    def launch(self, tiles: Tiles, operands: tuple[Any, ...], blocks: int, shift: int) -> Launch:  # noqa: ARG002
        """Compute the tiles once on every core, one block per core; return the results."""
        a, b = operands
        turned = shift % self.count
        cores = [*self.cores[turned:], *self.cores[:turned]]
        results = []
        for core in cores:
            with on_core(core):
                each = [multiply(tiles.source, tiles.target, (x, y.mT), None) for x, y in zip(a, b, strict=True)]
                results.append(torch.stack(each))
        return Launch(torch.stack(results), cores)


class Multiprocessors:
    """The SMs of a GPU. The kernel reads the number of the SM on which it runs.

    If the kernel is interpreted on the host, two arguments replace the chip: `placement` takes the number of blocks and
    returns the SM of each, and `lane` has the lane of each element (M, N).
    """

    unit = "sm"

    def __init__(
        self,
        device: Device,
        placement: Callable[[int], list[int]] | None = None,
        lane: Any = None,
    ) -> None:
        """Load the kernel, or remember the reason why it is missing if Triton is not installed."""
        self.kernel: Any = None
        self.missing = ""
        try:
            self.kernel = importlib.import_module("canaryd.worker.units.kernel")
        except ImportError as error:
            self.missing = f"no SM can be named without Triton ({error}): install triton beside torch"
        self.device, self.placement, self.lane = device, placement, lane
        self.count = int(device.detail["multiprocessors"])

    def refuses(self, tiles: Tiles) -> str:
        """Return the reason why the GPU cannot compute these tiles, or "" if it can."""
        if self.missing:
            return self.missing
        if tiles.path == "dot" and capability(self.device) < FIRST_TENSOR_CORES:
            found = self.device.detail.get("capability", "unknown")
            return f"Triton uses tensor cores from compute capability 8.0 on; this is {found}"
        return ""

    def launch(self, tiles: Tiles, operands: tuple[Any, ...], blocks: int, shift: int) -> Launch:
        """Compute the tiles in `blocks` blocks, which the GPU spreads over its SMs; return the results."""
        a, b = operands
        where = a.device
        results = torch.empty((blocks, *tiles.sizes), dtype=getattr(torch, tiles.target), device=where)
        lanes = torch.full((blocks, tiles.M, tiles.N), MOVED, dtype=torch.int32, device=where)
        units = torch.full((blocks, 2), MOVED, dtype=torch.int32, device=where)
        on_chip = self.placement is None
        if self.placement:
            for block, unit in enumerate(self.placement(blocks)):
                units[(block + shift) % blocks] = unit
            lanes[:] = self.lane
        with torch.cuda.device(where) if on_chip else contextlib.nullcontext(), _needs_set_up():
            self.kernel.exact_tiles[(blocks,)](
                *(a, b, results, lanes, units, shift % blocks, tiles.rounds),
                M=tiles.M, N=tiles.N, K=tiles.K, STEP=min(STEP, tiles.K), DOT=tiles.path == "dot", ON_CHIP=on_chip,
                num_warps=self.kernel.WARPS,
            )  # fmt: skip
        return Launch(results, [first if first == last else MOVED for first, last in units.tolist()], lanes)


@contextlib.contextmanager
def _needs_set_up() -> Iterator[None]:
    """Raise `Unsupported` if Triton cannot be set up on this machine, which says nothing about the device's health.

    Triton compiles its launcher with a C compiler and finds libcuda.so.1 with ldconfig or LD_LIBRARY_PATH (otherwise it
    raises AssertionError; triton, backends/nvidia/driver.py). It keeps both in a cache that it must be able to write
    and load.
    """
    try:
        yield
    except (RuntimeError, OSError, ImportError, AssertionError, subprocess.CalledProcessError) as error:
        if isinstance(error, subprocess.CalledProcessError) or "C compiler" in str(error):
            raise Unsupported("Triton needs a C compiler and Python's headers (gcc, python3-dev)") from error
        if isinstance(error, RuntimeError) and "active drivers" not in str(error):
            raise
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise Unsupported(f"Triton cannot be set up here: {why}") from error
