"""Servers that mean harm: each answer is one clear sentence, in time, in bounded memory, and tells no secret."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import gc
import json
import re
import shutil
import sqlite3
import tarfile
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from canaryd.codec import to_json
from canaryd.config import load
from canaryd.config.settings import EndpointsConfig
from canaryd.engine import schedule
from canaryd.engine.engine import Engine
from canaryd.model import Outcome, Run, State
from canaryd.store.store import Store
from canaryd.worker.limits import ENDPOINT_MEMORY
from tests.command import Daemon, canaryd, configure, in_turn, running, soon
from tests.hostile import CASES, ECHOES, KEY, serving
from tests.pki import Authority

TIMEOUT = 2.0
"""Seconds for a request."""
GROWTH = 5 << 20
"""Bytes by which the daemon's side may grow while a server is asked."""
PROMPTS = {"prompts": [{"name": "reef", "text": "A diver sank slowly towards the reef. " * 3, "tokens": 64}]}


def written(directory: Path, *names: str, addresses: dict[str, str]) -> Path:
    """Write a configuration with one endpoint for each name."""
    key, prompts = directory / "key", directory / "prompts.json"
    key.write_text(KEY)
    key.chmod(0o600)
    prompts.write_text(json.dumps(PROMPTS))
    same = {"key_file": str(key), "prompts": str(prompts), "apis": ["completions"], "timeout": f"{TIMEOUT:g}s"}
    same["ca_file"] = str(directory / "ca.crt")
    return configure(
        directory,
        each={"endpoint_canary": {"enabled": True}},
        endpoints={name: {"url": addresses[name], **same} for name in names},
        state_dir=str(directory / "state"),
    )


class Fleet:
    """Every hostile server, and an engine that asks them."""

    def __init__(self, directory: Path, addresses: dict[str, str]) -> None:
        self.directory, self.addresses = directory, addresses
        self._all = load.load(written(directory, *CASES, *ECHOES, addresses=addresses))
        self.engine = Engine(self._all, Store.open(self._all.state_dir))
        self.engine.discover()
        self._devices = dict(self.engine.devices)

    def ask(self, name: str) -> tuple[list[Run], State]:
        """Run the canary once on a node with this endpoint alone; return its runs and the verdict."""
        engine, uuid = self.engine, f"endpoint:{name}"
        alone = EndpointsConfig(each={name: self._all.endpoints.each[name]})
        engine.config = dataclasses.replace(self._all, endpoints=alone)
        engine.devices.clear()
        engine.devices.update({u: d for u, d in self._devices.items() if u == uuid or d.computes_here})
        entries = [engine.entries["endpoint_canary"]]
        (plan,) = schedule.plan_round(engine.devices[uuid], entries, levels=engine.levels("quick"), seed=7, sets=("",))
        return engine.carry_out(plan), engine.verdict(uuid).state


@pytest.fixture(scope="module")
def fleet(tmp_path_factory) -> Iterator[Fleet]:
    directory = tmp_path_factory.mktemp("hostile")
    known, alien = Authority(directory), Authority(directory, "stranger")
    known.issue("other", sans="DNS:elsewhere.example")
    known.issue("old", days=-1)
    alien.issue("alien")
    with serving(directory) as addresses:
        found = Fleet(directory, addresses)
        found.ask("null")  # what is loaded with the first run is no growth
        found.ask("in_texts")
        gc.collect()
        gc.freeze()  # what is there before the first test is no garbage; `Watch` would go through it each time
        yield found
        gc.unfreeze()


