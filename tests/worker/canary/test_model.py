"""The built-in canary model: its files, its robustness in numbers, the probe, and what injected faults change."""

import dataclasses
import functools
import importlib.util
import itertools
import json
import math
import shutil
from collections import Counter
from pathlib import Path

import pytest

from canaryd.codec import to_json
from canaryd.facts import Comparison, Exactness, Reading, Recording, Skipped, Subject
from canaryd.probe import Absent, Context, Skip
from canaryd.worker.canary import golden as canary_golden
from canaryd.worker.canary import model as canary_model
from canaryd.worker.canary.golden import Bench, golden_digest, load_golden, look, record
from canaryd.worker.canary.model import BadFile, Canary, read_safetensors, write_safetensors
from canaryd.worker.numeric import faults
from canaryd.worker.numeric.seeds import mix64
from canaryd.worker.numeric.session import Session
from canaryd.worker.numeric.stack import cpu, stack
from canaryd.worker.numeric.tensors import bits, strict_switches

torch = pytest.importorskip("torch", reason="the numeric worker is tested where torch is installed")
pytestmark = pytest.mark.torch

PROBES = Path(__file__).resolve().parents[3] / "probes"


def load(path):
    spec = importlib.util.spec_from_file_location(f"canaryd_test_{path.parent.name}_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def make():
    """The script that trained the model."""
    return load(PROBES.parent / "tools" / "make_canary.py")


@pytest.fixture(scope="module")
def probe():
    return load(PROBES / "canary_prompts.py")


@pytest.fixture(scope="module")
def golden():
    return load_golden(PROBES / "canary")


@pytest.fixture(scope="module")
def said():
    """golden.json."""
    return json.loads((PROBES / "canary" / "golden.json").read_text())


def context(*cases, level="quick", seed=11, budget=60.0, drill=""):
    return Context(device=cpu(), level=level, seed=seed, budget=budget, cases=cases, drill=drill)


def comparisons(facts):
    return [fact for fact in facts if isinstance(fact, Comparison)]


def recordings(facts):
    return [fact for fact in facts if isinstance(fact, Recording)]


# --------------------------------------------------------------------------------------------------------------------
# Files.


def test_a_file_gives_back_what_was_written():
    """Every format and text, bit for bit; the header is padded to eight bytes."""
    tensors = {
        "a": torch.randn(3, 5, dtype=torch.float64),
        "b": torch.randn(7).to(torch.bfloat16),
        "c": torch.tensor([[float("nan"), -0.0]], dtype=torch.float16),
        "d": torch.arange(4),
        "e": torch.randn(2, 1, 2),
    }
    data = write_safetensors(tensors, {"made": "here"})
    assert int.from_bytes(data[:8], "little") % 8 == 0
    back, metadata = read_safetensors(data)
    assert metadata == {"made": "here"}
    assert list(back) == list(tensors)
    for name, tensor in tensors.items():
        assert back[name].dtype == tensor.dtype
        assert torch.equal(bits(back[name]), bits(tensor))


def file(header, body=b"\0" * 8):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def entry(**changes):
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "0 bytes"),
        (b"\xff" * 8 + b"{}", "wanted at most"),
        (file({"a": entry()})[:-9], "bytes 0 to 8 of 0|inside the file"),
        (file(b"{"), "not JSON"),
        (file(b"\xff{}"), "not JSON"),
        (file(b"[1]"), "not an object"),
        (file(b'{"a": 1, "a": 2}'), "a name occurs twice"),
        (file({"a": 1}), "wanted dtype, shape and data_offsets"),
        (file({"a": {**entry(), "more": 1}}), "wanted dtype, shape and data_offsets"),
        (file({"a": entry(dtype="F8")}), "known dtype"),
        (file({"a": entry(dtype=4)}), "known dtype"),
        (file({"a": entry(shape=[True, 2])}), "positive sizes"),
        (file({"a": entry(shape=[-2])}), "positive sizes"),
        (file({"a": entry(shape=2)}), "positive sizes"),
        (file({"a": entry(shape=[3])}), "wanted 12 from 0"),
        (file({"a": entry(data_offsets=[0, 8, 9])}), "two numbers"),
        (file({"a": entry(data_offsets=[0, -8])}), "two numbers"),
        (file({"a": entry(data_offsets=[8, 16])}, b"\0" * 16), "wanted 8 from 0"),
        (file({"a": entry(), "b": entry()}), "wanted 8 from 8"),
        (file({"a": entry(data_offsets=[0, 8])}, b"\0" * 9), "1 bytes after"),
        (file({"__metadata__": {"a": 1}}, b""), "wanted texts"),
    ],
)
def test_a_file_that_the_format_forbids_is_refused(data, reason):
    """Each with its own reason, none with another exception."""
    with pytest.raises(BadFile, match=reason):
        read_safetensors(data)


