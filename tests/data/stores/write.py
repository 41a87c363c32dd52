"""Writes a store with the canaryd that is imported, and prints it as SQL: how the files beside this one came to be.

`git archive TAG canaryd | tar x -C OLD` and `PYTHONPATH=OLD python tests/data/stores/write.py > release-N.sql`, with
TAG 7a46600 for release 0.1.0. A body is JSON under zlib.
"""

import contextlib
import dataclasses
import sqlite3
import sys
import tempfile
from pathlib import Path

from canaryd import model

try:
    from canaryd import facts
    from canaryd.judge.recordings.intake import intake
    from canaryd.store.store import Store
except ImportError:  # 0.1.0
    facts = model
    from canaryd.recorded import intake

    from canaryd.store import Store

NOW = 1_790_000_000.0
UUID = "GPU-1"
TEXTS = not hasattr(facts, "Place")
"""Whether facts stood in sentences, as up to release 0.1.0."""


def run(name, at=NOW, *, wrong=False, **fields):
    """Return a run that compared something."""
    evidence = facts.Evidence(
        wrong=1,
        total=64,
        first=(((3, 5), "3f80", "3f81"),),
        bits={"0": 1},
        zeroed=0,
        nonfinite=0,
        lines={"row": "3", "column": "= 1 mod 16", "head": "0…31 (32 distinct)"} if TEXTS else {},
        pattern="one element",
        **({"reproduced": "2 of 3 fresh uploads wrong, 2 with the same bits in the same elements"} if TEXTS else {}),
    )
    comparison = facts.Comparison(
        case="bfloat16/cancel",
        shape="M=8 N=8 K=8",
        seed=7,
        exactness=facts.Exactness.UNIVERSAL,
        trials=4,
        wrong_trials=int(wrong),
        evidence=evidence if wrong else None,
        **({"place": "core 3"} if TEXTS else {}),
    )
    default = {"device": UUID, "probe": "exact_matmul", "probe_version": 1, "seconds": 1.5}
    default |= {"outcome": model.Outcome.COMPLETED, "comparisons": (comparison,), "stack": {"torch": "2.13"}}
    return model.Run(id=name, started=at, **{**default, **fields})


def verdict(state, cause, at, *findings, drill=False):
    """Return a verdict on the one device."""
    return model.Verdict(device=UUID, state=state, cause=cause, findings=findings, decided=at, since=at, drill=drill)


def fill_texts(store):
    """Write the facts that release 0.1.0 told in sentences only."""
    host = {"subject": facts.Subject.HOST, "wrong_trials": 1}
    (compared,) = run("x", wrong=True).comparisons
    texts = {
        "cores 2 and 5": "the host made operands or golden twice, unlike: row 3",
        "core 4 alone": "the host made operands or golden twice, unlike",
        "core 6": "golden has digest 00ff, the one made elsewhere and shipped is 11ee",
        "core 7": "integer and float64 arithmetic of the host disagree on the golden",
        "rack 9": "something else",
    }
    for number, (place, text) in enumerate(texts.items()):
        evidence = dataclasses.replace(compared.evidence, wrong=0, first=(), bits={}, lines={}, pattern=text)
        doubt = dataclasses.replace(compared, place=place, evidence=evidence, **host)
        store.add_run(run(f"h{number}", NOW + 5, comparisons=(doubt,)))
    said = {"clock": f"dated by the store: the clock said {NOW - 9:.0f}", "load": "0.5"}
    store.add_run(run("k", NOW + 6, environment=said))
    lost = {"outcome": model.Outcome.SKIPPED, "detail": "GPU is lost: it no longer answers on its bus"}
    store.add_run(run("l", NOW + 7, probe="nvidia_telemetry", comparisons=(), **lost))


def fill(store):
    """Write something of every kind that this canaryd knows."""
    device = model.Device(uuid=UUID, backend="cuda", index=0, model="H100", detail={"serial": "1"})
    store.see_device(device, NOW)
    store.add_run(run("a"))
    store.add_run(run("b", NOW + 1, wrong=True, repro="canaryd check"))
    store.add_run(run("c", NOW + 2, outcome=model.Outcome.CRASHED, comparisons=(), detail="signal 11"))
    store.add_run(run("d", NOW + 3, wrong=True, drill="flip"))
    store.set_verdict(verdict(model.State.HEALTHY, model.Cause.NONE, NOW))
    found = model.Finding(
        rule="exact-mismatch",
        state=model.State.SUSPECT,
        cause=model.Cause.UNDETERMINED,
        message="one element",
        probe="exact_matmul",
        runs=("b",),
    )
    store.set_verdict(verdict(model.State.SUSPECT, model.Cause.UNDETERMINED, NOW + 1, found))
    store.set_verdict(verdict(model.State.SUSPECT, model.Cause.UNDETERMINED, NOW + 3, found, drill=True))
    if TEXTS:
        fill_texts(store)
    event = model.Event(device=UUID, kind="xid", name="31", first=NOW, last=NOW, detail="Xid 31")
    reading = facts.Reading(name="temperature_celsius", value=61, unit="celsius")
    poll = run("p", NOW + 4, probe="nvidia_telemetry", comparisons=(), readings=(reading,))
    store.add_poll(poll, {model.Outcome.COMPLETED: 3}, [event])
    store.set_note("kernel log", "boot:7")
    known = {}
    for number in range(31):
        words = {"tokens": ("one", "two"), "values": (-0.1, -0.2 - number // 30), "text": "one two"}
        digest = f"{16 + number // 30:016x}"
        recording = facts.Recording(case="story", digest=digest, chain={"checkpoint": "c1"}, **words)
        told = run(f"e{number:02}", NOW + 10 + number, probe="canary", comparisons=(), recordings=(recording,))
        told, fresh = intake(told, known, learns=True)
        known |= fresh
        store.set_baselines(fresh.values())
        store.add_run(told)
    store.add_ack(model.Ack(device=UUID, kind="acknowledged", at=NOW, until=NOW + 60, reason="ticket 4711", by="kim"))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        with Store.open(Path(place), now=lambda: NOW) as opened:
            fill(opened)
        with contextlib.closing(sqlite3.connect(Path(place) / "canaryd.db")) as written:
            (version,) = written.execute("PRAGMA user_version").fetchone()
            sys.stdout.write("\n".join((*written.iterdump(), f"PRAGMA user_version = {version};", "")))
