"""From an injected fault to the dossier."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest

from canaryd.config import load
from canaryd.dossier import advice, write
from canaryd.dossier.document import DossierError
from canaryd.engine.engine import Engine
from canaryd.store.store import Store
from tests.command import canaryd, configure
from tests.dossier.made import GPU, HOUR, NOW, run, written
from tests.nvml_stand_in import StandIn

ONE_CORE = '''
"""Wrong on core 3 alone: one element of its tile, bit 5, in 2 of every 8 results."""

from canaryd.probe import Comparison, Evidence, Exactness, Place, ProbeSpec, Reading, Span

SPEC = ProbeSpec(name="one_core", summary="wrong on one core", numeric=False)
EVIDENCE = Evidence(
    wrong=1, total=4096, first=(((17, 40), "0x3f800000", "0x3f800020"),), bits={"5": 1}, zeroed=0, nonfinite=0,
    lines={"row": Span(first=17, last=17, distinct=1), "column": Span(first=40, last=40, distinct=1)},
    pattern="element [17, 40]: only bit 5 (mantissa) is flipped",
)


def run(ctx):
    yield Reading(name="trials", value=24, unit="1")
    for core in (0, 1, 3):
        yield Comparison(
            case=f"float32/dense/square/{core}", shape="M=64 N=64 K=8", seed=core, exactness=Exactness.UNIVERSAL,
            place=Place(unit="core", numbers=(core,)), trials=8, wrong_trials=2 * (core == 3),
            evidence=EVIDENCE if core == 3 else None,
        )
'''


def test_a_fault_of_one_core_is_named_with_tile_bit_and_rate(tmp_path):
    """A probe that is wrong on core 3, found and confirmed by a real check: the dossier names exactly that."""
    settings = configure(tmp_path)
    (tmp_path / "probes.d/one_core.py").write_text(ONE_CORE)
    (tmp_path / "probes.d/one_core.py").chmod(0o644)
    answer = canaryd("check", "--config", settings, "--state-dir", tmp_path / "state", "--json")
    assert answer.code == 2, answer.err
    with Store.open(tmp_path / "state") as store:
        device = store.devices()[0].device
        made, document, page = written(store, tmp_path, device, now=store.runs(device.uuid)[-1].started + 60)
    (failure,) = document["failures"]
    assert [(p["place"], p["results"]) for p in failure["places"]] == [("core 3", {"wrong": 8, "total": 32})]
    wrong = {p["place"]: p["results"]["wrong"] for p in document["places"]}
    assert wrong == {"core 0": 0, "core 1": 0, "core 3": 8}
    assert (failure["bits"], failure["format"]) == ({"5": 4}, "float32")
    assert failure["core"] == 3
    assert (failure["uploads"]["wrong"], failure["uploads"]["total"], failure["uploads"]["high"]) == (4, 4, 1.0)
    assert failure["uploads"]["low"] == pytest.approx(0.025 ** (1 / 4))
    assert (failure["runs"]["wrong"], failure["runs"]["total"]) == (4, 4)
    assert document["verdict"]["state"] == "faulty"
    assert "cpu:0: evidence, not an RMA dossier" in page  # a processor's identity is weak
    assert "not made from a seed alone" in failure["exhibit_absent"] or "no worker" in failure["exhibit_absent"]
    rows = (made / failure["exhibit"] / "wrong.csv").read_text().splitlines()
    assert rows[0] == "run,index,expected,observed,flipped_bits"
    assert {row.partition(",")[2] for row in rows[1:]} == {"17 40,0x3f800000,0x3f800020,5"}


def test_what_the_device_says_of_itself_is_judged_again_too(tmp_path):
    """A row that could not be replaced decides a return at NVIDIA: the report does not poll, and must not forget it."""
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed in this interpreter")
    machine = StandIn(tmp_path, 1)
    settings = {"enabled": True, "settings": {"sysfs": str(tmp_path / "sys")}}
    config = configure(tmp_path, "passes", each={"nvidia_telemetry": settings})
    common = ("--config", config, "--state-dir", tmp_path / "state")
    assert canaryd("check", *common, **machine.environment).code != 2
    machine.set(0, "remapped.failed", 1)
    done = canaryd("check", "--json", *common, **machine.environment)
    assert done.code == 2, done.err
    done = canaryd("report", machine.uuids[0], "--json", "-o", tmp_path / "out", *common, **machine.environment)
    document = json.loads(done.out)
    assert [f["rule"] for f in document["verdict"]["findings"]].count("memory-failed") == 1
    assert (document["verdict"]["state"], document["kind"]) == ("faulty", "rma")
    assert document["verdict"]["note"] == ""
    assert "telemetry-stale" not in done.out


def test_drills_of_another_day_are_another_dossier(tmp_path):
    """The verdict counts those of the last hour, so the cases, the rates and the name of the fault do too."""
    with Store.open(tmp_path / "state", now=lambda: NOW) as store:
        store.see_device(GPU, NOW - 40 * HOUR)
        store.drills.add_run(run(0, wrong=100, drill="consistent", started=NOW - 20 * HOUR))
        for number in (1, 2):
            store.drills.add_run(run(number, wrong=1, drill="flip", started=NOW - 5 * HOUR + number))
        _, document, _ = written(store, tmp_path, drill=True)
    assert document["drill"] == "flip"
    assert [p["results"] for p in document["probes"]] == [{"wrong": 2, "total": 200}]
    assert [f["results"]["wrong"] for f in document["failures"]] == [2]


@pytest.fixture(scope="module")
def drilled(tmp_path_factory):
    """A real drill on the processor, and its dossier with what a real worker laid out: (directory, document, page)."""
    directory = tmp_path_factory.mktemp("drilled")
    quiet = directory / "kernel.log"
    quiet.touch()
    settings = directory / "canaryd.yaml"
    settings.write_text(json.dumps({"telemetry": {"kernel_log": str(quiet)}}))
    common = ("--config", settings, "--state-dir", directory / "state")
    answer = canaryd("drill", "--fault", "consistent", "--device", "cpu", "--probe", "exact_integer", "--json", *common)
    assert answer.code == 2, answer.err
    loaded = replace(load.load(settings), state_dir=directory / "state")
    with Store.open(directory / "state") as store:
        engine = Engine(loaded, store)
        engine.recall()
        device = next(d for d in engine.devices.values() if d.backend == "cpu")
        now = store.drills.runs(device.uuid)[-1].started + 60
        yield written(store, directory, device, engine, drill=True, now=now)


@pytest.mark.torch
def test_the_dossier_of_a_drill_names_the_injected_element_bit_and_rate(drilled):
    """The fault "consistent": the same exponent bit of the middle element, in every result; every case says so."""
    _, document, _ = drilled
    assert (document["drill"], document["kind"]) == ("consistent", "drill")
    assert document["verdict"]["state"] == "faulty"
    assert len(document["failures"]) >= 10
    for failure in document["failures"]:
        width = 32 if failure["format"] == "int32" else 64
        assert list(failure["bits"]) == [str(width - 2)], failure["case"]
        assert failure["results"]["wrong"] == failure["results"]["total"] > 0
        assert failure["uploads"]["wrong"] == failure["uploads"]["total"] >= 4
        assert failure["uploads"]["high"] == 1.0
        middle = failure["elements_of_result"] // 2
        flat = [
            e["index"][0] * 16 + e["index"][1] if len(e["index"]) == 2 else e["index"][0] for e in failure["elements"]
        ]
        assert set(flat) == {middle}


@pytest.mark.torch
def test_an_interrupted_report_is_none(drilled, tmp_path):
    """A vendor would get half of the evidence, and nobody would know."""
    directory = drilled[0].parent.parent
    settings = replace(load.load(directory / "canaryd.yaml"), state_dir=directory / "state")
    with Store.open(directory / "state") as store:
        engine = Engine(settings, store)
        engine.recall()
        device = next(d for d in engine.devices.values() if d.backend == "cpu")
        engine.stop("you interrupted the command")
        now = store.drills.runs(device.uuid)[-1].started + 120
        with pytest.raises(DossierError, match=r"^cpu:0: no report is written: you interrupted the command$"):
            write.write(store, settings, engine, device, tmp_path, now=now, redact=False, drill=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.torch
def test_a_drill_is_labelled_everywhere(drilled):
    """Title, banner, verdict, OCP output and next step: nobody may take it for the device's own fault."""
    made, document, page = drilled
    assert document["title"].startswith("DRILL of cpu:0")
    assert "DRILL: canaryd injected" in page
    assert "DRILL: FAULTY" in page
    assert "never count against the device" in document["next_step"][0]
    lines = [json.loads(line) for line in (made / "ocp.jsonl").read_text().splitlines()]
    assert lines[1]["testRunArtifact"]["testRunStart"]["name"] == "canaryd DRILL"
    assert lines[-1]["testRunArtifact"]["testRunEnd"]["result"] == "NOT_APPLICABLE"
    told = [
        entry["testStepArtifact"]["diagnosis"] for entry in lines if "diagnosis" in entry.get("testStepArtifact", {})
    ]
    assert told
    assert all(d["verdict"].startswith("drill-") and d["type"] != "FAIL" for d in told)