def test_a_model_whose_sizes_and_tensors_disagree_is_refused(golden):
    """Missing sizes, sizes that are no numbers, and a tensor of another shape are named."""
    data = canary_model.save(golden.model)
    again = canary_model.load(data)
    assert again.shape == golden.model.shape
    tensors, metadata = read_safetensors(data)
    for wrong, reason in (
        ({}, "sizes of a model"),
        ({**metadata, "heads": "four"}, "sizes of a model"),
        ({**metadata, "heads": "0"}, "sizes of a model"),
        ({**metadata, "inner": "255"}, r"0\.down: \(128, 256\), wanted \(128, 255\)"),
    ):
        with pytest.raises(BadFile, match=reason):
            canary_model.load(write_safetensors(tensors, wrong))


def test_what_ships_is_small_and_the_same_in_every_format(golden, make):
    """At most 4 MB; every weight is a normal number of bfloat16 and of float16, or zero."""
    assert sum(path.stat().st_size for path in (PROBES / "canary").iterdir() if path.is_file()) < 4_000_000
    for tensor in golden.model.weights.values():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, make.narrow(tensor))
        assert torch.equal(tensor.double(), tensor.to(torch.float16).double())
    # Zero as a golden token would hide the commonest corruption.
    assert int(golden.tokens.min()) > 0
    assert golden.prompts.shape[1] > 8
    assert golden.tokens.shape[1] >= 32


# --------------------------------------------------------------------------------------------------------------------
# Goldens and robustness.


def test_the_goldens_are_recomputed_from_the_weights(make):
    """Digests, tokens, margins and float64 logits hold, and plain Python gives the same logits."""
    assert make.check(["code"]) == []


def test_the_recomputation_notices_what_was_changed(make, tmp_path, monkeypatch):
    """A weight, a token or a margin that was changed is not confirmed, digests made to fit or not."""
    shutil.copytree(PROBES / "canary", tmp_path / "canary")
    monkeypatch.setattr(make, "MODEL", tmp_path / "canary")
    file = tmp_path / "canary" / "weights.safetensors"
    model = canary_model.load(file.read_bytes())
    model.weights["1.up"][3, 4] += 0.5
    file.write_bytes(canary_model.save(model))
    wrong = make.check(["pier"])
    assert {"weights: digest differs", "float64 logits differ", "pier: plain Python gives other logits"} <= {*wrong}
    file.write_bytes((PROBES / "canary" / "weights.safetensors").read_bytes())
    golden = json.loads((tmp_path / "canary" / "golden.json").read_text())
    golden["prompts"]["boats"]["margins"][7] += 0.01
    (tmp_path / "canary" / "golden.json").write_text(json.dumps(golden))
    assert make.check([]) == ["golden.json: digest differs", "boats: margins differ"]
    golden["sha256"] = golden_digest(golden)
    (tmp_path / "canary" / "golden.json").write_text(json.dumps(golden))
    assert make.check([]) == ["boats: margins differ"]


@pytest.mark.slow
@pytest.mark.parametrize("stack", ["native", "avx2", "baseline"])
def test_robust_prompts_are_robust(make, golden, said, stack):
    """Every format, path and batch gives the tokens; the margin is 20 errors wide, the tolerance 8; in numbers."""
    files = [PROBES / "canary" / f"{name}.safetensors" for name in ("weights", "reference")]
    found = make.measure_stack(stack, *files)
    margin = make.margins(golden.logits).min().item()
    assert set(found) == set(canary_model.DTYPES)
    for dtype, seen in found.items():
        print(f"{stack} {dtype}: error {seen['error']:.3g}, margin {seen['margin']:.3f}, in float64 {margin:.3f}")
        assert seen["right"], dtype
        assert 8 * seen["error"] <= said["tolerance"][dtype]
        assert seen["margin"] >= margin - 2 * seen["error"]
    assert margin >= 20 * max(found["bfloat16"]["error"], found["float16"]["error"])
    # Even a device at the tolerance of every logit would give the same tokens.
    assert margin > 2 * max(said["tolerance"].values())


