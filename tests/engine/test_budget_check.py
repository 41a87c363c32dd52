"""The budget in `canaryd check` and `canaryd drill`: kept on a GPU that another process uses, and told."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path

import jsonschema
import pytest

from canaryd.engine.budget import NICE
from canaryd.model import Outcome
from canaryd.store.store import Store
from tests.cards_stand_in import Cards
from tests.command import ROOT, Answer, canaryd, configure
from tests.engine.budgets import GIB, PROBE, told
from tests.nvml_stand_in import StandIn

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(
        importlib.util.find_spec("pynvml") is None, reason="nvidia-ml-py is not installed in this interpreter"
    ),
]
MIB = 1 << 20
TOTAL = 143_771
"""MiB of the memory of an H200."""
SCHEMA = json.loads((ROOT / "docs/check.schema.json").read_text())


FREE, LISTED, UNLISTED, FULL, CLOSED = range(5)
"""GPUs: in use by nobody, by a process that the driver lists, by one that no container sees; two that a server uses and
that the budget does not admit: with too little free memory, and with a compute mode that prohibits a test."""
WHOLE = (0, os.getpriority(os.PRIO_PROCESS, 0))
"""Memory that a test was given, 0 for all, and its nice level."""
WITHIN = (GIB, max(NICE, WHOLE[1]))


class Served:
    """A machine with a processor and five GPUs."""

    def __init__(self, directory: Path) -> None:
        self.machine, cards = StandIn(directory, 5), Cards(directory, 5)
        self.state = directory / "state"
        for gpu, mebibytes, processes in (
            (FREE, 100, ""),
            (LISTED, 20, "4999999:none,4999998:none"),
            (UNLISTED, 400, ""),
            (FULL, TOTAL - 551 - 1000, "4999999:94371840000"),
            (CLOSED, 90_000, "4999999:94371840000"),
        ):
            self.machine.set(gpu, "memory_total", TOTAL * MIB)
            self.machine.set(gpu, "memory_reserved", 551 * MIB)  # what the driver keeps of an H200
            self.machine.set(gpu, "memory_used", (551 + mebibytes) * MIB)
            self.machine.set(gpu, "processes", processes)
        self.machine.set(CLOSED, "compute_mode", 2)
        sysfs = directory / "sys"
        sysfs.mkdir()
        each = {"nvidia_telemetry": {"settings": {"sysfs": str(sysfs)}}}
        self.config = configure(directory, each=each, worker={"python": sys.executable, "env": dict(cards.environment)})
        probe = directory / "probes.d/computes.py"
        probe.write_text(PROBE)
        probe.chmod(0o644)

    def run(self, *command: object) -> Answer:
        where = ("--config", self.config, "--state-dir", self.state)
        return canaryd(*command, *where, timeout=600, **self.machine.environment)

    def limits(self) -> dict[str, tuple[object, object]]:
        """Return what the newest test of each device was given."""
        with Store.open(self.state) as store:
            names = {r.device.uuid: r.device.name for r in store.devices()}
            every = (*store.runs(probe="computes"), *store.drills.runs(probe="computes"))
            runs = [r for r in every if r.outcome is Outcome.COMPLETED]
        said = {names[r.device]: told(r) for r in sorted(runs, key=lambda r: r.started)}
        return {name: (readings["room"], readings["nice"]) for name, readings in said.items()}


def by_name(document) -> dict[str, dict]:
    jsonschema.validate(document, SCHEMA)
    return {f"{d['backend']}:{d['index']}": d for d in document["devices"]}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """One check of that machine: (machine, text, devices of the document by name, document)."""
    machine = Served(tmp_path_factory.mktemp("served"))
    report = machine.state.parent / "report.json"
    answer = machine.run("check", "--report", report)
    assert answer.code == 3, answer.out
    document = json.loads(report.read_text())
    return machine, " ".join(answer.out.split()), by_name(document), document


def test_a_check_beside_a_server_keeps_the_budget(served):
    """Memory, pauses and priority on GPUs that are in use; a free one and the processor are tested as ever."""
    machine, _, devices, _ = served
    assert machine.limits() == {"cpu:0": WHOLE, "cuda:0": WHOLE, "cuda:1": WITHIN, "cuda:2": WITHIN}
    assert {name for name, d in devices.items() if d["state"] == "healthy"} == {"cpu:0", "cuda:0", "cuda:1", "cuda:2"}
    seconds = {name: sum(run["seconds"] for run in d["runs"]) for name, d in devices.items()}
    assert seconds["cuda:1"] > 2 * 0.3  # a budget of 0.3 s, and pauses


def test_it_says_on_which_devices_and_why(served):
    """In one line of text each and in the document, with the way to lift it; nothing where nothing was kept."""
    _, text, devices, document = served
    said = {name: d["shared"] for name, d in devices.items() if d["shared"]}
    kept = "so the tests kept to the budget: at most 1,024 MiB of its memory, pauses, low priority; where no server"
    assert said["cuda:1"].startswith(f"2 processes compute on it, {kept}")
    assert said["cuda:2"].startswith(f"400 MiB of its memory are in use, {kept}")
    assert set(said) == {"cuda:1", "cuda:2", "cuda:3", "cuda:4"}
    for name, sentence in said.items():
        assert f"{name}: {sentence.partition(' type ')[0]}" in text
    assert text.count("--drained") == len(said)
    assert any("other processes use cuda:1, cuda:2, cuda:3, cuda:4" in gap for gap in document["not_checked"])


def test_where_the_budget_does_not_fit_nothing_runs(served):
    """No worker opens a context where a server has left too little memory; the GPU is unknown, never healthy."""
    _, _, devices, _ = served
    for gpu, why in (
        (FULL, "1,000 MiB of memory free, 1,024 MiB needed"),
        (CLOSED, "the compute mode prohibits computing"),
    ):
        device = devices[f"cuda:{gpu}"]
        (finding,) = [f for f in device["findings"] if f["rule"] == "not-examined"]
        assert f"1 process computes on it; {why}" in finding["message"]
        assert (device["state"], device["runs"]) == ("unknown", [])


def test_a_drill_keeps_the_budget_until_somebody_says_that_a_gpu_is_drained(served):
    """With `--drained`, here of a check of one probe, tests take what they want."""
    machine, *_ = served
    card = ("--probe", "computes", "--device", f"cuda:{UNLISTED}")
    machine.run("drill", *card)
    assert machine.limits()["cuda:2"] == WITHIN
    busy = ("--device", f"cuda:{LISTED}", "--device", f"cuda:{FULL}")
    drained = machine.run("check", "--json", "--probe", "computes", "--drained", *busy)
    assert drained.code == 0, drained.out
    assert {d["shared"] for d in by_name(drained.document).values()} == {""}
    assert {machine.limits()[f"cuda:{gpu}"] for gpu in (LISTED, FULL)} == {WHOLE}
