"""Accelerators are tested side by side as far as memory allows: nobody waits for nothing, and nobody for ever."""

from __future__ import annotations

import re
import threading
import time

import pytest

from canaryd.engine.room import Room
from canaryd.free_memory import available, of_host
from tests.command import bare_python, canaryd, configure, eventually
from tests.daemon.test_telemetry import TORCH
from tests.worker.telemetry.trees import plant

GIB = 1 << 30


class Visitors:
    """Threads that enter a room, and leave it when they are told."""

    def __init__(self, room: Room) -> None:
        self.room, self.inside, self.stopped = room, [], False
        self._leave: dict[str, threading.Event] = {}

    def come(self, name: str, wanted: int) -> None:
        """Send one to the door."""
        leave = self._leave[name] = threading.Event()

        def visit() -> None:
            with self.room.enter(wanted, lambda: self.stopped):
                self.inside.append(name)
                leave.wait(30)
                self.inside.remove(name)

        threading.Thread(target=visit, daemon=True).start()

    def go(self, name: str) -> None:
        """Let one leave."""
        self._leave[name].set()


def test_as_many_enter_as_there_is_room_for():
    """What those inside have not taken yet is theirs: the memory is looked at when nobody is inside."""
    visitors = Visitors(Room(lambda: 3 * GIB))
    for name in ("a", "b", "c", "d"):
        visitors.come(name, GIB)
        if name != "d":
            eventually(lambda name=name: name in visitors.inside)
    time.sleep(0.2)
    assert visitors.inside == ["a", "b", "c"]
    visitors.go("b")
    eventually(lambda: "d" in visitors.inside)
    for name in ("a", "c", "d"):
        visitors.go(name)


def test_alone_one_always_enters_and_a_stop_lets_go():
    """A series that is too large for the memory runs alone; who waits when canaryd stops does not wait on."""
    visitors = Visitors(Room(lambda: 0))
    visitors.come("large", GIB)
    eventually(lambda: visitors.inside == ["large"])
    visitors.come("second", GIB)
    time.sleep(0.2)
    assert visitors.inside == ["large"]
    visitors.stopped = True
    eventually(lambda: "second" in visitors.inside)
    for name in ("large", "second"):
        visitors.go(name)


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ({}, 16 * GIB),
        ({"": ("max", 1, 0)}, 16 * GIB),
        ({"pod/canaryd": (4 * GIB, 3 * GIB, GIB)}, 2 * GIB),
        ({"pod/canaryd": (4 * GIB, GIB, 0), "pod": (2 * GIB, GIB, 0)}, GIB),
        ({"pod/canaryd": (GIB, 2 * GIB, 0)}, 0),  # over its limit, which may have been lowered
    ],
)
def test_the_least_of_host_and_control_groups_counts(tmp_path, groups, expected):
    """Files that nobody uses count as free, in a group as on the host."""
    plant(
        tmp_path / "proc",
        {"meminfo": "MemTotal: 1 kB\nMemAvailable:   16777216 kB\n", "self/cgroup": "0::/pod/canaryd\n"},
    )
    for group, (limit, used, cached) in groups.items():
        files = {
            "memory.max": str(limit),
            "memory.current": str(used),
            "memory.stat": f"anon 1\ninactive_file {cached}\n",
        }
        plant(tmp_path / "cgroup" / group, files)
    assert available(tmp_path / "cgroup", tmp_path / "proc") == expected


def test_the_memory_of_a_gpu_is_none_of_the_hosts(tmp_path):
    """Grace Hopper: the kernel counts a node without processors as available memory, and it is the GPU's."""
    plant(tmp_path / "proc", {"meminfo": "MemAvailable: 100000 kB\n"})
    nodes = tmp_path / "nodes"
    for name, cores, free in (("node0", "0-71", 60000), ("node1", "", 30000)):
        told = f"Node 0 MemFree: {free} kB\nNode 0 FilePages: 4000 kB\n"
        plant(nodes / name, {"cpulist": f"{cores}\n", "meminfo": told})
    assert of_host(tmp_path / "proc/meminfo", nodes) == 66000 << 10
    assert available(tmp_path / "cgroup", tmp_path / "proc", nodes) == 66000 << 10


@pytest.mark.parametrize(("memory", "together"), [("256MiB", 3), ("1024GiB", 1)])
def test_a_check_tests_accelerators_side_by_side(tmp_path, memory, together):
    """The processor first and alone, then three GPUs at once; one after another where memory is short."""
    plant(tmp_path / "site", TORCH)
    (tmp_path / "seen").write_text(",".join(f"GPU-00000000-0000-4000-8000-00000000000{n}" for n in range(3)))
    env = {"PYTHONPATH": str(tmp_path / "site"), "TORCH_STAND_IN": str(tmp_path / "seen")}
    each = {"records": {"settings": {"log": str(tmp_path / "log"), "seconds": 3.0 if together > 1 else 0.2}}}
    worker = {"python": bare_python(), "env": env}
    config = configure(tmp_path, "records", each=each, worker=worker, budget={"memory": memory})
    probe = tmp_path / "probes.d/records.py"
    probe.write_text(probe.read_text().replace("numeric=False", "numeric=True"))
    done = canaryd("check", "--config", config, "--state-dir", tmp_path / "state", "--json")
    assert len(done.document["devices"]) == 4, done.err
    assert "waiting" not in done.err
    words = re.findall(r"^(begin|end) (\d+)", (tmp_path / "log").read_text(), re.MULTILINE)
    assert len(words) == 8
    assert words[0][1] == words[1][1], "the processor is alone"
    inside, most = set(), 0
    for word, pid in words:
        inside = inside | {pid} if word == "begin" else inside - {pid}
        most = max(most, len(inside))
    assert most == together
