"""`canaryd baseline list|export|import`, and who witnesses what, as operators meet them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from canaryd.cli.baseline import Selection, chosen, document, import_document, met_by, table
from canaryd.facts import Recording
from canaryd.judge.characterised import Met
from canaryd.judge.recordings.baseline import LEARN, Baseline, empty_baseline, learn
from canaryd.model import Device, Outcome, Run
from canaryd.store.store import Store
from tests.command import canaryd

NOW, DAY = 1_790_000_000.0, 86_400.0
GPUS = [Device(uuid=f"GPU-{i}", backend="cuda", index=i, model="H100") for i in range(2)]
EVERYTHING = Selection()


def learnt(of: Device, digest="a" * 16, *, times=LEARN) -> Baseline:
    recording = Recording(case="gemm/prefill", digest=digest, chain={"dtype": "bfloat16"}, values=(1.0, 2.0))
    run = Run(
        id="r1",
        device=of.uuid,
        probe="recorded_kernels",
        probe_version=1,
        started=NOW - DAY,
        seconds=1.0,
        outcome=Outcome.COMPLETED,
        recordings=(recording,),
        stack={"torch": "2.13"},
    )
    baseline = empty_baseline(run, recording)
    for _ in range(times):
        baseline = learn(baseline, run, recording)
    return baseline


@pytest.fixture
def store(tmp_path):
    found = Store.open(tmp_path / "state", now=lambda: NOW)
    for device in GPUS:
        found.see_device(device, NOW)
    return found


def test_siblings_with_a_vector_in_common_are_witnesses(store):
    """One that gives other bits is none, nor is one that has not learnt yet."""
    store.set_baselines([learnt(GPUS[0]), learnt(GPUS[1])])
    assert [one.witness for one in chosen(store, EVERYTHING)] == ["cuda:1", "cuda:0"]
    store.set_baselines([learnt(GPUS[1], "b" * 16)])
    assert [one.witness for one in chosen(store, EVERYTHING)] == ["nobody", "nobody"]
    store.set_baselines([learnt(GPUS[1], times=LEARN - 1)])
    assert chosen(store, Selection(device="cuda:0"))[0].witness == "nobody"


def test_what_one_host_exports_is_a_witness_on_another(store, tmp_path):
    """And comes back as its own where the history of the same device was lost."""
    store.set_baselines([learnt(GPUS[0])])
    text = json.dumps(document(chosen(store, EVERYTHING)))
    elsewhere = Store.open(tmp_path / "elsewhere", now=lambda: NOW)
    mine = Device(uuid="GPU-9", backend="cuda", index=0, model="H100")
    elsewhere.see_device(mine, NOW)
    elsewhere.set_baselines([learnt(mine)])
    assert import_document(elsewhere, text) == (1, 0)
    assert import_document(elsewhere, text) == (0, 1)
    own, far = sorted(chosen(elsewhere, EVERYTHING), key=lambda one: one.device.uuid, reverse=True)
    assert (own.witness, far.baseline.imported_kind) == ("GPU-0", ("cuda", "H100"))
    lost = Store.open(tmp_path / "lost", now=lambda: NOW)
    lost.see_device(GPUS[0], NOW)
    assert import_document(lost, text) == (1, 0)
    assert lost.baselines(GPUS[0].uuid) == [learnt(GPUS[0])]


def met(of: Device) -> Met:
    """Return the class of exact cases that a device met."""
    stack = {"torch": "2.13"}
    return Met(
        device=of.uuid, kind=of.kind, probe="exact_matmul", probe_version=1, stack=stack, classes={"x/y": NOW}, used=NOW
    )


def test_the_classes_that_were_met_travel_with_the_baselines(store, tmp_path):
    """Elsewhere they are those of a witness; on the device's own host, whose history was lost, its own."""
    store.set_met([met(GPUS[0]), met(GPUS[1])])
    assert [m.device for m in met_by(store, Selection(device="cuda:1"))] == ["GPU-1"]
    assert met_by(store, Selection(probe="exact_integer")) == []
    text = json.dumps(document([], met_by(store, Selection(device="cuda:0"))))
    for place, imported in (("elsewhere", True), ("lost", False)):
        other = Store.open(tmp_path / place, now=lambda: NOW)
        if not imported:
            other.see_device(GPUS[0], NOW)
        assert import_document(other, text) == (0, 0)
        assert other.met() == [replace(met(GPUS[0]), imported=imported)]


