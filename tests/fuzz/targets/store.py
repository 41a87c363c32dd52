"""What lies in the database and in files of baselines: rows that rotted or were written by somebody else.

The store never raises over a row: it passes it over and says so, and what it does give back is plain data. The judge
calls no device healthy for a row that cannot be read. An import of baselines is refused whole with one printable line,
or taken whole, and what is exported is what was imported.
"""
# ruff: noqa: PT017  a refusal is examined where it is caught: most inputs are none

from __future__ import annotations

import json
import time
import zlib
from pathlib import Path
from typing import Any

from canaryd.cli import baseline
from canaryd.cli.baseline import Selection
from canaryd.codec import from_json, to_json
from canaryd.config.judge_policy import JudgePolicy
from canaryd.facts import Comparison, Exactness, LogRecord, Recording
from canaryd.judge.acks import heeded, standing
from canaryd.judge.case import Case
from canaryd.judge.characterised import Met
from canaryd.judge.node import node
from canaryd.judge.recordings.baseline import empty_baseline, learn
from canaryd.judge.slower import Day
from canaryd.judge.verdict import decide
from canaryd.model import Ack, Cause, Device, Event, Finding, Outcome, Rival, Run, State, Verdict
from canaryd.store.store import Store
from tests.fuzz.material import Choices, dumps, modes, seed, stretched, warped
from tests.fuzz.properties import in_time, one_line, plain, scratch

