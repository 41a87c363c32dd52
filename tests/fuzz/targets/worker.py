"""The worker's protocol: what the daemon reads of a hostile worker, and what a worker lets a probe say.

`Series` never raises, whatever comes: its answers have the types that they say, runs are plain data that a store takes
and gives back, and a worker that speaks nonsense is nobody's clean run: the judge never calls its device healthy.
What a probe yields and the worker lets through arrives as the same fact.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from canaryd.codec import to_json
from canaryd.config.judge_policy import JudgePolicy
from canaryd.facts import Comparison, Exactness, LogPosition, LogRecord, Reading, Recording, Skipped, whole
from canaryd.judge.case import Case
from canaryd.judge.node import node
from canaryd.judge.verdict import decide
from canaryd.model import Device, Outcome, Run, State
from canaryd.probe import Absent, ProbeSpec
from canaryd.store.store import Store
from canaryd.supervisor import process
from canaryd.supervisor.process import AFTERLIFE, LostError, Worker
from canaryd.supervisor.protocol import RunRequest, WorkerSpec
from canaryd.supervisor.series import Series
from canaryd.supervisor.slot import Slot
from canaryd.worker import runner
from tests.fuzz.material import Choices, dumps, modes, seed, stretched, warped
from tests.fuzz.properties import finite, in_time, plain

DEVICE = Device(uuid="GPU-1", backend="cuda", index=0, model="H200")
SPEC = ProbeSpec(name="exact_matmul", summary="products")
REQUEST = RunRequest(probe_path=Path("/p/exact_matmul.py"), spec=SPEC, device=DEVICE, level="quick", seed=1)
NOW = time.time()
READY = {"kind": "ready", "python": "3.11.2"}
CLEAN = Comparison(case="float32/full", shape="M=1", seed=1, exactness=Exactness.UNIVERSAL, trials=4)
FACTS = (
    Reading(name="trials", value=9, unit="1"),
    CLEAN,
    Recording(case="gemm", digest="00", values=(1.0, None), chain={"dtype": "bf16"}),
    Skipped(case="float16", reason="no such kernel"),
    Absent(name="power_watts", reason="not given"),
)


class Wire(Worker):
    """A worker whose process is one that only sleeps: its end of the protocol is held by the fuzzer.

    Reading, splitting, decoding and deadlines are the real ones; starting and killing a process for each of a million
    inputs is left out (tests/supervisor/test_outcomes.py has real ones).
    """

    _theirs = -1
    """The other end of what the newest worker prints."""

    def __init__(self, said: bytes, *, chunk: int = 1 << 16) -> None:
        started, process._spawn = process._spawn, _sleeping
        try:
            super().__init__(WorkerSpec(python="/nonexistent/python3"), "")
        finally:
            process._spawn = started
        self._selector.unregister(self._pipes[1])  # nobody holds its other end
        self._said, self._chunk = said, chunk

    def send(self, message: Any) -> None:
        """Answer at once: a ping as it wants it, all else with what the fuzzer has to say."""
        if message["op"] == "ping":
            self._split(self._told(json.dumps(READY).encode()))
            return
        said = self._said.replace(b"@ID@", str(message.get("id", "")).encode())
        said = said.replace(b"@NONCE@", self._nonce.encode())
        for at in range(0, len(said), self._chunk):
            self._split(said[at : at + self._chunk])
        self._protocol_ended = time.monotonic() - AFTERLIFE - 1  # it says no more

    def _told(self, body: bytes) -> bytes:
        return self._nonce.encode() + b" " + body + b"\n"

    def _write_later(self) -> None:
        """Nothing is written to a process that only sleeps."""

    def end(self, *, ask: Any, grace: float, afterlife: float) -> bool:
        """Let go of the pipes; the process is for the next input."""
        self._selector.close()
        for pipe in self._pipes:
            pipe.close()
        os.close(self._theirs)
        return True

    def hang_up(self) -> None:
        """It would read the end of its input."""

    def signal(self, number: signal.Signals) -> None:
        """The process is for the next input."""


_process: list[subprocess.Popen[bytes]] = []


def _sleeping(*_: Any, **__: Any) -> subprocess.Popen[bytes]:
    """Return the one process there is, with pipes of its own for this worker."""
    if not _process:
        _process.append(subprocess.Popen(["sleep", "infinity"]))
    process = _process[0]
    (out, Wire._theirs), process.stdin = os.pipe(), Path(os.devnull).open("wb", buffering=0)  # noqa: SIM115
    process.stdout = os.fdopen(out, "rb", buffering=0)
    return process


def stop() -> None:
    """End the process that stood in for all workers."""
    for one in _process:
        one.kill()
        one.wait()
    _process.clear()


class HostileSlot(Slot):
    """A slot whose every worker says the same."""

    def __init__(self, said: bytes, chunk: int) -> None:
        super().__init__(WorkerSpec(python="/nonexistent/python3"), "", 2.0)
        self._given, self._chunk = said, chunk
        self._left = 4

    def ready(self, deadline: float) -> Worker:
        if self._worker is None:
            if not self._left:
                raise LostError(Outcome.ERRORED, "the fuzzer has no more workers")
            self._left -= 1
            self._worker = Wire(self._given, chunk=self._chunk)
        return self._worker


class Hostile(Series):
    """A series whose every worker says the same."""

    def __init__(self, said: bytes, chunk: int) -> None:
        super().__init__(WorkerSpec(python="/nonexistent/python3"))
        self._slot = HostileSlot(said, chunk)


def spoken(*messages: Any) -> bytes:
    """Return messages as a worker with the right nonce would send them."""
    return b"".join(b"@NONCE@ " + dumps(message).encode() + b"\n" for message in messages)


def _asked(what: int, said: bytes, chunk: int) -> None:
    with Hostile(said, chunk) as series, in_time(len(said)):
        if what == 0:
            ran(series.run(REQUEST, 5.0))
        elif what == 1:
            described(series)
        elif what == 2:
            listed(series)
        elif what == 3:
            followed(series)
        else:
            outcome, value, detail = series.answer("capture", {}, 5.0)
            assert isinstance(outcome, Outcome)
            assert isinstance(value, dict)
            assert isinstance(detail, str)
            assert outcome is not Outcome.COMPLETED or value is not None


def ran(run: Run) -> None:
    plain(run)
    finite(run.seconds, 0.0)
    assert run.device == DEVICE.uuid
    assert run.probe == SPEC.name
    for reading in run.readings:
        if not isinstance(reading.value, (str, bool)):
            assert math.isfinite(reading.value), reading
    for comparison in run.comparisons:
        assert 0 <= comparison.wrong_trials <= comparison.trials, comparison
    _stored(run)
    proved = any(c.trials > 0 for c in run.comparisons) and run.outcome is Outcome.COMPLETED
    among = node({DEVICE.uuid: DEVICE}, {DEVICE.uuid: (run,)}, NOW)
    verdict = decide(Case(device=DEVICE, node=among, wanted={SPEC.name: 1800.0}, policy=JudgePolicy(), now=time.time()))
    plain(verdict)
    assert proved or verdict.state is not State.HEALTHY, verdict
    assert not any(c.wrong for c in run.comparisons) or verdict.state is not State.HEALTHY, verdict


_stores: list[Store] = []


def _stored(run: Run) -> None:
    """A store takes it and gives the same back, in memory as on disk."""
    if not _stores:
        _stores.append(Store.open(Path("/proc/nonexistent")))  # no such place: it works from memory
    store = _stores[0]
    store.add_run(run)
    assert store.run(run.id) == run
    assert store._copy is not None
    store._copy.execute("DELETE FROM runs")


def described(series: Series) -> None:
    paths = [Path("/p/a.py"), Path("/p/b.py")]
    found = series.describe(paths, timeout=5.0)
    assert set(found.probes) <= set(paths)  # of what is missing, `catalogue.load` says that nothing was said
    for said in found.probes.values():
        assert isinstance(said, (str, ProbeSpec))
        assert said != ""
        if isinstance(said, ProbeSpec):
            plain(said)
            for seconds in (said.period, said.timeout, *said.budget.values()):
                finite(seconds, 0.0)
    for device in found.devices:
        plain(device)
    plain(dict(found.stack))
    assert all(isinstance(v, str) for v in found.stack.values()), found.stack
    assert found.torch is None or isinstance(found.torch, str)
    assert isinstance(found.torch_reason, str)


def listed(series: Series) -> None:
    names = ("nvidia", "amd", "host")
    found = series.inventory({name: {} for name in names}, timeout=5.0)
    assert set(found.devices) | set(found.unavailable) == set(names)
    assert not set(found.devices) & set(found.unavailable)
    assert set(found.failing) <= set(found.unavailable)
    for devices in found.devices.values():
        for device in devices:
            plain(device)
    for text in (*found.unavailable.values(), *found.problems, *found.facts, *found.facts.values()):
        assert isinstance(text, str)
        text.encode()


def followed(series: Series) -> None:
    batches: list[tuple[list[LogRecord], LogPosition]] = []
    why = series.follow("/dev/kmsg", LogPosition(boot="b", sequence=5), lambda r, p: batches.append((list(r), p)))
    assert isinstance(why, str)
    for records, position in batches:
        plain(position)
        for record in records:
            plain(record)
            finite(record.at)


def _raw(data: bytes) -> None:
    """Any bytes on the descriptor, some behind the right word."""
    choices = Choices(data[:4])
    what, chunk, named = choices.below(5), choices.below(300) + 1, choices.flag()
    said = stretched(data[4:])
    if named:
        said = b"".join(b"@NONCE@ " + line + b"\n" for line in said.split(b"\n"))
    _asked(what, said, max(chunk, len(said) // 50))


TALK: tuple[list[dict[str, Any]], ...] = (
    [
        {"kind": "progress", "id": "@ID@", "fraction": 0.5, "text": "half"},
        {"kind": "readings", "id": "@ID@", "values": [["trials", 9, "1", {}], ["power_watts", "not given"]]},
        *(
            {"kind": "fact", "id": "@ID@", "type": type(fact).__name__, "value": to_json(fact)}
            for fact in FACTS
            if not isinstance(fact, (Reading, Absent))
        ),
        {"kind": "result", "id": "@ID@", "outcome": "completed", "seconds": 1.5, "detail": "",
         "stack": {"torch": "2.13"}, "environment": {"host": "n1"}},
    ],
    [
        {"kind": "imported"},
        {"kind": "probe", "path": "/p/a.py", "spec": to_json(SPEC), "error": None},
        {"kind": "probe", "path": "/p/b.py", "spec": None, "error": "SyntaxError"},
        {"kind": "described", "devices": [to_json(DEVICE)], "stack": {"torch": "2.13"}, "torch": "2.13",
         "torch_reason": None},
    ],
    [
        {"kind": "inventoried", "vendor": "nvidia", "devices": [to_json(DEVICE)], "facts": {"a": "b"},
         "problems": ["p"], "unavailable": "", "here": True},
        {"kind": "inventoried", "vendor": "amd", "devices": [], "facts": {}, "problems": [],
         "unavailable": "not here", "here": False},
        {"kind": "inventoried", "vendor": "host", "devices": [], "facts": {}, "problems": [], "unavailable": "",
         "here": True},
    ],
    [
        {"kind": "record", "value": to_json(LogRecord(boot="b", sequence=7, at=1.0, kind="xid", name="31"))},
        {"kind": "position", "value": to_json(LogPosition(boot="b", sequence=8))},
        {"kind": "followed", "reason": ""},
    ],
    [
        {"kind": "progress", "id": "@ID@", "fraction": 0.5, "text": "half"},
        {"kind": "answered", "id": "@ID@", "outcome": "completed", "value": {"file": "a"}, "detail": ""},
    ],
)  # fmt: skip


def _spoilt(data: bytes) -> None:
    """A conversation that is nearly right."""
    choices = Choices(data)
    what = choices.below(5)
    _asked(what, spoken(*_messages(warped(TALK[what], choices))), choices.below(200) + 20)


def _messages(talk: Any) -> list[Any]:
    return talk if isinstance(talk, list) else [talk]


def _yielded(data: bytes) -> None:
    """A fact that a probe yields: the worker refuses it, or it arrives as it was."""
    choices = Choices(data)
    fact = choices.of(FACTS)
    fields = {name: choices.value() for name in type(fact).__dataclass_fields__ if not choices.below(3)}
    fact = replace(fact, **fields)
    if "@" in repr(fact):
        return  # the harness's own marks
    try:
        if isinstance(fact, (Reading, Absent)):
            sent = {"kind": "readings", "id": "@ID@", "values": [runner._compact(fact)]}
        else:
            sent = {"kind": "fact", "id": "@ID@", "type": type(fact).__name__, "value": runner._plain(fact)}
        body = json.dumps(sent, allow_nan=False)
    except (TypeError, ValueError, AttributeError, RecursionError):
        return  # refused: the run is errored, and its traceback says what was yielded
    done = {"kind": "result", "id": "@ID@", "outcome": "completed", "seconds": 0.0}
    said = b"".join(b"@NONCE@ " + text.encode() + b"\n" for text in (body, json.dumps(done)))
    with Hostile(said, 1 << 16) as series:
        run = series.run(REQUEST, 5.0)
    given = (*run.readings, *run.comparisons, *run.recordings, *run.skipped)
    if isinstance(fact, Absent):
        arrived = run.absent == {whole(fact.name): whole(fact.reason)}
        arrived = arrived and run.codes == ({whole(fact.name): fact.code} if fact.code else {})
    else:
        arrived = len(given) == 1 and to_json(given[0]) == whole(json.loads(json.dumps(to_json(fact))))
    assert arrived or run.outcome is Outcome.GARBLED, (fact, run)


target = modes(_raw, _spoilt, _yielded)


def seeds() -> list[bytes]:
    talks = [b"\n".join(dumps(message).encode() for message in talk) for talk in TALK]
    return [
        *(seed(0, bytes([what, 0, 50, 1]) + talk) for what, talk in enumerate(talks)),
        *(seed(1, bytes([what]) + bytes(range(n, n + 40))) for what in range(5) for n in (0, 60, 120)),
        *(seed(2, bytes(range(n, n + 60))) for n in range(0, 180, 20)),
        seed(0, b"\0\0\x14\0GPU fell off\n"),
    ]
