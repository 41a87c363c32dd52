"""Groups of processes on cores, joined by gloo: clean links are clean, a wrong one is named, and nothing is left."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from canaryd.facts import Comparison, Culprit, Place, Reading, Way
from canaryd.probe import Context, NoCase, Skip
from canaryd.worker.links import group
from canaryd.worker.links.group import End, Group, steps_of
from canaryd.worker.numeric.stack import cpu
from canaryd.worker.numeric.tensors import visible_cores

torch = pytest.importorskip("torch", reason="the numeric worker is tested where torch is installed")
pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this torch has no gloo"),
]

ROOT = Path(__file__).resolve().parents[3]
FORMATS = ("int64", "float32", "bfloat16")
WORDS = 1 << 10


def ends(count):
    """Return so many processes on the cores that there are."""
    cores = visible_cores()
    return [End(f"core {n}", n, cpu(), cores[n % len(cores)]) for n in range(count)]


def sent(monkeypatch, *cases, drill="", seed=7, count=3):
    """The comparisons of a run over so many ends: (wrong, right), and its readings by name.

    Three are enough to tell a link from its ends.
    """
    monkeypatch.setattr(group, "ends_of", lambda _: ends(count))
    ctx = Context(device=cpu(), level="quick", seed=seed, budget=1e-9, cases=cases, drill=drill)
    facts = list(group.send_around(ctx, WORDS, FORMATS))
    found = [f for f in facts if isinstance(f, Comparison)]
    readings = [f for f in facts if isinstance(f, Reading)]
    return [c for c in found if c.wrong], [c for c in found if not c.wrong], readings


def left_over():
    """Processes of groups that this one has started."""
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
    pids = children.read_text().split() if children.exists() else []
    return [pid for pid in pids if b"--member" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def test_clean_links_are_clean(monkeypatch):
    """Every pattern over every link in both directions, gathered by all, and sums in every format."""
    wrong, right, readings = sent(monkeypatch)
    assert wrong == []
    links = {c.place for c in right if len(c.place.numbers) == 2}
    assert links == {Place(unit="link", numbers=(a, b)) for a in range(3) for b in range(3) if a != b}
    cases = {c.case.partition("@")[0] for c in right}
    assert {f"{name}/random/all-reduce" for name in FORMATS} < cases
    assert len(cases) == 4 + len(FORMATS) + 4
    told = {r.name: r.value for r in readings}
    assert told["trials"] == sum(c.trials for c in right) == 6 * 4 + 3 * (4 + len(FORMATS))
    assert {tuple(r.labels.values()) for r in readings if r.name == "core_link_speed"} == {
        (f"core {a}", f"core {b}") for a in range(3) for b in range(3) if a != b
    }
    assert left_over() == []


@pytest.mark.parametrize("seed", [7, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (8, 9))])
def test_a_corrupted_pair_is_named(monkeypatch, seed):
    """One link in one direction: all wrong transfers are of it, and so are the operations of all that it spoilt."""
    wrong, right, _ = sent(monkeypatch, drill="flip", seed=seed)
    (place,) = {c.place for c in wrong}
    assert len(place.numbers) == 2
    ways = {c.case.split("/")[2].partition("@")[0] for c in wrong}
    assert ways == {"send", "all-gather", "all-reduce"}
    for c in wrong:
        assert c.evidence.transfer.culprit is Culprit.TRANSFER
        assert c.evidence.transfer.way is (Way.BETWEEN if "/send" in c.case else Way.TOGETHER)
        assert c.evidence.bits == {"11": 1}
    assert [c.evidence.repeats_wrong for c in wrong[:3]] == [3, 3, 3]
    assert len({c.place for c in right if len(c.place.numbers) == 2}) == 5
    assert left_over() == []


def test_a_confirmation_sends_only_its_case(monkeypatch):
    """Over all links, because the others show whether the data or the link is wrong."""
    _, right, _ = sent(monkeypatch, "int64/walking/send@65536", count=2)
    assert {c.case for c in right} == {f"int64/walking/send@{WORDS}"}
    assert [c.place.numbers for c in right] == [(0, 1), (1, 0)]
    with pytest.raises(NoCase, match="no case matches int64/nonsense"):
        sent(monkeypatch, "int64/nonsense")


def test_a_group_that_would_take_more_memory_than_there_is_does_not_start(monkeypatch):
    """Eight devices in a container of 8 GiB beside a server: skipped with the reason, and no process is started."""
    monkeypatch.setattr(group, "available", lambda: 500 << 20)
    with pytest.raises(Skip, match="3 processes need 864 MiB of memory, and 500 MiB are available"):
        sent(monkeypatch)
    assert left_over() == []


def test_a_member_that_dies_ends_the_run_and_all_others():
    """The error names it, and no process is left."""
    with Group(ends(2), 1, WORDS, None) as members:
        members._members[1].kill()
        with pytest.raises(RuntimeError, match=r"core [01]"):
            members.do(steps_of(2, FORMATS))
    assert left_over() == []


def test_a_member_that_hangs_is_named(monkeypatch):
    """Neither a link nor a device may hold the worker longer than its steps may take."""
    with Group(ends(3), 1, WORDS, None) as members:
        members._members[1].send_signal(signal.SIGSTOP)
        monkeypatch.setattr(group, "STEP", 0.5)
        with pytest.raises(RuntimeError, match="no answer from core 1 within 1 s"):
            members.do([("send", "walking", 0, 2)])
    assert left_over() == []


def test_members_end_with_the_worker_that_started_them():
    """Also when it is killed alone, in the middle of a step: each watches its standard input."""
    code = (
        "import sys, time\n"
        "from tests.worker.links.test_group import ends, WORDS\n"
        "from canaryd.worker.links.group import Group\n"
        "with Group(ends(2), 1, WORDS, None) as members:\n"
        "    print(*[m.pid for m in members._members], flush=True)\n"
        "    time.sleep(60)\n"
    )
    argv = [sys.executable, "-c", code]
    with subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True) as worker:
        pids = worker.stdout.readline().split()
        assert len(pids) == 2
        worker.kill()
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
