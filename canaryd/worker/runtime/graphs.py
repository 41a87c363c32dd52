"""Work of a GPU in a CUDA graph: captured once, then launched repeatedly without the host.

A fast GPU finishes a product before Python has started the next one.
https://docs.pytorch.org/docs/stable/notes/cuda.html, "CUDA Graphs".
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from canaryd.facts import beginning
from canaryd.worker.numeric.errors import is_refusal
from canaryd.worker.numeric.tensors import torch

T = TypeVar("T")

NOT_RUN = 2
"""Initial value of each truth value that a graph computes; the graph overwrites it with 0 or 1."""


class Graph:
    """Captured work, which reads and writes the same memory at each launch."""

    def __init__(self, device: Any, work: Callable[[], Any]) -> None:
        """Run and capture `work`, which returns truth values (n,) on the device; raise torch's error if it fails."""
        with torch.cuda.device(device):
            stream, tried = try_aside(device, work)
            count = len(tried)
            self._answers = torch.full((count,), NOT_RUN, dtype=torch.uint8, device=device)
            self._read = torch.full((count,), NOT_RUN, dtype=torch.uint8, pin_memory=True)
            self._device, self._done = device, torch.cuda.Event()
            self._graph: Any = None
            with contextlib.suppress(torch.cuda.OutOfMemoryError):
                self._graph = self._captured(work, stream)
            if self._graph is None:
                torch.cuda.empty_cache()  # torch gives nothing of it back by itself while it captures
                self._graph = self._captured(work, stream)

    def _captured(self, work: Callable[[], Any], stream: Any) -> Any:
        graph = torch.cuda.CUDAGraph()
        with _capturing(graph, stream, self._device):
            self._answers.copy_(work())
        return graph

    def launch(self) -> None:
        """Start the captured work on the device once more, without waiting for it."""
        self._read.fill_(NOT_RUN)  # what does not arrive is no answer
        self._answers.fill_(NOT_RUN)
        self._graph.replay()
        self._read.copy_(self._answers, non_blocking=True)
        self._done.record(torch.cuda.current_stream(self._device))

    def answers(self) -> list[int]:
        """Wait for the last launch; return n numbers: truth values (0 or 1), or `NOT_RUN` where none was written."""
        self._done.synchronize()
        return [int(answer) for answer in self._read.tolist()]


@contextlib.contextmanager
def _capturing(graph: Any, stream: Any, device: Any) -> Iterator[None]:
    """Capture the work that the block enqueues, as `torch.cuda.graph` does, but keep torch's free memory.

    `torch.cuda.graph` returns all free memory to the driver at each capture: the next case then waits for new memory
    (on an H200 a capture took 16 ms of a case's 110).
    """
    memory = _memory(device).pool()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream), _no_collection():
        try:
            graph.capture_begin(pool=memory)
            yield
            graph.capture_end()
        except BaseException:
            with contextlib.suppress(RuntimeError):  # it would say of the capture what the block said better
                graph.capture_end()
            # A capture that ends badly leaves torch's allocator capturing for good (pytorch issue 180395).
            with contextlib.suppress(RuntimeError, AttributeError):
                torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), memory)  # noqa: SLF001
            raise


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Suspend garbage collection during the block: freeing a graph would end a capture (pytorch issue 161037)."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def cannot_be_captured(error: Exception) -> bool:
    """Return whether an error means that this machine cannot capture a graph, although the device works."""
    text = str(error).lower()
    # "beginAllocateToPool: already recording to mempool_id" where a capture before ended badly.
    return isinstance(error, (ImportError, OSError)) or is_refusal(error) or "captur" in text or "mempool" in text


def why_not(error: Exception, length: int = 200) -> str:
    """Return the type of an error and its first line, in at most `length` characters."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "no reason given")
    return beginning(f"{type(error).__name__}: {first}", length)


def try_aside(device: Any, work: Callable[[], T]) -> tuple[Any, T]:
    """Do work once on the stream on which it will be captured; return the stream, and what `work` returned.

    Libraries create workspaces at their first call, and these calls must not be captured.
    """
    stream = aside(device)
    stream.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(stream):
            done = work()
    finally:  # also what an error left there: its memory is free for others from here on
        torch.cuda.current_stream().wait_stream(stream)
    return stream, done


@functools.lru_cache(maxsize=1)
def aside(device: Any) -> Any:
    """Return the stream of a device that all captures share, because cuBLAS keeps 32 MiB for each stream."""
    return torch.cuda.Stream(device)


@functools.lru_cache(maxsize=1)
def _memory(device: Any) -> Any:
    """Return an empty graph whose memory all other graphs share: a graph reuses what an earlier graph has released.

    If each graph had memory of its own, the graphs would fill the device, and a server would find none left. Sharing is
    safe for two reasons. No graph runs beside another, because all use one stream. Nobody reads shared memory after
    another graph has run, because results that are read lie elsewhere.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=aside(device)):
        torch.zeros(1, device=device)
    return graph


def let_go() -> None:
    """Release the memory that graphs share; it is free again for torch when the last graph is deleted."""
    _memory.cache_clear()