@pytest.mark.slow
def test_the_simulated_errors_are_those_that_ship(make, golden, said):
    """The larger half of the tolerance can be had again from the weights: a random rounding at every operator."""
    with torch.no_grad():
        model = golden.model.to("cpu", "float64")
        for dtype in ("float32", "bfloat16"):
            assert make.simulate(model, dtype, golden.logits) == pytest.approx(said["simulated_error"][dtype], rel=0.05)
            assert said["tolerance"][dtype] >= 8 * said["simulated_error"][dtype] * 0.999


def test_training_learns_from_the_seed(make, monkeypatch, capsys):
    """A few steps of the script's training lower its loss and leave weights that every format holds."""
    monkeypatch.setattr(make, "STEPS", 4)
    model = make.train()
    losses = [float(line.split("loss ")[1].split(",")[0]) for line in capsys.readouterr().out.splitlines()]
    assert len(losses) == 2
    assert losses[1] < losses[0]
    assert set(model.weights) == set(make.SHAPE.tensors())
    assert all(torch.equal(t, make.narrow(t)) for t in model.weights.values())


def test_a_cache_continues_as_if_all_had_been_given_at_once(golden):
    """Pieces of any size through the KV cache give the logits of one pass; rows do not see each other."""
    model = golden.model.to("cpu", "float64")
    tokens = torch.cat((golden.prompts, golden.tokens), 1)[:3]
    whole = model.forward(tokens)
    cache = canary_model.KeyValues(*model.cached(3, tokens.shape[1]))
    parts = [model.forward(part, cache) for part in tokens.split([5, 1, 1, 20, 29], 1)]
    assert torch.allclose(torch.cat(parts, 1), whole, rtol=0, atol=1e-11)
    assert torch.allclose(model.forward(tokens[1:2]), whole[1:2], rtol=0, atol=1e-11)
    assert cache.used == tokens.shape[1]


# --------------------------------------------------------------------------------------------------------------------
# The probe.


def test_a_quick_run_is_clean_and_covers_every_format(probe, golden):
    """One prompt a format, both paths, tokens and logits, and the weights; other seeds take other prompts."""
    facts = list(probe.run(context()))
    found = comparisons(facts)
    assert not [c for c in found if c.wrong]
    paths = Counter(tuple(c.case.split("/")[:2]) for c in found)
    assert paths == {(d, p): n for d in canary_model.DTYPES for p, n in (("decode", 2), ("forced", 2), ("weights", 1))}
    exactness = {(c.case.rpartition("/")[2] == "weights", c.exactness) for c in found}
    assert exactness == {(False, Exactness.MARGIN), (True, Exactness.UNIVERSAL)}
    readings = {f.key: f.value for f in facts if isinstance(f, Reading)}
    mode = "{batch=1,dtype=float32,path=decode}"
    assert readings[f"canary_token_agreement{mode}"] == 1.0
    assert 0 < readings[f"canary_logit_distance{mode}"] < 1 / 8
    assert readings[f"canary_margin_min{mode}"] > 17
    assert readings["canary_sensitive_margin{dtype=float64,prompt=0}"] > 0
    absent = {f.name for f in facts if isinstance(f, Absent)}
    assert f"canary_first_difference{mode}" in absent
    prompts = {t.prompt for seed in range(8) for t in probe.every_task(context(seed=seed), golden) if t.rows}
    assert prompts == set(golden.names)


