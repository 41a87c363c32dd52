"""A machine with NVIDIA cards, as far as torch tells: `tests/cards`, which stands before the real torch on the path.

    cards = Cards(tmp_path, 8)
    Series(WorkerSpec(env=cards.environment))      # its workers see eight cards, and compute on the host
    cards.contexts()                               # on which cards workers have opened a context, by process

Only listing, contexts, streams, events and memory are those of cards; numbers come from the real torch on a CPU. Of a
card that is `counted` every allocation counts: each new peak of a process is in the log (`asked`), and what is beyond
the card's free memory or the process's limit is refused as CUDA refuses it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from canaryd.model import Device
from canaryd.supervisor.protocol import WorkerSpec
from canaryd.supervisor.series import Series

SITE = Path(__file__).parent / "cards"


class Cards:
    """One machine; `divided` cards have two MIG instances each."""

    def __init__(self, directory: Path, cards: int, divided: Sequence[int] = ()) -> None:
        self.directory = directory
        self._file = directory / "cards.json"
        self._cards = [
            {
                "uuid": f"GPU-00000000-0000-4000-8000-00000000000{n:x}",
                "name": "NVIDIA H100",
                "bus": 16 + n,
                "memory": 80 << 30,
                "used": 0,
                "counted": False,
                "event_ms": None,  # between any two events; None: as the host's clock says
                "exclusive": False,
                "named_whole": False,  # an instance has the uuid of its card, as the first MIG runtimes gave it
                "instances": [f"MIG-00000000-0000-4000-8{i}00-00000000000{n:x}" for i in range(2) if n in divided],
                "error": "",
                "fails": [],
            }
            for n in range(cards)
        ]
        self._write()

    def set(self, card: int, key: str, value: object) -> None:
        """Say what a card is from now on."""
        self._cards[card][key] = value
        self._write()

    def fail(self, card: int, error: str, *fails: str) -> None:
        """Let what is done on a card ("upload", "synchronize", "event", "memory") end with this error."""
        self._cards[card] |= {"error": error, "fails": fails}
        self._write()

    @property
    def environment(self) -> Mapping[str, str]:
        """What a worker must have in its environment to find itself on this machine."""
        return {"PYTHONPATH": str(SITE), "CARDS": str(self._file)}

    def devices(self) -> list[Device]:
        """Return what a worker lists, and the instances, which only the driver lists."""
        with Series(WorkerSpec(env=self.environment)) as series:
            described = series.describe([])
        assert described.torch, described.torch_reason
        found = [d for d in described.devices if d.backend == "cuda" and not self._instances(d)]
        for number, card in enumerate(self._cards):
            found += [
                Device(uuid=uuid, backend="cuda", index=number, model="H100 MIG", torch_index=0, parent=card["uuid"],
                       detail={"instance": str(i), "gpu_instance_id": str(i + 1), "compute_instance_id": "0"})
                for i, uuid in enumerate(card["instances"])
            ]  # fmt: skip
        return found

    def _instances(self, device: Device) -> bool:
        return any(device.uuid.partition("-")[2] == u.partition("-")[2] for c in self._cards for u in c["instances"])

    def log(self) -> list[tuple[int, str, str]]:
        """Return what was done so far: process, what, uuid of the card."""
        log = self._file.with_suffix(".json.log")
        lines = log.read_text().splitlines() if log.exists() else []
        return [(int(pid), what, uuid) for pid, what, uuid in map(str.split, lines)]

    def contexts(self) -> dict[int, set[str]]:
        """Return process → the cards on which it opened a context."""
        found: dict[int, set[str]] = {}
        for pid, what, uuid in self.log():
            if what == "context":
                found.setdefault(pid, set()).add(uuid)
        return found

    def asked(self) -> tuple[int, int]:
        """Return the most bytes that a process had of a counted card at a time, and the most that it was refused."""
        said = [what.partition(":") for _, what, _ in self.log()]
        had, refused = ([int(size) for name, _, size in said if name == word] for word in ("peak", "refused"))
        return max(had, default=0), max(refused, default=0)

    def hold(self, card: int) -> None:
        """Let this process have a context on a card, as another user of it would."""
        with self._file.with_suffix(".json.log").open("a") as log:
            log.write(f"{os.getpid()} context {self._cards[card]['uuid']}\n")

    def forget(self) -> None:
        """Start the log anew."""
        self._file.with_suffix(".json.log").unlink(missing_ok=True)

    def _write(self) -> None:
        fresh = self._file.with_suffix(".new")
        fresh.write_text(json.dumps(self._cards))
        fresh.replace(self._file)
