"""The real torch with another `torch.cuda`: the cards of the file CARDS, whose tensors lie in the host's memory.

This package stands before the real one on the path, and imports that in its own place. What opens a context on a card,
waits for it, or computes on it is written into the file CARDS.log, with the process: `tests/cards_stand_in.py` reads
that.
"""

import contextlib
import json
import math
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace as Names

_here = Path(__file__).resolve().parents[1]
_file = Path(os.environ["CARDS"])
_doings = Path(f"{_file}.log")
sys.path = [p for p in sys.path if Path(p).resolve() != _here]
del sys.modules["torch"]
import torch  # noqa: E402
from torch.multiprocessing.reductions import StorageWeakRef  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

_contexts, _current = set(), [0]
_held, _limit, _peak = {}, [math.inf], [0]
"""Storage on a counted card → (weak reference, bytes); the process's limit; the most bytes held at a time."""


def _cards():
    return [{**card, "whole": card["uuid"]} for card in json.loads(_file.read_text())]


def _log(what, uuid):
    with _doings.open("a") as log:
        log.write(f"{os.getpid()} {what} {uuid}\n")


def _expand(word):
    """Return the device that a word of CUDA_VISIBLE_DEVICES names, as CUDA does; None for no device."""
    cards = _cards()
    for card in cards:
        if word in card["instances"]:
            return {**card, "uuid": word}
    if word.isdigit():
        found = cards[int(word)] if int(word) < len(cards) else None
    else:
        found = next((c for c in cards if len(word) > 4 and c["uuid"].startswith(word)), None)
    return {**found, "uuid": found["instances"][0]} if found and found["instances"] else found


def _seen():
    """Return the visible devices: those named before the first bad name, and one instance of a divided card at most."""
    words = os.environ.get("CUDA_VISIBLE_DEVICES")
    words = list(map(str, range(len(_cards())))) if words is None else [w.strip() for w in words.split(",")]
    seen = []
    for word in words:
        card = _expand(word)
        if card is None:
            break
        if card["uuid"].startswith("MIG-"):
            return [card]
        seen.append(card)
    return seen


def _index(device):
    if device is None:
        return _current[0]
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return _current[0] if index is None else index


def _alive(pid):
    return Path(f"/proc/{pid}").exists()


def _context(device, what):
    """Open a context on a device, once in a process, as its first use does; fail where the card fails."""
    card = _seen()[_index(device)]
    if card["uuid"] not in _contexts:
        log = _doings.read_text().splitlines() if _doings.exists() else []
        holders = {int(line.split()[0]) for line in log if line.split()[1:] == ["context", card["uuid"]]}
        if card["exclusive"] and any(_alive(pid) for pid in holders - {os.getpid()}):
            raise RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable")
        _contexts.add(card["uuid"])
        _log("context", card["uuid"])
    _log(what, card["uuid"])
    if card["error"] and what in card["fails"]:
        raise RuntimeError(card["error"])
    return card


class Stream:
    """A queue of work on one device."""

    def __init__(self, device=None):
        self.index = _index(device)

    def synchronize(self):
        """Wait for it."""
        _context(self.index, "synchronize")

    def wait_stream(self, other):
        """Wait for another: nothing to do, the work is done by the host."""


class Event:
    """A moment in a stream; without one, in the current stream of the current device."""

    def __init__(self, enable_timing=False):
        self._at = 0.0

    def record(self, stream=None):
        """Note the time."""
        self._index = _current[0] if stream is None else stream.index
        _context(self._index, "event")
        self._at = time.perf_counter()

    def synchronize(self):
        """Wait for it."""
        _context(self._index, "synchronize")

    def query(self):
        """It has passed."""
        return True

    def elapsed_time(self, end):
        """Milliseconds."""
        given = _seen()[self._index]["event_ms"]
        return (end._at - self._at) * 1e3 if given is None else given


class _On:
    """The device that is current in a block; torch asks whether something is of this class."""

    def __init__(self, device):
        self.idx = _index(device)

    def __enter__(self):
        self.before, _current[0] = _current[0], self.idx

    def __exit__(self, *_):
        _current[0] = self.before


def _capture(*_, **__):
    raise RuntimeError("nothing can be captured on a card that is not there")