def test_a_standard_run_takes_every_prompt_path_and_batch(probe, golden):
    """All of it, once, all right; a second run gives the same digests."""
    tasks = probe.every_task(context(level="standard"), golden)
    assert len({t.name for t in tasks}) == len(tasks) == 4 * (2 * 2 * 8 + 2)
    names = [f"{dtype}/{path}/b4/pier" for dtype in canary_model.DTYPES for path in ("decode", "forced")]
    runs = [comparisons(probe.run(context(*names, level="standard"))) for _ in range(2)]
    assert [c.case for c in runs[0]] == [
        name + suffix for name in probe_order(names, runs[0]) for suffix in ("", "/logits")
    ]
    assert not [c for c in runs[0] if c.wrong]
    assert runs[0] == runs[1]
    assert all(bool(c.digest) == c.case.endswith("/logits") for c in runs[0])


def probe_order(names, found):
    """The cases in the order in which they were met, each once."""
    met = list(dict.fromkeys(c.case.removesuffix("/logits") for c in found))
    assert sorted(met) == sorted(names)
    return met


def test_a_deep_run_repeats_until_its_time_is_over(probe):
    """One case, asked for alone, gets all of the budget."""
    (tokens, logits) = comparisons(probe.run(context("float32/forced/b1/code", level="deep", budget=1.0)))
    assert tokens.trials == logits.trials > 5


def test_a_spent_budget_is_said_aloud(probe):
    """Each format has one turn; what no longer fits is skipped with the reason; weights are compared in any case."""
    facts = list(probe.run(context(level="standard", budget=1e-6)))
    assert len([c for c in comparisons(facts) if c.case.endswith("/weights")]) == 4
    skipped = [f for f in facts if isinstance(f, Skipped)]
    assert len(skipped) == 4 * 2 * 2 * 8 - 4
    assert all("budget of 1e-06 s was spent" in f.reason for f in skipped)


@pytest.fixture(scope="module")
def clean(probe):
    """The digests of a clean run by case, for each seed."""
    return functools.cache(lambda seed: {r.case: r.digest for r in recordings(probe.run(context(seed=seed)))})


@pytest.mark.parametrize("fault", faults.FAULTS)
@pytest.mark.parametrize("seed", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_every_drill_is_detected(probe, clean, fault, seed):
    """Each fault is seen, told in words, and a one-shot fault is gone after fresh uploads."""
    facts = list(probe.run(context(drill=fault, seed=seed)))
    found = comparisons(facts)
    struck = {r.case for r in recordings(facts) if r.digest != clean(seed)[r.case]}
    wrong = [c for c in found if c.wrong]
    assert wrong
    assert {c.subject for c in wrong} == {Subject.DEVICE}
    assert struck >= {c.case for c in wrong if c.case.endswith("/logits")}
    assert all(json.dumps(to_json(fact), allow_nan=False) for fact in facts)
    if fault == "stuck":
        assert {c.case for c in wrong} == {f"{dtype}/weights" for dtype in canary_model.DTYPES}
        assert all("only bit 0 (lowest of the mantissa) is flipped" in c.evidence.pattern for c in wrong)
    elif fault == "consistent":
        assert {c.case for c in wrong} >= {c.case for c in found if c.case.count("/") == 3}
        assert {c.case for c in wrong if c.case.endswith("/logits")}  # not all: bfloat16's tolerance is wide
        assert {(c.evidence.repeats_wrong, c.evidence.repeats) for c in wrong} == {(3, 3)}
    else:
        (only,) = wrong
        assert "position " in only.evidence.pattern
        assert (only.evidence.repeats_wrong, only.evidence.repeats) == (0, 3)
        assert only.evidence.wrong == (2 if fault == "swap" else 1)


def test_cases_and_faults_that_are_not_there_are_reasons_to_skip(probe):
    """What was asked for stands in the text; a fault that met nothing is no clean drill."""
    with pytest.raises(Skip, match=r"no case matches float32/decode/b2; it has e.g. float32/decode/b"):
        list(probe.run(context("float32/decode/b2")))
    with pytest.raises(Skip, match="unknown fault 'melt'"):
        list(probe.run(context(drill="melt")))
    with pytest.raises(Skip, match="'flip' was not injected"):
        list(probe.run(context("float32/weights", drill="flip")))


def test_a_case_can_be_asked_for_by_its_logits_alone(probe):
    """A confirmation names what was wrong, and gets that."""
    (logits,) = comparisons(probe.run(context("float16/decode/b4/copper/logits")))
    assert logits.case == "float16/decode/b4/copper/logits"
    assert {c.case for c in comparisons(probe.run(context("bfloat16/weights", "float32/forced/b1/pier")))} == {
        *("bfloat16/weights", "float32/forced/b1/pier", "float32/forced/b1/pier/logits")
    }


def test_a_format_that_the_device_refuses_is_skipped(probe, monkeypatch):
    """With torch's reason; the others run. A failure that is no refusal ends the run."""
    honest = canary_model.decode

    def refuse(error):
        def decode(model, prompts, count):
            if model.weights["norm"].dtype == torch.float16:
                raise error
            return honest(model, prompts, count)

        return decode

    monkeypatch.setattr(canary_golden, "decode", refuse(RuntimeError("\"addmm\" not implemented for 'Half'")))
    facts = list(probe.run(context()))
    assert [f.case for f in facts if isinstance(f, Skipped)] == ["float16"]
    assert {c.case.split("/")[0] for c in comparisons(facts)} == {"float64", "float32", "bfloat16"}
    monkeypatch.setattr(canary_golden, "decode", refuse(RuntimeError("CUDA error: an illegal memory access")))
    with pytest.raises(RuntimeError, match="illegal"):
        list(probe.run(context()))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("weights.safetensors", "weights.safetensors has SHA-256"),
        ("reference.safetensors", "reference.safetensors has SHA-256"),
        ("golden.json", "golden.json"),
    ],
)
def test_damaged_files_accuse_the_installation(probe, tmp_path, monkeypatch, name, reason):
    """One flipped bit on disk, an empty file, or none: the run is skipped, so the device is unknown, not wrong."""
    shutil.copytree(PROBES / "canary", tmp_path / "canary")
    monkeypatch.setattr(probe, "FILES", tmp_path / "canary")
    path = tmp_path / "canary" / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    for damage in (bytes(data), bytes(data[:1000]), b""):
        path.write_bytes(damage)
        with pytest.raises(Skip, match=f"{reason}.*This installation is damaged"):
            list(probe.run(context()))
    path.unlink()
    with pytest.raises(Skip, match=f"{name} cannot be read: No such file"):
        list(probe.run(context()))