NOW = time.time()
DEVICE = Device(uuid="GPU-1", backend="cuda", index=0, model="H200", detail={"serial": "1"})
RECORDING = Recording(case="gemm/prefill", digest="a" * 16, chain={"dtype": "bf16"}, values=(1.0, None), text="x")
RUN = Run(
    id="r1",
    device=DEVICE.uuid,
    probe="exact_matmul",
    probe_version=1,
    started=NOW - 60,
    seconds=1.0,
    outcome=Outcome.COMPLETED,
    comparisons=(Comparison(case="float32", shape="M=1", seed=1, exactness=Exactness.UNIVERSAL, trials=4),),
    recordings=(RECORDING,),
    stack={"torch": "2.13"},
)
BASELINE = learn(learn(empty_baseline(RUN, RECORDING), RUN, RECORDING), RUN, RECORDING)
VERDICT = Verdict(
    device=DEVICE.uuid,
    state=State.SUSPECT,
    cause=Cause.HARDWARE,
    findings=(
        Finding(rule="r", state=State.SUSPECT, cause=Cause.HARDWARE, message="m",
                rivals=(Rival(cause=Cause.SOFTWARE, why="w", rejected=True),)),
    ),
    decided=NOW,
    since=NOW - 60,
)  # fmt: skip
ACK = Ack(device=DEVICE.uuid, kind="acknowledged", at=NOW - 50, reason="known", until=NOW + 1000, rules=("r",))
MET = Met(
    device=DEVICE.uuid,
    kind=DEVICE.kind,
    probe="exact_matmul",
    probe_version=1,
    stack={"torch": "2.13"},
    classes={"a/b": NOW},
    accepted={"a/c": "shown"},
    used=NOW,
)
DAY = Day(device=DEVICE.uuid, day=int(NOW // 86400) - 1, levels=())
EVENT = Event(device=DEVICE.uuid, kind="xid", name="31", code=31, first=NOW - 9, last=NOW - 9)
LINE = LogRecord(boot="b", sequence=1, at=NOW, kind="xid", name="31")
SOUND = (DEVICE, RUN, BASELINE, VERDICT, ACK, EVENT, LINE)


def _decoded(data: bytes) -> None:
    """The one codec: a value of the type, which goes back to the same JSON, or `ValueError`."""
    choices = Choices(data)
    sound = choices.of(SOUND)
    try:
        document = json.loads(dumps(warped(to_json(sound), choices)))
    except (ValueError, RecursionError):
        return
    try:
        found = from_json(type(sound), document)
    except ValueError as error:
        assert str(error)
        return
    again = to_json(found)
    assert from_json(type(sound), again) == found or found != found  # noqa: PLR0124  NaN is not itself
    json.dumps(again)


_stores: list[Store] = []


def _store() -> Store:
    if not _stores:
        _stores.append(Store.open(Path("/proc/nonexistent")))  # no such place: it works from memory
    return _stores[0]


def _rows(data: bytes) -> None:
    """Rows of every table, with a body that rotted before or after it was packed."""
    choices = Choices(data)
    store = _store()
    db = store._copy
    assert db is not None
    for table in ("runs", "devices", "verdicts", "baselines", "acks", "days", "met"):
        db.execute(f"DELETE FROM {table}")
    store.said.clear()
    store.add_run(RUN)
    store.see_device(DEVICE, NOW)
    store.set_verdict(VERDICT)
    store.add_day(DAY)
    store.set_baselines([BASELINE])
    store.add_ack(ACK)
    store.set_met([MET])
    kinds: dict[str, Any] = {
        "runs": RUN, "devices": DEVICE, "verdicts": VERDICT, "baselines": BASELINE, "acks": ACK, "days": DAY,
        "met": MET,
    }  # fmt: skip
    table = choices.of(list(kinds))
    body = zlib.compress(dumps(warped(to_json(kinds[table]), choices)).encode())
    if not choices.below(4):
        body = stretched(choices.rest()) or b"x"
    db.execute(f"UPDATE {table} SET body = ?", (body,))
    with in_time(len(body)):
        runs, devices = store.runs(), store.devices()
        verdicts, histories = store.verdicts(), store.verdict_history(DEVICE.uuid)
        known, words, days, met = store.baselines(), store.acks(), store.days(DEVICE.uuid), store.met()
    for value in (
        *runs,
        *known,
        *words,
        *days,
        *met,
        *verdicts.values(),
        *histories,
        *(record.device for record in devices),
    ):
        plain(value)
    if not (runs and verdicts and histories and devices and known and words and days and met):
        assert store.problems, f"a row of {table} is gone without a word"
    for problem in store.problems:
        assert problem
    counted = heeded(words, NOW)
    standing(DEVICE, counted, NOW)
    if table == "runs":
        among = node({DEVICE.uuid: DEVICE}, {DEVICE.uuid: runs}, NOW)
        verdict = decide(
            Case(device=DEVICE, node=among, wanted={"exact_matmul": 1800.0}, policy=JudgePolicy(), now=NOW)
        )
        plain(verdict)
        assert runs or verdict.state is not State.HEALTHY
        assert verdict.state is not State.HEALTHY or any(c.trials > 0 for run in runs for c in run.comparisons)


EXPORTED = {
    "schema": baseline.SCHEMA, "baselines": [{"backend": "cuda", "model": "H200", **to_json(BASELINE)}],
    "met": [to_json(MET)],
}  # fmt: skip


def _imported(data: bytes) -> None:
    choices = Choices(data)
    text = choices.rest().decode("utf-8", "replace") if choices.flag() else dumps(warped(EXPORTED, choices))
    store = _store()
    assert store._copy is not None
    for table in ("baselines", "met", "devices"):
        store._copy.execute(f"DELETE FROM {table}")
    if choices.flag():
        store.see_device(DEVICE, NOW)
    with in_time(len(text)):
        try:
            fresh, known = baseline.import_document(store, text)
        except ValueError as error:
            one_line(str(error))
            assert not [*store.baselines(), *store.met()], "refused, and yet something was taken"
            return
    assert fresh + known == len(json.loads(text)["baselines"])
    taken = baseline.chosen(store, Selection())
    assert fresh >= len(taken)
    for one in taken:
        plain(one.baseline)
        assert one.witness
    for line in baseline.table(taken).split("\n"):
        assert line.isprintable(), line[:200]
    met = baseline.met_by(store, Selection())
    for record in met:
        plain(record)
    document = json.dumps(baseline.document(taken, met), allow_nan=False)
    assert baseline.import_document(store, document) == (0, len(taken))


def _damaged(data: bytes) -> None:
    """A database file of any bytes is set aside, and the store goes on."""
    with scratch.fresh() as place:
        (place / "canaryd.db").write_bytes(stretched(data))
        with Store.open(place) as store:
            assert store.runs() == []
            store.add_run(RUN)
            assert store.runs() == [RUN]
            for problem in store.problems:
                assert problem.isprintable(), problem


target = modes(_decoded, _rows, _imported, _damaged)


def seeds() -> list[bytes]:
    return [
        *(seed(mode, bytes(range(n, n + 60))) for mode in (0, 1, 2) for n in range(0, 190, 10)),
        seed(2, b"\1" + json.dumps(EXPORTED).encode()),
        seed(3, b"SQLite format 3\0" + bytes(84)),
        seed(3, b""),
    ]
