"""The built-in canary's other ways of execution: calls of fixed shapes, compiled ones, captured ones."""

import contextlib
import gc
import json
import os
import re
import subprocess
import sys
import time
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest

from canaryd.codec import to_json
from canaryd.facts import Comparison, Reading, Recording, Skipped
from canaryd.model import Device
from canaryd.probe import Context
from canaryd.worker.canary.fixed import Decoder, Slots, time_limit
from canaryd.worker.canary.golden import load_golden
from canaryd.worker.canary.model import DTYPES, KeyValues
from canaryd.worker.numeric.stack import cpu, discover
from canaryd.worker.runtime import graphs

torch = pytest.importorskip("torch", reason="the numeric worker is tested where torch is installed")
pytestmark = pytest.mark.torch

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def golden():
    return load_golden(ROOT / "probes" / "canary")


RUN = """
import json, sys
sys.path[:0] = [{root!r}, {root!r} + "/probes"]
import canary_prompts
from canaryd.codec import from_json, to_json
from canaryd.model import Device
from canaryd.probe import Context
from canaryd.worker.canary import golden
golden.COMPILING = {compiling}
device = from_json(Device, json.loads({device!r}))
ctx = Context(device=device, level={level!r}, seed=7, budget=5.0, cases={cases!r})
for fact in canary_prompts.run(ctx):
    print("FACT", json.dumps([type(fact).__name__, to_json(fact)]))
"""


def run(tmp_path, *cases, level="deep", device=None, compiling=500.0, **environment):
    """Run the probe in a process of its own, as a worker does; return its facts and what it left on disk."""
    device = json.dumps(to_json(device or cpu()))
    text = RUN.format(root=str(ROOT), compiling=compiling, device=device, level=level, cases=cases)
    homes = {name: str(tmp_path) for name in ("HOME", "TMPDIR", "XDG_CACHE_HOME")}
    env = {k: v for k, v in os.environ.items() if not k.startswith(("TORCHINDUCTOR", "TRITON"))}
    done = subprocess.run(
        [sys.executable, "-c", text], env={**env, **homes, **environment}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line[5:]) for line in done.stdout.splitlines() if line.startswith("FACT ")]
    return lines, sorted(path.name for path in tmp_path.rglob("*"))


def of(kind, lines):
    return [fact for name, fact in lines if name == kind.__name__]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [[2], [5, 6, 7, 0]])
def test_calls_of_fixed_shapes_decode_the_same(golden, dtype, rows):
    """The golden tokens, logits within the tolerance, the same bits again, whatever an earlier inference left."""
    model = golden.model.to("cpu", dtype)
    decoder = Decoder(model, len(rows), 16, 40)
    tokens, logits = decoder(golden.prompts[rows])
    assert torch.equal(tokens, golden.tokens[rows])
    assert (logits.double() - golden.logits[rows]).abs().max() < golden.tolerance[dtype] / 8
    for tensor in (*decoder.slots.keys, *decoder.slots.values):
        tensor.fill_(float("nan"))
    again = decoder(golden.prompts[rows])
    assert torch.equal(again[0], tokens)
    assert torch.equal(again[1], logits)


class Graphs:
    """What `capture` asks of torch.cuda, computed at once; the streams that it made, and what ran on which."""

    def __init__(self, monkeypatch):
        self.made, self.calls = [], []
        stream = SimpleNamespace(wait_stream=lambda _: None)
        answers = {
            "device": lambda _: contextlib.nullcontext(),
            "Stream": lambda _: self.made.append(f"stream {len(self.made)}") or Stream(self.made[-1]),
            "current_stream": lambda: stream,
            "stream": lambda given: self.on("try", given),
            "graph": lambda _, stream=None: self.on("capture", stream),
            "CUDAGraph": lambda: SimpleNamespace(replay=lambda: None),
        }
        for name, answer in answers.items():
            monkeypatch.setattr(torch.cuda, name, answer)
        graphs.aside.cache_clear()

    @contextlib.contextmanager
    def on(self, what, stream):
        self.calls.append((what, stream.name))
        yield