# --------------------------------------------------------------------------------------------------------------------
# Comparing.


def answer(golden, rows, dtype="float32"):
    """The golden's own answer, as a device would give it."""
    return golden.tokens[rows].clone(), golden.logits[rows].to(getattr(torch, dtype))


def test_the_first_wrong_token_is_named_and_what_follows_is_not_held_against_decoding(golden):
    """Behind a wrong token decoding answers another question; a forced path is held to all of its logits."""
    rows = [2, 5]
    tokens, logits = answer(golden, rows)
    tokens[1, 7:] = 1
    logits[1, 8:] += 5.0
    seen = look(golden, rows, "float32", "decode", tokens, logits)
    assert seen.first == 7
    assert seen.agreement == 1 - 33 / 80
    assert seen.tokens.pattern.startswith(
        f"position 7 of row 1: token 1 instead of {int(golden.tokens[5, 7])}, which leads"
    )
    assert seen.logits is None
    assert seen.distance < 1e-2
    forced = look(golden, rows, "float32", "forced", tokens, logits)
    assert forced.logits.wrong == 32 * 256
    assert forced.logits.pattern.startswith("position 8 of row 1, token 0: ")
    assert forced.distance == pytest.approx(5.0 / golden.tolerance["float32"], rel=1e-3)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_logit_that_is_not_finite_is_wrong_by_itself(golden, value):
    """Though every token is right; distance and margin are then unknown."""
    tokens, logits = answer(golden, [0])
    logits[0, 39, 200] = value
    seen = look(golden, [0], "float32", "decode", tokens, logits)
    assert seen.tokens is None
    assert (seen.logits.wrong, seen.logits.nonfinite) == (1, 1)
    assert seen.logits.first[0][0] == (0, 39, 200)
    assert "1 logits not finite" in seen.logits.pattern
    assert seen.distance is seen.margin is None


