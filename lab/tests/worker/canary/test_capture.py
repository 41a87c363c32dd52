"""Captures: what stands in the file, that it is written whole or not at all, and what is refused."""

import json
import os
import subprocess
import sys
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from canaryd_lab.worker.canary import capture
from canaryd_lab.worker.safetensors import read_safetensors, write_safetensors

from canaryd.codec import to_json
from canaryd.facts import DTYPES
from canaryd.probe import Skip
from canaryd.worker.numeric.stack import cpu
from lab.tests.captures import STEPS, exact
from tests.command import ROOT

torch = pytest.importorskip("torch", reason="the numeric worker is tested where torch is installed")
pytestmark = pytest.mark.torch


def silent(fraction, text):
    assert 0 <= fraction <= 1
    assert text


def wish(out, **changes):
    """The arguments of a small capture."""
    usual = {"device": to_json(cpu()), "model": "/models/none", "dtype": "float32", "prompts": ["reef"]}
    return {**usual, "operators": True, "out": str(out), "forced": True, "drill": "", **changes}


def taken(out, **changes):
    """A capture of a directory, through its file."""
    answered = capture.answer(wish(out, **changes), silent)
    assert answered["bytes"] == out.stat().st_size
    return capture.read(out)


# --------------------------------------------------------------------------------------------------------------------
# What stands in it.


def test_a_capture_has_every_operator_in_computing_order(tmp_path):
    """One pass: input, embedding, nineteen operators per layer, the head, tokens; and everything about it."""
    found = exact(tmp_path / "a.safetensors")
    names = list(found.tensors)
    assert len(names) == 1 + 3 * 19 + 2 + 2
    assert names[:3] == ["exact/forced/input/embedding", "exact/forced/0/attention_norm", "exact/forced/0/query"]
    assert names[-4:] == ["exact/forced/head/norm", "exact/forced/head/logits", "exact/input", "exact/tokens"]
    about = found.about
    assert set(about) == set(capture.ABOUT)
    assert (about["schema"], about["dtype"]) == ("canaryd.capture/1", "float32")
    assert (about["path"], about["operators"], about["drill"]) == ("forced", "yes", "")
    assert json.loads(about["device"])["uuid"] == cpu().uuid
    assert json.loads(about["environment"])["torch"] == torch.__version__
    assert datetime.now(timezone.utc) - datetime.fromisoformat(about["date"]) < timedelta(minutes=1)


def test_decoding_is_captured_step_by_step(tmp_path):
    """The prompt is step 0; each step's logits choose its token; keys grow by one position a step."""
    found = exact(tmp_path / "a.safetensors", forced=False)
    chosen = found.tensors["exact/tokens"][0].tolist()
    assert len(chosen) == STEPS
    length = found.tensors["exact/input"].shape[1]
    for step, token in enumerate(chosen):
        assert int(found.tensors[f"exact/{step}/head/logits"][0, -1].argmax()) == token
        assert found.tensors[f"exact/{step}/2/keys"].shape[2] == length + step
    assert found.about["path"] == "decode"


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_drill_spoils_one_element_of_one_place(tmp_path, dtype):
    """The largest element of that operator, once; everything before it is as it was."""
    clean = exact(tmp_path / "a.safetensors", dtype)
    spoilt = exact(tmp_path / "b.safetensors", dtype, drill="2.mixed")
    differ = [name for name, tensor in clean.tensors.items() if not torch.equal(tensor, spoilt.tensors[name])]
    assert differ[0] == "exact/forced/2/mixed"
    one, two = clean.tensors[differ[0]], spoilt.tensors[differ[0]]
    assert int((one != two).sum()) == 1
    assert float(one.abs().max()) == float(one[one != two].abs())
    assert float(two[one != two] / one[one != two]) in (0.5, 2.0)
    assert spoilt.about["drill"] == "2.mixed"