def of_status(pid: int | str, name: str) -> int:
    """Return a size of a process in bytes, 0 where it has gone."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return 0


class Watch:
    """The most memory that this process and its workers take, in bytes."""

    def __init__(self) -> None:
        gc.collect()
        self._before, self.worker, self.growth = of_status("self", "VmRSS"), 0, 0
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far: proc(5)

    def look(self, over: threading.Event) -> None:
        """Look until `over`, every 20 ms."""
        while not over.wait(0.02):
            self.growth = of_status("self", "VmHWM") - self._before
            for task in Path("/proc/self/task").iterdir():
                with contextlib.suppress(OSError):
                    for pid in (task / "children").read_text().split():
                        if b"canaryd/worker" in Path(f"/proc/{pid}/cmdline").read_bytes():
                            self.worker = max(self.worker, of_status(pid, "VmHWM"))


@contextlib.contextmanager
def watching() -> Iterator[Watch]:
    """Watch the memory within a block."""
    watch, over = Watch(), threading.Event()
    thread = threading.Thread(target=watch.look, args=(over,))
    thread.start()
    try:
        yield watch
    finally:
        over.set()
        thread.join()


def leaks(data: str) -> list[str]:
    """Return in which of the spellings that docs/security.md names the key stands in `data`."""
    spelled = {KEY, "".join(f"%{ord(c):02x}" for c in KEY), "".join(f"%{ord(c):02X}" for c in KEY)}
    spelled |= {base64.b64encode(b" " * n + KEY.encode()).decode()[4:-4] for n in range(3)}
    return sorted(one for one in spelled if one in data)


def contents(directory: Path) -> Iterator[str]:
    """Yield every text of the files below a directory, of archives and of a database's compressed columns too."""
    for file in directory.rglob("*"):
        if not file.is_file() or file.name == "key":
            continue
        yield file.read_bytes().decode("latin-1")
        if ".tar" in file.name:
            with tarfile.open(file) as archive:
                yield from (archive.extractfile(m).read().decode("latin-1") for m in archive if m.isfile())
        if file.name == "canaryd.db":
            with contextlib.closing(sqlite3.connect(file)) as database:
                for (table,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
                    for value in (value for row in database.execute(f"SELECT * FROM {table}") for value in row):
                        with contextlib.suppress(zlib.error):
                            yield zlib.decompress(value).decode() if isinstance(value, bytes) else str(value)


def told(fleet: Fleet, runs: list[Run]) -> str:
    """Return everything that is kept of runs: themselves, and the record."""
    return "\n".join([json.dumps(to_json(runs), ensure_ascii=False), *contents(fleet.directory / "state")])


def named(name: str, *, again: bool) -> Any:
    """Return a case; one that is only another of its kind is left to the long gate."""
    return pytest.param(name, marks=pytest.mark.slow) if again else name


MESSAGES = [message for _, message in CASES.values()]
AGAIN = {name: MESSAGES.index(message) != number for number, (name, (_, message)) in enumerate(CASES.items())}
"""Case → whether canaryd says of it what it said of one before."""


def test_there_are_enough_of_them():
    """Fewer would be easier."""
    assert len(CASES) >= 55


@pytest.mark.parametrize("name", [named(name, again=rest) for name, rest in AGAIN.items()])
def test_a_hostile_answer_is_one_clear_sentence(fleet, name):
    """In time, `unknown`, without the key, in a worker below its limit, and the daemon's side stays as it is."""
    with watching() as watch:
        (run,), state = fleet.ask(name)
    assert (run.outcome, state) == (Outcome.SKIPPED, State.UNKNOWN), run.detail
    assert re.search(CASES[name][1], run.detail), run.detail
    assert run.detail.isprintable()
    assert len(run.detail) < 600
    assert run.seconds <= soon(1.5 * TIMEOUT)
    assert 0 < watch.worker < ENDPOINT_MEMORY
    assert watch.growth <= GROWTH
    assert leaks(told(fleet, [run])) == []


@pytest.mark.parametrize("name", [named(name, again=name.startswith("in_")) for name in ECHOES])
def test_an_answer_with_the_key_is_told_without_it(fleet, name):
    """The answer is recorded, the key is not."""
    with watching() as watch:
        runs, _ = fleet.ask(name)
    assert all(run.recordings and run.outcome is Outcome.COMPLETED for run in runs), [run.detail for run in runs]
    assert 0 < watch.worker < ENDPOINT_MEMORY
    assert watch.growth <= GROWTH
    assert leaks(told(fleet, runs)) == []


def test_the_key_is_told_nowhere(fleet, tmp_path):
    """Not on a terminal, in a document, a log, a metric, a page, a dossier, an export, or a file of the record.

    By the echoes in every spelling and field; those that are long besides are asked in the test above.
    """
    shutil.copy(fleet.directory / "ca.crt", tmp_path)
    names = (*(name for name in ECHOES if name.startswith("in_")), "refuses_the_key", "sends_away", "repeats_all")
    path = written(tmp_path, *names, addresses=fleet.addresses)
    common = ("--config", path, "--state-dir", tmp_path / "state")
    chosen = [word for name in names for word in ("--device", f"endpoint:{name}")]
    found = [canaryd("check", "--json", "--report", tmp_path / "report.json", *chosen, *common)]
    assert len(found[0].document["devices"]) == len(names)
    with running(Daemon(path, tmp_path / "state")) as daemon:
        daemon.line("endpoint_canary", 60.0)
        pages = [daemon.get(page)[1] for page in ("/", "/metrics")]
        typed = [
            *(("report", f"endpoint:{n}", "-o", tmp_path / "dossiers" / n) for n in ("in_texts", "repeats_all")),
            *(("status",), ("status", "--json"), ("history", "--json"), ("baseline", "list"), ("baseline", "export")),
        ]
        found += in_turn(*((*command, *common) for command in typed))
        daemon.end()
    told = [
        "\n".join(daemon.lines),
        *pages,
        *(answer.out + answer.err for answer in found),
        *contents(tmp_path),
    ]
    assert {"canaryd.db", "report.json"} <= {file.name for file in tmp_path.rglob("*")}
    assert any(tmp_path.rglob("*.tar*"))
    assert "Your key is" in found[-1].out
    assert leaks("\n".join(told)) == []