@pytest.mark.parametrize("dtype", canary_model.DTYPES)
def test_the_tolerance_is_the_border(golden, dtype):
    """Half of it is right, half more than it is wrong: in one logit of ten thousand."""
    for share, wrong in ((0.5, False), (-0.5, False), (1.5, True), (-1.5, True)):
        tokens, logits = answer(golden, [3], "float64")
        logits[0, 20, 9] += share * golden.tolerance[dtype]
        seen = look(golden, [3], dtype, "forced", tokens, logits)
        assert (seen.logits is not None) is wrong
        assert seen.wrong is wrong
        assert seen.distance == pytest.approx(abs(share), rel=1e-2)


# --------------------------------------------------------------------------------------------------------------------
# Recordings.


def test_a_recording_says_what_was_given(probe, golden, said):
    """Tokens, log probabilities and margins of the first row, in plain arithmetic; chain; one per logits case."""
    facts = list(probe.run(context("float32/decode/b4/pier")))
    (recording,) = recordings(facts)
    (logits,) = [c for c in comparisons(facts) if c.case.endswith("/logits")]
    assert (recording.case, recording.digest) == (logits.case, logits.digest)
    row = golden.names.index("pier")
    assert recording.tokens == tuple(str(t) for t in golden.tokens[row].tolist())
    assert recording.text == said["prompts"]["pier"]["continuation"]
    for position in (0, 17, 39):
        given = sorted(golden.logits[row, position].tolist())
        rest = sum(math.exp(value - given[-1]) for value in given[:-1])
        assert recording.values[position] == pytest.approx(-math.log1p(rest), rel=1e-3)
        assert recording.margins[position] == pytest.approx(given[-1] - given[-2], abs=1e-3)
    assert recording.chain["checkpoint"] == said["weights_sha256"][:16]
    assert set(recording.chain) == {"checkpoint", "dtype", "prompt", "settings"}
    other = recordings(probe.run(context("float32/decode/b4/boats", "float32/sensitive")))
    assert {r.case for r in other} >= {"float32/sensitive"}
    assert all(r.chain["settings"] == recording.chain["settings"] for r in other)
    assert all(r.chain["prompt"] != recording.chain["prompt"] for r in other)


def test_what_is_not_finite_or_no_token_has_no_value(golden):
    """None, never NaN; a token that does not exist is recorded as it came."""
    tokens, logits = answer(golden, [0])
    tokens[0, 3], logits[0, 5, 9] = 1 << 62, float("nan")
    recording = record("any", {}, tokens, logits)
    assert [i for i, v in enumerate(recording.values) if v is None] == [3, 5]
    assert [i for i, v in enumerate(recording.margins) if v is None] == [5]
    assert recording.tokens[3] == str(1 << 62)
    assert recording.text[3] == "?"
    json.dumps(to_json(recording), allow_nan=False)


def test_learning_a_baseline_repeats_every_case(probe):
    """Three recordings of a case where the budget allows; one where nothing is learnt, or nothing is left."""
    cases = ("float32/forced/b1/pier", "bfloat16/sensitive")
    for baselining, budget, count in ((True, 60.0, 3), (False, 60.0, 1), (True, 1e-6, 1)):
        ctx = dataclasses.replace(context(*cases, budget=budget), baselining=baselining)
        found = Counter(r.case for r in recordings(probe.run(ctx)))
        assert found == {"float32/forced/b1/pier/logits": count, "bfloat16/sensitive": count}


@pytest.mark.slow
def test_recordings_are_the_same_on_any_core_and_number_of_threads(probe):
    """20 runs: other seeds take other places, one core or all with one thread or two; every case has one digest."""
    names = [
        f"{dtype}/{rest}" for dtype in canary_model.DTYPES for rest in ("forced/b1/pier", "forced/b4/code", "sensitive")
    ]
    names += ["float32/decode/b1/boats", "bfloat16/decode/b1/pier"]
    digests, places, chains = {}, set(), {}
    threads = torch.get_num_threads()
    try:
        for seed in range(20):
            torch.set_num_threads(2 if seed % 5 == 0 else 1)
            facts = list(probe.run(context(*names, seed=seed)))
            places |= {str(c.place) for c in comparisons(facts) if c.place.unit}
            for recording in recordings(facts):
                digests.setdefault(recording.case, set()).add(recording.digest)
                chains.setdefault(recording.case, set()).add(recording.chain_id)
    finally:
        torch.set_num_threads(threads)
    assert len(digests) == len(names)
    assert {len(found) for found in [*digests.values(), *chains.values()]} == {1}
    assert {"the only thread", "all 2 threads"} < places
    assert len(places) > 2
    assert "threads" in stack(cpu(), "")