# --------------------------------------------------------------------------------------------------------------------
# What is refused.


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": "float8"}, "dtype 'float8': wanted one of float64, float32, bfloat16, float16"),
        ({"prompts": ["reef", "nobody"]}, "prompt 'nobody': wanted one of reef, ledger"),
        ({"device": {"uuid": "x"}}, "Device"),
    ],
)
def test_what_cannot_be_meant_is_said_in_one_line(tmp_path, changes, reason):
    """And nothing is written."""
    with pytest.raises(ValueError, match=reason) as caught:
        capture.answer(wish(tmp_path / "a.safetensors", **changes), silent)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_place_to_write_that_is_none_is_named_before_anything_runs(tmp_path):
    """A directory, and a directory that is not there."""
    with pytest.raises(ValueError, match="is a directory; wanted the path of a file"):
        capture.answer(wish(tmp_path), silent)
    with pytest.raises(ValueError, match="nowhere is not a directory"):
        capture.answer(wish(tmp_path / "nowhere" / "a.safetensors"), silent)


def test_a_device_that_is_not_there_is_a_reason_to_skip(tmp_path, checkpoint):
    """With its uuid."""
    if torch.cuda.is_available():
        pytest.skip("a CUDA device is here")
    gone = {**to_json(cpu()), "backend": "cuda", "uuid": "GPU-gone"}
    with pytest.raises(Skip, match="GPU-gone is not visible"):
        capture.answer(wish(tmp_path / "a.safetensors", device=gone, model=str(checkpoint)), silent)


LIMITED = """
import resource, sys
from pathlib import Path
from canaryd_lab.worker.canary import capture
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
import signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
try:
    capture.write_file(Path(sys.argv[1]), b"x" * 2000)
except ValueError as error:
    print(error)
"""