@pytest.mark.parametrize(
    "change", [{"used": 1e300}, {"classes": {"\x1b[2J": 1.0}}, {"classes": 7}, {"device": 7}, None]
)
def test_classes_that_cannot_be_are_refused_whole(store, change):
    """A file that was tampered with or damaged changes nothing."""
    data = document([], [met(GPUS[0])])
    data["met"] = [data["met"][0] | change] if change else 7
    with pytest.raises(ValueError, match="met"):
        import_document(store, json.dumps(data))
    assert store.met() == []


def test_an_export_of_release_0_1_0_is_still_read(store):
    """It has `imported` where `imported_kind` stands now, and may be pinned; the export of today has both kinds."""
    store.set_baselines([replace(learnt(Device(uuid="GPU-9", backend="cuda", index=0, model="H100")), used=NOW)])
    (one,) = document(chosen(store, EVERYTHING))["baselines"]
    assert one["imported"] == ""
    older = {name: value for name, value in one.items() if name != "imported_kind"}
    older["pinned"] = "unit of the acceptance test"
    other = {**older, "device": "GPU-7", "backend": "cuda", "model": "H100", "imported": "cuda A100"}
    assert import_document(store, json.dumps({"schema": "canaryd.baselines/1", "baselines": [other]})) == (1, 0)
    assert {b.device: b.imported_kind for b in store.baselines()} == {"GPU-9": None, "GPU-7": ("cuda", "H100")}
    exported = {one["device"]: one for one in document(chosen(store, EVERYTHING))["baselines"]}
    assert (exported["GPU-7"]["imported"], exported["GPU-7"]["imported_kind"]) == ("cuda H100", ["cuda", "H100"])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("not json", "not JSON"),
        ("[]", "wanted an object"),
        ('{"schema": "canaryd.check/1"}', "canaryd.baselines/1"),
        ('{"schema": "canaryd.baselines/1", "baselines": [{"device": 7}]}', "Baseline.device"),
        ('{"schema": "canaryd.baselines/1", "baselines": [3]}', "wanted an object"),
    ],
)
def test_what_is_no_export_is_refused_whole(store, text, said):
    """With what was wanted, and nothing taken in."""
    with pytest.raises(ValueError, match=said):
        import_document(store, text)
    assert store.baselines() == []


@pytest.mark.parametrize("width", [79, 110])
def test_the_list_fits_the_terminal(store, width):
    """What tells least is left out, and the last line says so; a program gets all columns."""
    store.set_baselines([replace(learnt(GPUS[0]), case="bfloat16/decode/batch-8/position-1024")])
    found = chosen(store, Selection())
    assert "not shown" not in table(found)
    lines = table(found, width).splitlines()
    assert max(map(len, lines)) <= width, lines
    assert lines[0].split()[:3] == ["device", "probe", "case"]
    assert lines[-1].startswith("not shown: last seen")


def test_the_commands(store, tmp_path):
    """Export goes to standard output, import takes a file; what is not a subcommand is a usage error."""
    store.set_baselines([learnt(GPUS[0])])
    common = ("--state-dir", tmp_path / "state")
    listed = canaryd("baseline", "list", *common)
    assert "confirmed by" in listed.out.splitlines()[0]
    assert "nobody" in listed.out
    gone = canaryd("baseline", "pin", "cuda:0", *common)
    assert (gone.code, "invalid choice: 'pin' (choose from " in gone.err) == (64, True)
    file = Path(tmp_path / "baselines.json")
    file.write_text(canaryd("baseline", "export", *common).out)
    other = ("--state-dir", tmp_path / "other")
    assert canaryd("baseline", "import", file, *other).out.startswith("1 baselines imported, 0 known")
    missing = canaryd("baseline", "import", tmp_path / "none.json", *other)
    assert (missing.code, "none.json" in missing.err) == (64, True)
