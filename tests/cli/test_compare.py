"""`canaryd capture` and `compare` as their users meet them."""

from __future__ import annotations

import importlib.util
import json

import pytest

from tests.command import ROOT, canaryd, configure

torch = pytest.importorskip("torch", reason="captures are made with torch")
pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Return a directory with a configuration whose workers have torch, and three captures."""
    import sys

    directory = tmp_path_factory.mktemp("captures")
    common = ("--config", configure(directory, worker={"python": sys.executable}, state_dir=str(directory / "state")))
    for name, more in (("a", ()), ("same", ()), ("hurt", ("--drill", "2.down"))):
        arguments = ("-o", directory / f"{name}.safetensors", "--prompt", "pier", "--operators", "--dtype", "float32")
        done = canaryd("capture", *arguments, *more, *common)
        assert (done.code, done.err) == (0, "")
        assert "tensors of cpu:0" in done.out
    return directory, common


def test_two_captures_of_one_device_are_equal(place):
    """The same device, the same stack: every bit, and exit status 0."""
    directory, common = place
    done = canaryd("compare", directory / "a.safetensors", directory / "same.safetensors", *common)
    assert done.code == 0
    assert done.out.startswith("EQUAL")


def test_a_fault_is_named_by_layer_and_operator(place):
    """In the table, as JSON, and on a page that needs nothing from elsewhere."""
    directory, common = place
    page = directory / "page.html"
    files = (directory / "a.safetensors", directory / "hurt.safetensors")
    done = canaryd("compare", *files, "--report", page, *common)
    assert done.code == 2
    told = " ".join(done.out.split())
    assert told.startswith("FAULT: B is wrong; A is consistent with its inputs. First at layer 2, operator down")
    assert "<svg" in page.read_text()
    assert "http" not in page.read_text().replace("http://www.w3.org/2000/svg", "")
    verdict = canaryd("compare", *files, "--json", *common).document["verdict"]
    assert (verdict["kind"], verdict["first_layer"], verdict["first_operator"]) == ("fault", "2", "down")


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("capture", "-o", "{0}", "--prompt", "pier"), 64, "cannot be written"),
        (("capture", "-o", "{0}/x.safetensors", "--device", "cuda:7"), 64, "name one of cpu:0"),
        (("capture", "-o", "{0}/x.safetensors", "--dtype", "float8"), 3, "float8"),
        (("capture", "-o", "{0}/x.safetensors", "--prompt", "nowhere"), 3, "nowhere"),
        (
            ("capture", "-o", "{0}/x.safetensors", "--model", "{0}"),
            3,
            "config.json" if importlib.util.find_spec("transformers") else "transformers",
        ),
        (("compare", "{0}/a.safetensors", "{0}/missing"), 64, "no such file"),
        (("compare", "{0}/a.safetensors", "{0}/cut.safetensors"), 3, "cut.safetensors"),
        (("compare", "{0}/canaryd.yaml", "{0}/canaryd.yaml"), 64, "canaryd.yaml"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_bad_input_gets_one_clear_line(place, arguments, code, said):
    """Where, what was given, what was wanted; no traceback, and nothing half written."""
    directory, common = place
    (directory / "cut.safetensors").write_bytes((directory / "a.safetensors").read_bytes()[:5000])
    done = canaryd(*(a.format(directory) for a in arguments), *common)
    assert done.code == code, done
    (line,) = done.err.splitlines()
    assert line.startswith("canaryd: ")
    assert said in line
    assert not (directory / "x.safetensors").exists()


def test_files_of_scores_are_compared_too(place):
    """By what they hold, not by their names."""
    _, common = place
    found = sorted((ROOT / "tests/scores").rglob("results_*.json"))
    done = canaryd("compare", found[0], found[0], *common)
    assert done.code == 0
    assert "no significant difference" in done.out.lower()
    assert json.loads(canaryd("compare", found[0], found[0], "--json", *common).out)