def test_a_write_that_fails_leaves_nothing_and_keeps_what_was_there(tmp_path):
    """In a process that may write 1,000 bytes to a file: the old capture is untouched, no part of the new one stays."""
    out = tmp_path / "a.safetensors"
    out.write_bytes(b"the old one")
    argv = [sys.executable, "-c", LIMITED, str(out)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == f"{out}: cannot be written: File too large; the capture has 2,000 bytes\n"
    assert out.read_bytes() == b"the old one"
    assert list(tmp_path.iterdir()) == [out]


def test_a_full_disk_is_called_that(tmp_path):
    """On a file system of 64 KiB of its own, where this system lets a user make one."""
    small = tmp_path / "small"
    small.mkdir()
    script = f"mount -t tmpfs -o size=64k none {small} && exec {sys.executable} -c '{FULL}' {small}/a.safetensors"
    argv = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    if "unshare" in done.stderr or "mount" in done.stderr:
        pytest.skip(f"no file system can be made here: {done.stderr.strip()}")
    assert done.stdout.splitlines() == [
        f"{small}/a.safetensors: the disk is full: No space left on device; the capture has 200,000 bytes",
        "[]",
    ], done.stderr


FULL = """
import sys
from pathlib import Path
from canaryd_lab.worker.canary import capture
try:
    capture.write_file(Path(sys.argv[1]), b"x" * 200000)
except ValueError as error:
    print(error)
print(list(Path(sys.argv[1]).parent.iterdir()))
"""


def test_a_written_file_has_the_rights_that_the_user_wants(tmp_path):
    """Those of the umask, as any file that a command writes."""
    before = os.umask(0o027)
    try:
        capture.write_file(tmp_path / "a", b"x")
    finally:
        os.umask(before)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o640


# --------------------------------------------------------------------------------------------------------------------
# Reading.


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda data: None, "cannot be read: No such file"),
        (lambda data: b"", "not a complete safetensors file: 0 bytes"),
        (lambda data: b"<html>not found</html>", "not a complete safetensors file"),
        (lambda data: data[: len(data) // 2], "not a complete safetensors file: .*bytes"),
        (lambda data: data[:100], "not a complete safetensors file"),
        (lambda data: data + b"\0", "1 bytes after the last tensor"),
        (lambda data: write_safetensors({"x": torch.ones(2)}, {}), "not a capture of canaryd: it has no schema"),
        (lambda data: changed(data, schema="canaryd.capture/9"), "its schema is 'canaryd.capture/9'"),
        (lambda data: changed(data, order=None), "it lacks order"),
        (lambda data: changed(data, order='["exact/none"]'), "its texts and tensors disagree"),
        (lambda data: changed(data, device="{}"), "its texts and tensors disagree"),
        (lambda data: changed(data, prompts="exact"), "its texts and tensors disagree"),
    ],
)
def test_a_file_that_is_no_capture_is_told_in_one_line(tmp_path, damage, reason):
    """With its path."""
    path = tmp_path / "a.safetensors"
    exact(path, operators=False)
    damaged = damage(path.read_bytes())
    path.unlink()
    if damaged is not None:
        path.write_bytes(damaged)
    with pytest.raises(ValueError, match=reason) as caught:
        capture.read(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def changed(data, **texts):
    """A file with other texts about it; None takes one away."""
    tensors, about = read_safetensors(data)
    return write_safetensors(tensors, {k: v for k, v in {**about, **texts}.items() if v is not None})


# --------------------------------------------------------------------------------------------------------------------
# A model of the user's own.


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A tiny Hugging Face directory."""
    pytest.importorskip("transformers", reason="Hugging Face models are captured where transformers is installed")
    from tests.checkpoints import make

    return make(tmp_path_factory.mktemp("checkpoint"))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("forced", [True, False])
def test_a_directory_is_captured_by_its_modules(tmp_path, checkpoint, forced):
    """Every layer's leaf modules under their own names, the layer as "out", logits and tokens that belong together."""
    found = taken(tmp_path / "a.safetensors", model=str(checkpoint), forced=forced)
    step = "forced" if forced else "0"
    operators = [name.split("/")[3] for name in found.tensors if name.startswith(f"reef/{step}/3/")]
    assert operators[0] == "input_layernorm"
    assert operators[-2:] == ["mlp.down_proj", "out"]
    assert {f"self_attn.{c}_proj" for c in "qkvo"} < set(operators)
    assert list(found.tensors)[1] == f"reef/{step}/input/embedding"
    chosen = found.tensors["reef/tokens"][0].tolist()
    for position, token in enumerate(chosen):
        logits = found.tensors["reef/forced/head/logits" if forced else f"reef/{position}/head/logits"][0]
        assert int(logits[position if forced else -1].argmax()) == token
    assert json.loads(found.about["environment"])["server"].startswith("transformers ")
    again = taken(tmp_path / "b.safetensors", model=str(checkpoint), forced=forced)
    assert all(torch.equal(tensor, again.tensors[name]) for name, tensor in found.tensors.items())
    with pytest.raises(ValueError, match=r"drill '9\.query': no such place; there are input\.embedding"):
        taken(tmp_path / "c.safetensors", model=str(checkpoint), drill="9.query")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_drill_reaches_into_a_directory(tmp_path, checkpoint):
    """One element of one module's result."""
    clean = taken(tmp_path / "a.safetensors", model=str(checkpoint))
    spoilt = taken(tmp_path / "b.safetensors", model=str(checkpoint), drill="2.mlp.up_proj")
    differ = [name for name, tensor in clean.tensors.items() if not torch.equal(tensor, spoilt.tensors[name])]
    assert differ[:2] == ["reef/forced/2/mlp.up_proj", "reef/forced/2/mlp.down_proj"]


def test_a_directory_that_is_no_model_is_a_reason_to_skip(tmp_path, checkpoint):
    """Empty, not there, or without a tokenizer: nothing is captured."""
    (tmp_path / "empty").mkdir()
    for directory in (tmp_path / "empty", tmp_path / "nowhere"):
        with pytest.raises((Skip, ValueError), match=directory.name):
            capture.answer(wish(tmp_path / "a.safetensors", model=str(directory)), silent)
    bare = tmp_path / "bare"
    bare.mkdir()
    for path in Path(checkpoint).iterdir():
        if not path.name.startswith("tokenizer"):
            (bare / path.name).symlink_to(path)
    with pytest.raises(Skip, match="has no tokenizer"):
        capture.answer(wish(tmp_path / "a.safetensors", model=str(bare)), silent)
