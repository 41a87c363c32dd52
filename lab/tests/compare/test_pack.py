"""A golden pack: written with torch, run without canaryd and torch, judged from its result file."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from canaryd_lab.compare import pack

from canaryd.codec import canonical
from canaryd.model import State
from tests.command import ROOT, in_turn

pytest.importorskip("torch", reason="torch is not installed in this interpreter")
pytestmark = pytest.mark.torch
if importlib.util.find_spec("numpy") is None:
    pytest.skip("no numpy here: the pack's runner was not run", allow_module_level=True)

GOLDENS = json.loads((ROOT / "probes/golden/exact_matmul.json").read_text())
ALONE = """
import importlib.util, runpy, sys
sys.path.append(sys.argv.pop(1))
assert not any(map(importlib.util.find_spec, ("canaryd", "torch")))
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run(directory: Path, out: Path, packages: Path) -> subprocess.CompletedProcess[str]:
    """Run the pack's runner in an interpreter that has numpy alone."""
    argv = [sys.executable, "-I", "-S", "-c", ALONE, packages, directory / "run_pack.py", "--runs", "2", "-o", out]
    return subprocess.run(argv, cwd="/", capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture(scope="module")
def packages(tmp_path_factory) -> Path:
    """A directory with numpy and its libraries, and nothing else."""
    spec = importlib.util.find_spec("numpy")
    assert spec
    assert spec.origin
    found, here = Path(spec.origin).parent, tmp_path_factory.mktemp("packages")
    for name in ("numpy", "numpy.libs"):
        if (found.parent / name).is_dir():
            (here / name).symlink_to(found.parent / name)
    return here


@pytest.fixture(scope="module")
def made(tmp_path_factory, packages):
    """A pack, and the result file of a sound processor."""
    from canaryd_lab.worker.pack import export

    directory = tmp_path_factory.mktemp("made") / "pack"
    export.answer({"directory": str(directory), "goldens": GOLDENS}, lambda _fraction, _text: None)
    out = directory.parent / "results.json"
    done = run(directory, out, packages)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("ALL RIGHT  ")
    return directory, out


def sealed(path: Path, document: dict) -> Path:
    """Write a document with the digest of its content."""
    rest = {name: value for name, value in document.items() if name != "digest"}
    path.write_text(json.dumps(rest | {"digest": hashlib.sha256(canonical(rest)).hexdigest()}))
    return path


def test_the_expected_results_are_those_of_the_probe(made):
    """Each case is a fixed case of exact_matmul, with the digest that ships, and files that have their own."""
    directory, _ = made
    manifest = json.loads((directory / "pack.json").read_text())
    assert len(manifest["cases"]) == 23
    for case in manifest["cases"]:
        assert case["golden"] == GOLDENS[case["name"]]
        assert case["exactness"] == "U"
        for part in (*case["operands"], case["expected"], *filter(None, [case["graph"]])):
            assert hashlib.sha256((directory / part["file"]).read_bytes()).hexdigest() == part["sha256"]
    assert sum(f.stat().st_size for f in directory.glob("*.bin")) < 5 << 20


def test_a_sound_processor_is_healthy(made):
    """Every case right, without canaryd and torch in the interpreter: exit status 0."""
    directory, out = made
    (answer,) = in_turn(("pack", "verify", out, "--pack", directory))
    assert (answer.code, answer.err) == (0, "")
    assert answer.out.startswith("HEALTHY  ")
    assert "46 results of 23 cases, 0 wrong." in answer.out


def test_a_wrong_result_is_faulty(made, tmp_path, packages):
    """One operand is changed under the runner: the case, the element and the bits are named, and exit status is 2."""
    directory, _ = made
    broken = tmp_path / "broken"
    shutil.copytree(directory, broken)
    # The injected fault: the product of a broken device, which flips bit 22 of one element.
    text = (broken / "run_pack.py").read_text()
    flip = "got = np.ascontiguousarray(compute(), expected.dtype).copy()\n        "
    flip += 'if case["name"].startswith("float32/dense"): got.view("<u4")[17, 40] ^= 1 << 22'
    changed = text.replace("got = np.ascontiguousarray(compute(), expected.dtype)", flip)
    assert changed != text
    (broken / "run_pack.py").write_text(changed)
    done = run(broken, tmp_path / "r.json", packages)
    assert done.returncode == 2, done.stderr
    assert done.stdout.startswith("WRONG RESULTS  ")
    (answer,) = in_turn(("pack", "verify", tmp_path / "r.json", "--pack", directory))
    assert answer.code == 2
    assert answer.out.startswith("FAULTY  ")
    assert "float32/dense/fixed24/nt@96x80x256: 1 wrong elements, the first 1400:" in " ".join(answer.out.split())
    assert "(bits 22)" in " ".join(answer.out.split())
    assert all(len(line) <= 80 for line in answer.out.splitlines())
    document = json.loads((tmp_path / "r.json").read_text())
    wrong = next(case for case in document["cases"] if case["status"] == "wrong")
    wrong["elements"][0][2] = "1"  # with a digest that fits, yet not the result that was computed
    with pytest.raises(pack.Refused, match="do not give the result that it names"):
        pack.judge(sealed(tmp_path / "forged.json", document), directory)


def altered(document: dict, name: str) -> dict:
    """Return a result file with one thing changed."""
    first = document["cases"][0]
    if name == "edited":
        return document | {"device": "another"}
    if name == "other pack":
        return document | {"pack": "0" * 64}
    if name == "demonstration":
        return document | {"demonstration": "flip"}
    if name == "silent skip":
        return document | {"cases": document["cases"][1:]}
    assert name == "contradiction"
    return document | {"cases": [first | {"digest": "0" * 64}, *document["cases"][1:]]}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("edited", "edited or damaged"),
        ("other pack", "made with another pack"),
        ("demonstration", "is no evidence"),
        ("silent skip", "does not name each case"),
        ("contradiction", "which its digest or its counts contradict"),
    ],
)
def test_a_file_that_is_no_evidence_is_refused(made, tmp_path, name, said):
    """Edited, of another pack, of a demonstration, or contradictory: a sentence, and no verdict."""
    directory, out = made
    document = altered(json.loads(out.read_text()), name)
    path = tmp_path / "r.json"
    if name == "edited":
        path.write_text(json.dumps(document))
    else:
        sealed(path, document)
    with pytest.raises(pack.Refused, match=said):
        pack.judge(path, directory)


def test_no_evidence_is_unknown(made, tmp_path):
    """Everything skipped, or nothing that shows where it ran: unknown, with what was not checked."""
    directory, out = made
    document = json.loads(out.read_text())
    skipped = [{"name": case["name"], "status": "skipped", "reason": "no kernel"} for case in document["cases"]]
    judged = pack.judge(sealed(tmp_path / "a.json", document | {"cases": skipped}), directory)
    assert judged.state is State.UNKNOWN
    assert "Not checked: 23 cases" in pack.text(judged)
    judged = pack.judge(sealed(tmp_path / "b.json", document | {"placement": "not proven"}), directory)
    assert judged.state is State.UNKNOWN


def test_a_file_that_cannot_be_judged_is_a_usage_error(made, tmp_path):
    """Missing, or not of a runner: one sentence on standard error, exit status 64."""
    directory, _ = made
    (tmp_path / "no.json").write_text("[]")
    for path in (tmp_path / "no.json", tmp_path / "absent.json"):
        (answer,) = in_turn(("pack", "verify", path, "--pack", directory))
        assert (answer.code, answer.out) == (64, "")
        assert answer.err.startswith("canaryd: pack verify: ")
