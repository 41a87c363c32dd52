"""Decoding by calls of fixed shapes: both made by torch.compile, or the step replayed from a CUDA graph."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from canaryd.facts import beginning
from canaryd.worker.numeric.errors import is_refusal
from canaryd.worker.numeric.tensors import torch
from canaryd.worker.runtime.graphs import try_aside
from canaryd.worker.runtime.key_values import KeyValues
from canaryd.worker.telemetry.command import output
from canaryd.worker.telemetry.sysfs import Unreadable
from canaryd.worker.temporary import temporary_directory

FIXED = ("compiled", "graph")
"""How: both calls are made by torch.compile, or the step is replayed from a CUDA graph."""
COMPILING = 90.0
"""Seconds that torch.compile may take in a run; a format and batch is 46 to 60 of work for one core of a Zen 4."""


class Slots(KeyValues):
    """A cache whose shape never changes and whose length is a tensor, for compilers and captured graphs."""

    def __init__(self, like: Any, layers: int, sizes: tuple[int, int, int, int]) -> None:
        super().__init__(like, layers, sizes)
        self.at = torch.zeros(1, dtype=torch.int64, device=like.device)
        """How many positions are in use; `used` stays 0."""
        self.slots = torch.arange(sizes[2], device=like.device)[:, None]

    def clear(self) -> None:
        """Empty the cache: a non-finite value of an earlier inference would reach a masked sum."""
        for tensor in (self.at, *self.keys, *self.values):
            tensor.zero_()

    def extend(self, layer: int, key: Any, value: Any) -> tuple[Any, Any]:
        """Store the prompt, which comes first, and return it; or store one token, and return all slots."""
        if key.shape[2] > 1:
            return super().extend(layer, key, value)
        keys, values, here = self.keys[layer], self.values[layer], self.slots == self.at
        keys.copy_(torch.where(here, key, keys))
        values.copy_(torch.where(here, value, values))
        return keys, values

    def positions(self, count: int) -> Any:
        """Return the positions (count,) of the next tokens."""
        return self.at + torch.arange(count, device=self.at.device)

    def advance(self, count: int) -> None:
        """Put `count` more positions in use."""
        self.at.add_(count)


class Decodable(Protocol):
    """A model that `Decoder` can drive."""

    def cached(self, rows: int, length: int) -> tuple[Any, int, tuple[int, int, int, int]]:
        """Return what `KeyValues` takes to hold `rows` of `length` positions."""

    def forward(self, tokens: Any, cache: KeyValues | None = None) -> Any:
        """Return the logits (rows, T, vocabulary) of tokens (rows, T) that follow those in `cache`."""


class Decoder:
    """Decode as `decode` does, by two calls whose shapes never change: a prefill, and one step for every token.

    `compile` and `capture` put a compiled or a captured call in their place.
    """

    def __init__(self, model: Decodable, rows: int, prompt: int, count: int) -> None:
        self.model = model
        self.count = count
        self.slots = Slots(*model.cached(rows, prompt + count - 1))
        self.token = self.slots.at.new_zeros(rows, 1)
        # Not bound methods by default: in a cycle a graph would keep its memory until Python looks for cycles.
        self.prefill: Callable[[Any], Any] | None = None
        self.step: Callable[[], Any] | None = None

    def __call__(self, prompts: Any) -> tuple[Any, Any]:
        """Return what `decode` returns."""
        self.slots.clear()
        prefill, step = self.prefill or self._prefill, self.step or self._step
        logits = [prefill(prompts).clone()]
        tokens = [self.token.clone()]
        while len(tokens) < self.count:
            logits.append(step().clone())
            tokens.append(self.token.clone())
        return torch.cat(tokens, 1), torch.stack(logits, 1)

    def compile(self) -> None:
        """Compile both calls with torch.compile, which happens at the first inference, inside `compiler`."""
        self.prefill, self.step = (torch.compile(f, fullgraph=True, dynamic=False) for f in (self._prefill, self._step))

    def capture(self) -> None:
        """Capture the step in a CUDA graph; https://docs.pytorch.org/docs/stable/notes/cuda.html, "CUDA Graphs"."""
        self.slots.clear()
        with torch.cuda.device(self.token.device):
            stream, _ = try_aside(self.token.device, self._step)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                logits = self._step()

        def replay() -> Any:
            graph.replay()
            return logits

        self.step = replay

    def _prefill(self, prompts: Any) -> Any:
        return self._choose(self.model.forward(prompts, self.slots))

    def _step(self) -> Any:
        return self._choose(self.model.forward(self.token, self.slots))

    def _choose(self, logits: Any) -> Any:
        last = logits[:, -1]
        self.token.copy_(last.argmax(-1, keepdim=True))
        return last


