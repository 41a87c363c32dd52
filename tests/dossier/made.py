"""A store with a faulty device, and the dossiers that are made of it."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import jsonschema

from canaryd.config.settings import Config
from canaryd.dossier import write
from canaryd.facts import Comparison, Evidence, Exactness, Reading
from canaryd.model import Cause, Device, Finding, Outcome, Rival, Run, State, Verdict
from tests.command import ROOT
from tests.places import line, place

VALIDATOR = jsonschema.Draft202012Validator(json.loads((ROOT / "docs/dossier.schema.json").read_text()))
NOW = 1_790_000_000.0
HOUR = 3600.0
UUID = "GPU-5f1c0a44-1111-2222-3333-444455556666"
PEER = "GPU-77aa0a44-1111-2222-3333-444455556666"
SERIAL = "1650923004711"
HOST = "rack7-node12"
CASE = "bfloat16/cancel/prefill/nt@64x96x128"
GPU = Device(
    uuid=UUID,
    backend="cuda",
    index=3,
    torch_index=3,
    model="NVIDIA H200",
    detail={"serial": SERIAL, "bus_id": "0000:65:00.0", "vbios": "96.00.A5.00.01", "driver": "580.65.06"},
)
SIBLING = replace(GPU, uuid=PEER, index=4, torch_index=4, detail={"serial": "1650923004712", "bus_id": "0000:66:00.0"})
PROCESSOR = Device(
    uuid="CPU-9b1f0a44-1111-2222-3333-444455556666",
    backend="cpu",
    index=0,
    model="AMD EPYC 9654",
    weak_identity=True,
    detail={
        "product": "Supermicro SYS-821GE-TNHR",
        "product_serial": "S0815X4711",
        "board": "Supermicro X13DEG-OAD",
        "board_serial": "UM239S001122",
        "bios": "American Megatrends 2.3 11/05/2024",
        "memory_serials": "P0_A: 80AD0122, P0_B: 80AD0133",
    },
)
STACK = {"torch": "2.9.0", "driver": "580.65.06", "cuda": "13.0", "weights": "/srv/models/llama/secret-name"}
NASTY = "<script>alert(1)</script>\x1b[31m"


def evidence(row: int, column: int, bit: int, wrong: int = 1) -> Evidence:
    right = 0x4180
    return Evidence(
        wrong=wrong,
        total=64 * 96,
        first=(((row, column), f"0x{right:04x}", f"0x{right ^ 1 << bit:04x}"),),
        bits={str(bit): wrong},
        zeroed=0,
        nonfinite=0,
        lines={"row": line(row), "column": line(column)},
        pattern=f"element [{row}, {column}]: only bit {bit} is flipped",
        repeats=3,
    )


def run(number: int, *, device: str = UUID, wrong: int = 0, trials: int = 100, **changed) -> Run:
    """Return a run of the one case; `wrong` of its `trials` results had bit 13 of element [17, 40] flipped."""
    compared = Comparison(
        case=CASE,
        shape="M=64 N=96 K=128",
        seed=42,
        exactness=Exactness.UNIVERSAL,
        place=place("device"),
        trials=trials,
        wrong_trials=wrong,
        evidence=evidence(17, 40, 13) if wrong else None,
    )
    given = {
        "id": f"{number:012x}-abcdef",
        "device": device,
        "probe": "exact_matmul",
        "probe_version": 1,
        "started": NOW - 30 * HOUR + number * HOUR,
        "seconds": 4.0,
        "outcome": Outcome.COMPLETED,
        "comparisons": (compared,),
        "readings": (Reading(name="trials", value=trials, unit="1"),),
        "stack": STACK,
        "environment": {"hostname": HOST},
        "repro": "canaryd check --device cuda:3 --probe exact_matmul --seed 42 --level quick",
    }
    return Run(**given | changed)


def poll(number: int, celsius: float) -> Run:
    readings = (
        Reading(name="temperature_celsius", value=celsius, unit="celsius", labels={"sensor": "core"}),
        Reading(name="power_watts", value=600.5, unit="watts"),
        Reading(name="clock_hertz", value=1.98e9, unit="hertz", labels={"domain": "sm"}),
    )
    at = NOW - 30 * HOUR + number * HOUR + 10
    return run(number + 500, probe="nvidia_telemetry", started=at, comparisons=(), readings=readings, repro="")


def verdict(**changed) -> Verdict:
    finding = Finding(
        rule="exact-mismatch-confirmed",
        state=State.FAULTY,
        cause=Cause.HARDWARE,
        message=f"confirmed: 2 runs are wrong {NASTY}",
        probe="exact_matmul",
        repro="canaryd check --device cuda:3",
        runs=("1", "2"),
        rivals=(Rival(cause=Cause.SOFTWARE, why="cuda:4 computed the same bytes right", rejected=True),),
    )
    given = {"device": UUID, "state": State.FAULTY, "cause": Cause.HARDWARE, "findings": (finding,)}
    return Verdict(**given | {"decided": NOW - 60, "since": NOW - 5 * HOUR} | changed)


def tools(directory: Path, **scripts: str) -> str:
    """Put programs of these names in a directory, and return a search path that begins with it."""
    directory.mkdir()
    for name, body in scripts.items():
        path = directory / name.replace("_", "-").replace("-sh", ".sh")
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
    return f"{directory}:{os.environ['PATH']}"


def written(store, tmp_path, device=GPU, engine=None, **changed):
    """Write a dossier, check all that must hold of any, and return (directory, document, page)."""
    made = write.write(
        store,
        Config(),
        engine,
        device,
        tmp_path / "out",
        **{"redact": False, "now": NOW, "root": tmp_path / "root", **changed},
    )
    document = json.loads((made / "dossier.json").read_text())
    VALIDATOR.validate(document)
    done = subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=made, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    files = {str(p.relative_to(made)) for p in made.rglob("*") if p.is_file()}
    assert {line.partition(": ")[0] for line in done.stdout.splitlines()} == files - {"SHA256SUMS"}
    assert {c["file"] for c in document["contents"]} == files
    assert all(a["why"].strip() for a in document["absent"])
    assert not [p for p in (tmp_path / "out").iterdir() if p.name.startswith(".")]
    return made, document, (made / "dossier.html").read_text()
