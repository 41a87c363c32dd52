"""`canaryd capture` and `compare` as their users meet them."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import re
import sys
import time

import pytest

from canaryd.store.notes import DAEMON_LOCK, RELEASE_NOTE
from canaryd.store.store import Store
from tests.command import ROOT, Process, canaryd, configure, eventually, in_turn

torch = pytest.importorskip("torch", reason="captures are made with torch")
pytestmark = pytest.mark.torch

from canaryd_lab.compare import exact  # noqa: E402
from canaryd_lab.compare.captures import table  # noqa: E402
from canaryd_lab.worker.canary import compare  # noqa: E402

from lab.tests.captures import exact as exact_capture  # noqa: E402


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Return a directory with a configuration whose workers have torch, and three captures."""
    directory = tmp_path_factory.mktemp("captures")
    common = ("--config", configure(directory, worker={"python": sys.executable}, state_dir=str(directory / "state")))
    for name, drill in (("a", ""), ("same", ""), ("hurt", "2.down")):
        exact_capture(directory / f"{name}.safetensors", drill=drill)
    return directory, common


@pytest.mark.parametrize("command", ["capture --exact", "characterise --device cpu:0 --part exactness --resume DIR"])
@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_release_keeps_it_off_the_device(tmp_path, command, when):
    """Somebody changes the driver: nothing begins, and what runs ends within seconds. A daemon is there to be asked."""
    config = configure(tmp_path, worker={"python": sys.executable}, state_dir=str(tmp_path / "state"))
    with Store.open(tmp_path / "state") as store, store.lock(DAEMON_LOCK, 0.0):
        until = str(time.time() + 600.0)
        if when == "before":
            store.set_note(RELEASE_NOTE, until)
        words = command.replace("DIR", str(tmp_path / "made")).split()
        with contextlib.closing(Process(*words, "--config", config)) as typed:
            if when == "meanwhile":
                eventually(typed.others)
                store.set_note(RELEASE_NOTE, until)
            assert typed.popen.wait(60.0) == 3
            typed.line("devices are released")
            assert typed.others() == []


@pytest.mark.slow
def test_two_captures_of_one_device_are_equal(place):
    """The same device, the same stack: every bit, and exit status 0."""
    directory, common = place
    done = canaryd("compare", directory / "a.safetensors", directory / "same.safetensors", *common)
    assert done.code == 0
    assert done.out.startswith("EQUAL")


def test_a_fault_is_named_by_layer_and_operator(place):
    """In the table (which the test above prints), as JSON, and on a page that needs nothing from elsewhere."""
    directory, common = place
    page = directory / "page.html"
    files = (directory / "a.safetensors", directory / "hurt.safetensors")
    done = canaryd("compare", *files, "--report", page, "--json", *common)
    assert done.code == 2
    told = " ".join(table(done.document).split())
    assert told.startswith("FAULT: A or B is wrong; a third capture can tell which. First at layer 2, operator down")
    assert "<svg" in page.read_text()
    assert "http" not in page.read_text().replace("http://www.w3.org/2000/svg", "")
    verdict = done.document["verdict"]
    assert (verdict["kind"], verdict["first_layer"], verdict["first_operator"]) == ("fault", "2", "down")