@pytest.mark.torch
def test_the_laid_out_case_runs_without_canaryd(drilled, tmp_path):
    """On the sound processor its script finds nothing; with one bit of the golden flipped, exactly that bit."""
    made, document, page = drilled
    laid = [f for f in document["failures"] if f["exhibit"] and not f["exhibit_absent"]]
    assert len(laid) == advice.EXHIBITS
    core = laid[0]["core"]  # a case may also run on all threads at once
    option, told = ("", "cpu") if core is None else (f" --core {core}", f"cpu, core {core}")
    assert f"python3 {laid[0]['exhibit']}/reproduce.py cpu 1000{option}</pre>" in page
    folder = shutil.copytree(made / laid[0]["exhibit"], tmp_path / "case")
    argv = [sys.executable, "-I", str(folder / "reproduce.py"), "cpu", "2"]
    clean = subprocess.run(argv, cwd="/", capture_output=True, text=True, timeout=120, check=False)
    assert (clean.returncode, clean.stdout.splitlines()[1:]) == (0, [f"0 of 2 runs were wrong on {told}"])
    data = bytearray((folder / "golden.npy").read_bytes())
    data[-1] ^= 1 << 6
    (folder / "golden.npy").write_bytes(data)
    spoilt = subprocess.run(argv, cwd="/", capture_output=True, text=True, timeout=120, check=False)
    assert spoilt.returncode == 1
    assert re.search(r"flipped bits \[(62|30)\]$", spoilt.stdout.splitlines()[0])
    assert spoilt.stdout.splitlines()[-1] == f"2 of 2 runs were wrong on {told}"
