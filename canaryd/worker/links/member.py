"""One process of a group that sends data to each other: it uses one device, or runs on one core.

`canaryd.worker.links.group` starts it. The first line of standard input is a JSON object with the member's settings;
each further line is one round: the steps that all members do in the same order. The member answers each step that
concerns it with a line on standard output. It ends when standard input ends, even if a step hangs.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
import traceback
from datetime import timedelta
from typing import Any

from canaryd.codec import from_json, to_json
from canaryd.facts import Culprit, Evidence, Way
from canaryd.model import Device
from canaryd.worker import visible
from canaryd.worker.links.patterns import make
from canaryd.worker.links.transfers import FLIPPED, differences, traced
from canaryd.worker.numeric.seeds import derive
from canaryd.worker.numeric.tensors import same_bits, synchronize, torch, torch_device

LIBRARIES = {"cpu": "gloo", "cuda": "nccl", "rocm": "nccl", "xpu": "xccl", "npu": "hccl"}
"""Backend of a device → backend of torch.distributed, which calls RCCL "nccl" too."""
FORMATS = {"int64": -1, "float32": (1 << 16) - 1, "bfloat16": 7}
"""Number format of a sum → mask of the bits of each word that are added. With up to 32 members the sum is exact in any
order (24 and 8 bits); for int64 all bits are added, because int64 wraps."""


class Member:
    """One process of the group, with the steps that it can do."""

    def __init__(self, who: dict[str, Any]) -> None:
        """Join the group with the settings `who`, which `group.Group` wrote."""
        self.rank, self.size, self.seed, self.words = (int(who[k]) for k in ("rank", "size", "seed", "words"))
        self.device = from_json(Device, who["device"])
        self.wrong_link = who["wrong_link"]
        if who["core"] is not None:
            os.sched_setaffinity(0, {who["core"]})
            torch.set_num_threads(1)
        self.place = torch_device(self.device)
        if self.place.type != "cpu":
            getattr(torch, self.place.type).set_device(self.place)
        limit = timedelta(seconds=who["limit"])
        store = torch.distributed.TCPStore("127.0.0.1", who["port"], None, is_master=False, timeout=limit)
        torch.distributed.init_process_group(
            LIBRARIES[self.device.backend], store=store, rank=self.rank, world_size=self.size, timeout=limit
        )
        self.buffer = torch.empty(self.words, dtype=torch.int64, device=self.place)

    def words_of(self, rank: int, pattern: str) -> Any:
        """Return the words of `pattern` that the member `rank` contributes; no two members have the same words."""
        return make(pattern, self.words, derive(self.seed, f"{pattern} of {rank}"), self.place)

    def send(self, pattern: str, sender: int, receiver: int) -> dict[str, Any] | None:
        """Send words from one member to another; return this member's observation, or None if it takes no part.

        The sender reports whether its own words are still right, the receiver reports the time and the wrong words.
        """
        if self.rank == sender:
            words = self.words_of(sender, pattern)
            torch.distributed.send(words, receiver)
            synchronize(self.device)
            return {"source_held": same_bits(words, self.words_of(sender, pattern))}
        if self.rank != receiver:
            return None
        expected = self.words_of(sender, pattern)
        self.buffer.copy_(torch.bitwise_not(expected))
        synchronize(self.device)
        begun = time.perf_counter()
        torch.distributed.recv(self.buffer, sender)
        synchronize(self.device)
        seconds = time.perf_counter() - begun
        self._strike(self.buffer, sender)
        return {"seconds": seconds, "evidence": self._compared(self.buffer, expected, Way.BETWEEN)}

    def reduce(self, pattern: str, name: str) -> dict[str, Any]:
        """Add all members' words in the format `name`; return {"evidence": wrong sums or None}. Every sum is exact."""
        kind, mask = getattr(torch, name), FORMATS[name]
        mine = (self.words_of(self.rank, pattern) & mask | 1).to(kind)
        torch.distributed.all_reduce(mine)
        synchronize(self.device)
        expected = sum(self.words_of(rank, pattern) & mask | 1 for rank in range(self.size)).to(kind)
        self._strike(mine.view(torch.int64), None)
        return {"evidence": self._compared(mine, expected, Way.TOGETHER)}

    def gather(self, pattern: str) -> dict[str, Any]:
        """Gather the words of all members; return {"evidence": evidence of wrong words, or None}."""
        parts = [torch.empty_like(self.buffer) for _ in range(self.size)]
        torch.distributed.all_gather(parts, self.words_of(self.rank, pattern))
        synchronize(self.device)
        expected = torch.cat([self.words_of(rank, pattern) for rank in range(self.size)])
        for rank, part in enumerate(parts):
            self._strike(part, rank)
        return {"evidence": self._compared(torch.cat(parts), expected, Way.TOGETHER)}

    def _strike(self, words: Any, sender: int | None) -> None:
        """Inject a fault, one bit of `words`, if they came over the wrong link; `sender`: None for a sum of all."""
        if self.wrong_link and self.wrong_link[1] == self.rank and sender in (None, self.wrong_link[0]):
            words[words.numel() // 3] ^= FLIPPED

    @staticmethod
    def _compared(found: Any, expected: Any, way: Way) -> Any:
        """Return the evidence of the difference as JSON, or None if there is none; `way` is the kind of transfer."""
        if same_bits(found, expected):
            return None
        seen: Evidence = differences(expected, found)
        found.copy_(expected)
        culprit = Culprit.TRANSFER if same_bits(found, expected) else Culprit.MEMORY
        return to_json(traced(seen, way, culprit))


def main() -> None:
    """Do the steps that standard input gives, until it ends."""
    orders: queue.SimpleQueue[Any] = queue.SimpleQueue()
    who = json.loads(sys.stdin.readline())
    threading.Thread(target=_listen, args=(orders,), daemon=True).start()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a library prints is no answer
    try:
        visible.narrow()
        member = Member(who)
        answers.write(json.dumps({"ready": True}) + "\n")
        while True:
            for number, (operation, *rest) in enumerate(orders.get()):
                if (answer := getattr(member, operation)(*rest)) is not None:
                    answers.write(json.dumps({"step": number, **answer}) + "\n")
            answers.write(json.dumps({"done": True}) + "\n")
    except BaseException as error:  # noqa: BLE001 - every error must reach the worker
        answers.write(
            json.dumps({"error": "".join(traceback.format_exception_only(type(error), error)).strip()}) + "\n"
        )
        answers.flush()
        os._exit(1)


def _listen(orders: queue.SimpleQueue[Any]) -> None:
    for line in sys.stdin:
        orders.put(json.loads(line))
    os._exit(0)