BAD = (
    (("capture", "-o", "{0}", "--model", "{0}"), 64, "cannot be written"),
    (("capture", "-o", "{0}/x.safetensors", "--model", "{0}", "--device", "cuda:7"), 64, "name one of cpu:0"),
    (("capture", "-o", "{0}/x.safetensors"), 64, "name a model: --model DIR"),
    (("capture", "--model", "{0}"), 64, "name the file to write: -o FILE"),
    (("capture", "--exact", "--decode"), 64, "leave out --decode"),
    (("capture", "--json", "-o", "{0}/x.safetensors"), 64, "--json: only with --exact"),
    (("compare", "{0}/a.safetensors", "{0}/missing"), 64, "no such file"),
    (("compare", "{0}/a.safetensors", "{0}/cut.safetensors"), 3, "cut.safetensors"),
    (("compare", "{0}/canaryd.yaml", "{0}/canaryd.yaml"), 64, "canaryd.yaml"),
)
"""What is typed ("{0}" is the directory), the exit status, and what is said."""
MORE_BAD = (
    (("capture", "-o", "{0}/x.safetensors", "--model", "{0}", "--dtype", "float8"), 3, "float8"),
    (("capture", "--exact", "--drill", "9.up", "--dtype", "float32"), 3, "no such place"),
    (("capture", "-o", "{0}/x.safetensors", "--model", "{0}", "--prompt", "nowhere"), 3, "nowhere"),
    (
        ("capture", "-o", "{0}/x.safetensors", "--model", "{0}"),
        3,
        "config.json" if importlib.util.find_spec("transformers") else "transformers",
    ),
    (("capture", "--exact", "--dtype", "float8"), 3, "float8"),
)
"""What a worker with torch refuses in the same way; tests/worker/canary/test_capture.py has each reason."""


@pytest.mark.parametrize("bad", [BAD, pytest.param(MORE_BAD, marks=pytest.mark.slow)], ids=["", "more"])
def test_bad_input_gets_one_clear_line(place, bad):
    """Where, what was given, what was wanted; no traceback, and nothing half written."""
    directory, common = place
    (directory / "cut.safetensors").write_bytes((directory / "a.safetensors").read_bytes()[:5000])
    typed = [(*(word.format(directory) for word in arguments), *common) for arguments, _, _ in bad]
    for (arguments, code, said), done in zip(bad, in_turn(*typed), strict=True):
        assert done.code == code, (arguments, done)
        (line,) = done.err.splitlines()
        assert line.startswith("canaryd: ")
        assert said in line
    assert not (directory / "x.safetensors").exists()


def test_files_of_scores_are_compared_too(place):
    """By what they hold, not by their names."""
    _, common = place
    found = sorted((ROOT / "lab/tests/scores").rglob("results_*.json"))
    done = canaryd("compare", found[0], found[0], *common)
    assert done.code == 0
    assert "no significant difference" in done.out.lower()
    assert json.loads(canaryd("compare", found[0], found[0], "--json", *common).out)


def test_a_lone_device_is_compared_with_the_truth(place):
    """Nothing wrong is exit status 0; no file is written, for there is nothing to keep."""
    directory, common = place
    done = canaryd("capture", "--exact", "--dtype", "bfloat16", "-o", directory / "none.safetensors", *common)
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("NO FAULT: cpu:0, all ")
    assert not (directory / "none.safetensors").exists()


def test_a_fault_of_a_lone_device_is_named(place):
    """By layer, operator, position, element and bit, with exit status 2; as JSON, in text, and with its capture.

    That the command prints the text is shown by the test above.
    """
    directory, common = place
    path = directory / "wrong.safetensors"
    words = ("capture", "--exact", "--dtype", "float32", "--drill", "2.down", "--seed", "4")
    done = canaryd(*words, "-o", path, "--json", *common)
    assert (done.code, done.err) == (2, "")
    lines = exact.text(done.document).splitlines()
    first, where, *_, last = lines
    assert first == "FAULT: cpu:0, layer 2, down projection."
    assert re.fullmatch(r"  position \d+, element \d+, bit 23: wanted -?[\d.]+, got -?[\d.]+", where)
    assert last == "DRILL: one value was changed on purpose at 2.down."
    assert len(lines) <= 6
    found = done.document
    assert (found["schema"], found["verdict"], found["seed"]) == ("canaryd.exact_capture/1", "wrong", 4)
    (fault,) = [ran["fault"] for ran in found["ran"] if ran["fault"]]
    table = (ROOT / "docs/lab.md").read_text()
    assert [name for part in (found, *found["ran"], fault) for name in part if f"`{name}" not in table] == []
    assert (fault["place"]["layer"], fault["place"]["operator"], fault["bits"]) == ("2", "down", [23])
    assert compare.answer({"a": str(path), "b": str(path)}, lambda *_: None)["verdict"]["kind"] == "equal"