class Stream:
    def __init__(self, name):
        self.name = name

    def wait_stream(self, _):
        pass


def test_what_is_captured_was_tried_on_the_same_stream(golden, monkeypatch):
    """Libraries make a workspace for each stream at its first call: of 32 MiB, and never within a capture."""
    seen = Graphs(monkeypatch)
    model = golden.model.to("cpu", "float32")
    for _ in range(3):
        Decoder(model, 1, 16, 4).capture()
    assert seen.made == ["stream 0"]
    assert seen.calls == 3 * [("try", "stream 0"), ("capture", "stream 0")]
    graphs.aside.cache_clear()


def test_a_captured_graph_goes_with_its_decoder(golden, monkeypatch):
    """Not when Python next looks for cycles: each holds memory of the device that is only its own."""
    Graphs(monkeypatch)
    decoder = Decoder(golden.model.to("cpu", "float32"), 1, 16, 4)
    decoder.capture()
    left = weakref.ref(decoder)
    gc.disable()
    try:
        del decoder
        assert left() is None
    finally:
        gc.enable()
    graphs.aside.cache_clear()


def test_slots_hold_what_a_cache_holds(golden):
    """Token by token, the same keys and values at the same places, zeros behind."""
    model = golden.model.to("cpu", "float64")
    tokens = torch.cat((golden.prompts, golden.tokens), 1)[:2]
    cache, slots = KeyValues(*model.cached(2, 30)), Slots(*model.cached(2, 30))
    for part in tokens[:, :20].split([16, 1, 1, 1, 1], 1):
        model.forward(part, cache)
        model.forward(part, slots)
    assert int(slots.at) == cache.used == 20
    for ours, theirs in zip((*slots.keys, *slots.values), (*cache.keys, *cache.values), strict=True):
        assert torch.allclose(ours[:, :, :20], theirs[:, :, :20], rtol=0, atol=1e-11)
        assert not ours[:, :, 20:].any()


def test_what_takes_too_long_is_stopped():
    """Even where a callback swallows the first exception; what is quick is left alone."""
    with time_limit(30.0, "nothing"):
        pass
    started = time.monotonic()
    with pytest.raises(TimeoutError, match=r"a sleep took longer than 0\.2 s"), time_limit(0.2, "a sleep"):
        time.sleep(20)
    assert time.monotonic() - started < 10


def test_only_a_deep_run_compiles_and_only_cuda_captures(golden):
    """One format and batch a run, all in eight seeds; a graph from standard on."""
    sys.path.insert(0, str(ROOT / "probes"))
    try:
        import canary_prompts as probe
    finally:
        sys.path.pop(0)
    gpu = Device(uuid="GPU-1", backend="cuda", index=0, model="any")

    def modes(level, seed, device, path):
        tasks = probe.every_task(Context(device=device, level=level, seed=seed, budget=1.0), golden)
        return {(t.dtype, len(t.rows)) for t in tasks if t.path == path}

    every = {(dtype, batch) for dtype in DTYPES for batch in (1, 4)}
    for device in (cpu(), gpu):
        compiled = [modes("deep", seed, device, "compiled") for seed in range(8)]
        assert {len(found) for found in compiled} == {1}
        assert set.union(*compiled) == every
        assert not modes("standard", 0, device, "compiled")
    assert modes("standard", 3, gpu, "graph") == modes("deep", 3, gpu, "graph") == every
    assert not modes("quick", 3, gpu, "graph")
    assert not modes("deep", 3, cpu(), "graph")