# --------------------------------------------------------------------------------------------------------------------
# A campaign of injected faults.

KINDS = {
    # An integer view of one element → what it becomes; widths of sign, exponent, mantissa by format.
    "exponent, lowest bit": lambda value, mantissa, width: value ^ (1 << mantissa),
    "exponent, highest bit": lambda value, mantissa, width: value ^ (1 << (width - 2)),
    "sign": lambda value, mantissa, width: value ^ -(1 << (width - 1)),
    "mantissa, highest bit": lambda value, mantissa, width: value ^ (1 << (mantissa - 1)),
    "zeroed": lambda value, mantissa, width: 0,
}
MANTISSA = {"float64": 52, "float32": 23, "bfloat16": 7, "float16": 10}


def strike(tensor, at, kind, dtype):
    """Change one element of a contiguous tensor in place; return whether its bits changed."""
    raw, width = bits(tensor).view(-1), tensor.element_size() * 8
    before = int(raw[at % raw.numel()])
    after = KINDS[kind](before, MANTISSA[dtype], width)
    after = (after + (1 << (width - 1))) % (1 << width) - (1 << (width - 1))
    raw[at % raw.numel()] = after
    return after != before


def points(golden):
    """The names of every point that a watcher sees, in order."""
    names = []
    model = Canary(golden.model.shape, golden.model.weights, lambda name, tensor: names.append(name) or tensor)
    model.forward(golden.prompts[:1])
    return names


def oracle(golden, rows, dtype, clean, struck):
    """What a fault did, from the clean run on this machine: shares nothing with `look` but the tolerance."""
    if all(torch.equal(bits(a), bits(b)) for a, b in zip(clean, struck, strict=True)):
        return "no bit of a logit"
    moved = (struck[1].double() - clean[1].double()).abs()
    own = (clean[1].double() - golden.logits[rows]).abs().max() / golden.tolerance[dtype]
    if not torch.equal(clean[0], struck[0]):
        return "a token"
    worst = float(moved.max() / golden.tolerance[dtype]) if torch.isfinite(moved).all() else float("inf")
    if worst > 1 + own:
        return "a logit, beyond the tolerance"
    return "a logit, within the tolerance" if worst < 1 - own else "near the tolerance"