def cannot_be_fixed(error: Exception) -> bool:
    """Tell a compiler or a capture that this machine does not have from a device that fails."""
    if isinstance(error, (ImportError, OSError)) or is_refusal(error):  # TimeoutError is an OSError
        return True
    text = str(error).lower()
    # "beginAllocateToPool: already recording to mempool_id" where a capture before ended badly.
    of_capture = "captur" in text or "mempool" in text
    return type(error).__module__.startswith(("torch._dynamo", "torch._inductor")) or of_capture


def why_not(error: Exception, length: int = 200) -> str:
    """Return the kind of an error and its first line that says something, in at most `length` characters.

    torch wraps what a compiler raised: "backend='inductor' raised:" comes first, and the error behind it.
    """
    lines = (line.strip() for line in str(error).splitlines())
    told = next((line for line in lines if line and not line.endswith(":")), "no reason given")
    return beginning(f"{type(error).__name__}: {told}", length)


@contextlib.contextmanager
def compiler() -> Iterator[str]:
    """Make torch.compile work only in this process and write only below a temporary directory, removed at the end.

    Gives the names and versions of the compilers that torch itself calls, which the stack does not have. Raises what
    torch raises where it cannot compile for this Python.
    """
    name, before = "TORCHINDUCTOR_CACHE_DIR", os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    with temporary_directory("canaryd-compile-") as directory:
        os.environ[name] = directory  # before the imports, one of which creates this directory
        try:
            dynamo, inductor, utils = (
                importlib.import_module(f"torch.{part}") for part in ("_dynamo", "_inductor", "_inductor.utils")
            )
            with (
                utils.fresh_inductor_cache(dir=directory),
                inductor.config.patch(compile_threads=1),  # more threads would be processes that stay
                dynamo.config.patch(cache_size_limit=64),  # every format and batch goes through the same two functions
            ):
                _headers_below(directory, inductor.config)
                yield _backends([name for name in inductor.config.cpp.cxx if name])
            torch.compiler.reset()
        finally:
            os.environ.pop(name)
            if before is not None:
                os.environ[name] = before


def _headers_below(directory: str, config: Any) -> None:
    """Keep precompiled headers, which halve the time, in `directory`; use none where that fails."""
    cache = vars(importlib.import_module("torch._inductor.codecache"))
    places = {"_HEADER_DIR": "headers", "_HEADER_LOCK_DIR": "locks"}
    made: Any = cache.get("_precompile_header")
    # torch has no setting for their place, and runs openssl for their checksum.
    if places.keys() <= cache.keys() and hasattr(made, "cache_clear") and shutil.which("openssl"):
        cache.update({name: f"{directory}/{place}" for name, place in places.items()})
        made.cache_clear()
    elif hasattr(config, "cpp_cache_precompile_headers"):
        config.cpp_cache_precompile_headers = False


def _backends(cxx: list[str]) -> str:
    found = []
    for name in cxx:
        with contextlib.suppress(Unreadable):
            found.append(output([name, "--version"], 10.0).partition("\n")[0].strip())
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        found.append(f"triton {importlib.metadata.version('triton')}")
    return ", ".join(found)


@contextlib.contextmanager
def time_limit(seconds: float, what: str) -> Iterator[None]:
    """Raise `TimeoutError` in the main thread when `what` takes too long: compilers may wait for a disk.

    A compiler may wrap what is raised inside it: what it raises once the time is over is that `TimeoutError` too.
    """
    late = TimeoutError(f"{what} took longer than {seconds:.3g} s")
    over: list[int] = []

    def stop(number: int, _: object) -> None:
        over.append(number)
        raise late

    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("time_limit works only in the main thread, where a worker runs its probes")
    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds, 5.0)  # repeatedly: an exception in a callback may be lost
    try:
        yield
    except Exception as error:
        if over and error is not late:
            raise late from error
        raise
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