@pytest.mark.slow
def test_a_machine_without_a_compiler_says_so(tmp_path):
    """One reason for the mode; the eager case beside it runs; nothing stays on disk."""
    cases = ("float32/compiled/b1/pier", "float32/decode/b1/pier")
    lines, left = run(tmp_path, *cases, CXX="no-such-compiler", PATH="/nonexistent")
    (skipped,) = of(Skipped, lines)
    assert skipped["case"] == "float32/compiled/b1"
    assert "cannot: " in skipped["reason"]
    assert "ompiler" in skipped["reason"]
    assert {c["case"] for c in of(Comparison, lines)} == {"float32/decode/b1/pier", "float32/decode/b1/pier/logits"}
    assert left == []


@pytest.mark.slow
def test_a_compiler_that_does_not_end_is_not_waited_for(tmp_path):
    """The limit is said; what it had begun is removed."""
    hangs = tmp_path / "bin" / "g++"
    hangs.parent.mkdir()
    hangs.write_text("#!/bin/sh\nexec sleep 600\n")
    hangs.chmod(0o755)
    (tmp_path / "home").mkdir()
    started = time.monotonic()
    lines, left = run(tmp_path / "home", "float32/compiled/b1/pier", compiling=30.0, CXX=str(hangs))
    assert time.monotonic() - started < 150
    (skipped,) = of(Skipped, lines)
    assert "torch.compile took longer than 30 s" in skipped["reason"] or "TimeoutError" in skipped["reason"]
    assert left == []


@pytest.mark.slow
def test_compiled_code_gives_the_golden_tokens(tmp_path):
    """Tokens, tolerance, recording and readings of its own; nothing is written that stays."""
    lines, left = run(tmp_path, "bfloat16/compiled/b1/pier", "bfloat16/compiled/b1/boats")
    assert of(Skipped, lines) == []
    found = of(Comparison, lines)
    assert {c["case"] for c in found} == {
        f"bfloat16/compiled/b1/{prompt}{suffix}" for prompt in ("pier", "boats") for suffix in ("", "/logits")
    }
    assert not [c for c in found if c["wrong_trials"]]
    assert {r["case"] for r in of(Recording, lines)} == {c["case"] for c in found if c["case"].endswith("/logits")}
    assert {bool(re.search(r"\d+\.\d+", r["chain"]["compiler"])) for r in of(Recording, lines)} == {True}
    labels = {"dtype": "bfloat16", "path": "compiled", "batch": "1"}
    (agreement,) = [r for r in of(Reading, lines) if r["name"] == "canary_token_agreement"]
    assert (agreement["value"], agreement["labels"]) == (1.0, labels)
    assert left == []


@pytest.mark.gpu
@pytest.mark.parametrize("path", ["graph", "compiled"])
def test_a_gpu_gives_the_golden_tokens_by_every_path(tmp_path, path):
    """Captured and compiled, one row and four, in bfloat16 and float16."""
    device = next(d for d in discover()[0] if d.backend in ("cuda", "rocm"))
    cases = [f"{dtype}/{path}/b{batch}/pier" for dtype in ("bfloat16", "float16") for batch in (1, 4)]
    lines, left = run(tmp_path, *cases, device=device)
    assert of(Skipped, lines) == []
    found = of(Comparison, lines)
    assert {c["case"] for c in found} == {case + suffix for case in cases for suffix in ("", "/logits")}
    assert not [c for c in found if c["wrong_trials"]]
    assert [name for name in left if name.startswith("canaryd-compile-")] == []


def wrapping(error):
    """Do what torch's tracer does: make an error of its own of whatever is raised inside it."""
    try:
        time.sleep(5.0)
    except TimeoutError as late:
        raise error from late


def test_a_compiler_that_wraps_the_time_limit_is_still_too_late():
    """What it raises once the time is over is the time limit; an error before is its own."""
    late = pytest.raises(TimeoutError, match=r"torch.compile took longer than 0.01 s")
    with late, time_limit(0.01, "torch.compile"):
        wrapping(RuntimeError("when making fake tensor call"))
    with pytest.raises(RuntimeError, match="its own"), time_limit(60.0, "torch.compile"):
        raise RuntimeError("its own")