def why_unseen(golden, point, index):
    """Say why a struck activation changed no bit of a logit, from where it lies: index (row, …) of its tensor."""
    name = point.rpartition(".")[2]
    position = index[3] if name in ("scores", "softmax") else index[2] if name.startswith("rotated") else index[1]
    if name in ("scores", "softmax") and index[4] > position:
        return "masked"
    last = f"{golden.model.shape.layers - 1}."
    if point.startswith(last) or "." not in point:
        read_by_later = name in ("key", "value", "keys", "values", "rotated_key", "attention_norm")
        if not read_by_later and position < golden.prompts.shape[1] - 1:
            return "a prompt's position, of which no logit is read"
    return "below the rounding"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_injected_faults_are_detected_and_the_rest_is_counted(golden, dtype):
    """One element of every weight, every activation and the KV cache of every layer, five kinds of fault.

    What changes a token or moves a logit beyond the tolerance is detected, by the scored or the decoded path; what
    does not is not reported; stored weights are compared bit for bit, so that every struck weight is found there.
    """
    rows, count = [1], golden.tokens.shape[1]
    prompts, wanted = golden.prompts[rows], golden.tokens[rows]
    draw = (mix64(i) >> 1 for i in itertools.count(77))
    found = Counter()
    with strict_switches(), torch.inference_mode():
        model = golden.model.to("cpu", dtype)
        clean = {
            "forced": canary_model.score(model, prompts, wanted),
            "decode": canary_model.decode(model, prompts, count),
        }
        known = {path: record("clean", {}, *answer) for path, answer in clean.items()}

        def judge(where, kind, path, tokens, logits):
            did = oracle(golden, rows, dtype, clean[path], (tokens, logits))
            seen = look(golden, rows, dtype, path, tokens, logits)
            if did in ("a token", "a logit, beyond the tolerance"):
                assert seen.wrong, (where, kind, did)
            elif did != "near the tolerance":
                assert not seen.wrong, (where, kind, did)
            recording = record("struck", {}, tokens, logits)
            assert (recording.digest != known[path].digest) == (did != "no bit of a logit")
            assert seen.digest == recording.digest
            found["recorded", "another digest"] += recording.digest != known[path].digest
            found[where, did] += 1
            return did

        for (name, given), kind in itertools.product(model.weights.items(), KINDS):
            struck = model.to("cpu", dtype)
            if not strike(struck.weights[name], next(draw), kind, dtype):
                found["weight", "the element already was so"] += 1
                continue
            assert not torch.equal(bits(struck.weights[name]), bits(given))
            judge("weight", kind, "forced", *canary_model.score(struck, prompts, wanted))
        for point, kind in itertools.product(points(golden), KINDS):
            at = next(draw)

            index = []

            def hit(name, tensor, point=point, kind=kind, at=at, index=index):
                if name != point:
                    return tensor
                tensor = tensor.clone(memory_format=torch.contiguous_format)
                index += [int(i) for i in torch.unravel_index(torch.tensor(at % tensor.numel()), tensor.shape)]
                strike(tensor, at, kind, dtype)
                return tensor

            watched = Canary(model.shape, model.weights, hit)
            if (
                judge("activation", kind, "forced", *canary_model.score(watched, prompts, wanted))
                == "no bit of a logit"
            ):
                found["unseen", why_unseen(golden, point, index)] += 1
        for layer, half, kind in itertools.product(range(model.shape.layers), ("keys", "values"), KINDS):
            at = next(draw)

            class Struck(canary_model.KeyValues):
                def extend(self, i, key, value, layer=layer, half=half, kind=kind, at=at):
                    if i == layer and self.used == 24:  # once, in the midst of decoding, in what is already stored
                        stored = getattr(self, half)[layer]
                        where = torch.arange(stored.numel()).view(stored.shape)[:, :, :24].flatten()
                        strike(stored, int(where[at % where.numel()]), kind, dtype)
                    return super().extend(i, key, value)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(canary_model, "KeyValues", Struck)
                judge("KV cache", kind, "decode", *canary_model.decode(model, prompts, count))
    for place in ("weight", "activation", "KV cache", "unseen"):
        print(f"\n{dtype} {place}: " + ", ".join(f"{n} {did}" for (p, did), n in sorted(found.items()) if p == place))
    visible = sum(n for (_, did), n in found.items() if did in ("a token", "a logit, beyond the tolerance"))
    changed = visible + sum(
        n for (_, did), n in found.items() if did.endswith(("within the tolerance", "near the tolerance"))
    )
    print(f"{dtype}: {visible} of {changed} faults that changed a bit of a logit were seen by tokens or tolerance")
    print(f"{dtype}: {found['recorded', 'another digest']} of {changed} by the recording's digest")
    assert found["recorded", "another digest"] == changed > 400
    assert found["unseen", "below the rounding"] < 0.01 * changed
    assert visible > (0.75 if dtype == "float32" else 0.02) * changed


@pytest.mark.parametrize("dtype", canary_model.DTYPES)
def test_every_struck_weight_is_found_in_memory(probe, golden, dtype):
    """The lowest bit of one element of each tensor: the read-back names the tensor and the element."""
    bench = Bench(Session(context()), golden)
    bench.prepare(dtype)
    assert not bench.weights(dtype).wrong
    for number, name in enumerate(golden.model.weights):
        tensor = bench.models[dtype].weights[name]
        struck = (number * 977) % tensor.numel()
        bits(tensor).view(-1)[struck] ^= 1
        (evidence,) = [bench.weights(dtype).evidence]
        bits(tensor).view(-1)[struck] ^= 1
        assert evidence.wrong == 1
        assert dict(evidence.bits) == {"0": 1}
        assert evidence.pattern.startswith(f"weights {name} changed in memory; {name}: element [")