def _properties(device=None):
    card = _seen()[_index(device)]
    shown = card["whole"] if card["named_whole"] else card["uuid"]
    uuid = shown.removeprefix("GPU-").removeprefix("MIG-")
    where = {"pci_domain_id": 0, "pci_bus_id": card["bus"]}
    return Names(uuid=uuid, name=card["name"], total_memory=card["memory"], major=9, minor=0,
                 multi_processor_count=132, **where)  # fmt: skip


def _memory(device=None):
    card = _context(device, "memory")
    return card["memory"] - card["used"] - _live(), card["memory"]


def _set_limit(fraction, device=None):
    _limit[0] = fraction * _seen()[_index(device)]["memory"]


def _live():
    """Return the bytes that this process holds on a counted card."""
    for key in [key for key, (storage, _) in _held.items() if storage.expired()]:
        del _held[key]
    return sum(size for _, size in _held.values())


def _tensors(found):
    return [t for t in torch.utils._pytree.tree_leaves(found) if isinstance(t, torch.Tensor)]


def _count(found):
    """Count what an operation on a card has returned; refuse what there is no room for."""
    card = _seen()[0]
    for tensor in _tensors(found):
        storage = tensor.untyped_storage()
        if (key := storage._cdata) in _held and not _held[key][0].expired():
            continue
        asked = _live() + storage.nbytes()
        refused = asked > min(_limit[0], card["memory"] - card["used"])
        if refused or asked > _peak[0]:
            _peak[0] = _peak[0] if refused else asked
            _log(f"{'refused' if refused else 'peak'}:{asked}", card["uuid"])
        if refused:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {storage.nbytes()} bytes")
        _held[key] = StorageWeakRef(storage), storage.nbytes()
    return found


def _is_held(tensor):
    return (key := tensor.untyped_storage()._cdata) in _held and not _held[key][0].expired()


def _copied(tensor):
    """Return a copy in the host's memory, which is not the card's."""
    with torch.utils._python_dispatch._disable_current_modes():
        return tensor.clone(memory_format=torch.preserve_format)


class _Counted(TorchDispatchMode):
    """What is computed from tensors on a counted card lies on that card."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        return _count(found) if any(map(_is_held, _tensors((args, kwargs)))) else found


for _name, _answer in {
    "is_available": lambda: bool(_seen()),
    "device_count": lambda: len(_seen()),
    "get_device_properties": _properties,
    "current_device": lambda: _current[0],
    "synchronize": lambda device=None: _context(device, "synchronize") and None,
    "mem_get_info": _memory,
    "memory_reserved": lambda device=None: 0,
    "set_per_process_memory_fraction": _set_limit,
    "current_stream": Stream,
    "Stream": Stream,
    "Event": Event,
    "device": _On,
    "stream": contextlib.nullcontext,
    "CUDAGraph": object,
    "graph": _capture,
    "empty_cache": lambda: None,
    "_sleep": lambda cycles: None,
    "is_initialized": lambda: bool(_contexts),
}.items():
    setattr(torch.cuda, _name, _answer)

_to = torch.Tensor.to


def _moved(tensor, *args, **kwargs):
    """Move to a card: a copy that stays in the host's memory."""
    target = args[0] if args else None
    if isinstance(target, torch.device) and target.type == "cuda":
        card = _context(target, "upload")
        copy = tensor.clone(memory_format=torch.preserve_format)
        return _count(copy) if card["counted"] else copy
    return _to(tensor, *args, **kwargs)


torch.Tensor.to = _moved


class _Made(torch.overrides.TorchFunctionMode):
    """What is made on a card lies in the host's memory."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if getattr(function, "__name__", "") not in ("to", "device") and kwargs.get("device") is not None:
            target = torch.device(kwargs["device"])
            if target.type == "cuda":
                card = _context(target, "made")
                made = function(*args, **{**kwargs, "device": "cpu"})
                return _count(made) if card["counted"] else made
        return function(*args, **kwargs)


_Made().__enter__()
if any(card["counted"] for card in _cards()):
    _cpu = torch.Tensor.cpu
    torch.Tensor.cpu = lambda tensor: _copied(tensor) if _is_held(tensor) else _cpu(tensor)
    _Counted().__enter__()
