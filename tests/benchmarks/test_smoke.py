"""The benchmarks run and leave their reports; what they measure is never asserted here."""

import importlib.util
import json
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="no torch in this interpreter")


@pytest.fixture
def bench(tmp_path):
    """Run a benchmark at its smallest and return its JSON."""

    def run(name, *words, result):
        argv = [sys.executable, "-m", f"benchmarks.{name}", "--out", str(tmp_path), *map(str, words)]
        done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert (tmp_path / f"{result}.md").read_text().startswith("# ")
        return json.loads((tmp_path / f"{result}.json").read_text())

    return run


@pytest.mark.slow
@needs_torch
@pytest.mark.torch
def test_coverage(bench):
    """A flipped bit of a result is always seen, and the bits of a float32 product below the accumulator's never are."""
    quick = bench("coverage", "--levels", "quick", result="coverage-cpu")["quick"]
    for form, contents in quick["seen"].items():  # on a loaded machine those of few formats
        for seen in contents.values():
            shares = {(stage, bit): zero + one for stage, bit, zero, one in seen}
            assert all(share == 1 for (stage, _), share in shares.items() if stage == "results")
            assert form != "float32" or all(shares["products", bit] == 0 for bit in range(16))
    recall = quick["recall_per_second"]
    assert len(recall) > 1
    assert all(found["products"] > found["results"] > 0 for found in recall.values())


@needs_torch
@pytest.mark.torch
@pytest.mark.slow
def test_verified_gemm(bench):
    """Products of a processor are verified by comparison and by each digest, and the right ones are right by all."""
    (row,) = bench("verified_gemm", "--sizes", 64, "--pairs", 2, result="verified_gemm-cpu-float32")["rows"]
    assert row["ratio"]["pairs"] == 2
    assert set(row["digests"]) == {"32 bits", "32 bits of halves", "64 bits", "bytes"}


@needs_torch
@pytest.mark.torch
@pytest.mark.slow
def test_verified_gemm_beside_another_version(bench):
    """Both sides of another checkout, here of this very one, are measured in the same rounds."""
    words = ("--sizes", 64, "--depth", 128, "--pairs", 2, "--beside", ROOT)
    data = bench("verified_gemm", *words, result="verified_gemm-cpu-float32-beside")
    (row,) = data["rows"]
    assert row["beside"]["commit"] == data["machine"]["commit"]
    assert all(row["beside"][name]["pairs"] == 2 for name in ("ratio", "other", "verified", "unverified"))


@needs_torch
@pytest.mark.torch
@pytest.mark.slow
def test_another_version_runs_its_own_modules_alone(tmp_path, capfd):
    """A checkout whose canaryd would be the installed one is refused: it would be compared with itself."""
    from benchmarks import other_version

    shutil.copytree(ROOT / "benchmarks", tmp_path / "benchmarks", ignore=shutil.ignore_patterns("results"))
    with pytest.raises(SystemExit, match="ended"):
        other_version.measure(tmp_path, ["--sizes", 64], [], bursts=1, burst=1, rounds=1)
    assert "which is not in the other checkout" in capfd.readouterr().err


def test_every_side_begins_as_many_rounds():
    """Sides take turns at being first, and keep their places in what is returned."""
    from benchmarks import other_version

    called = []
    sides = [lambda side=side: called.append(side) or float(side) for side in range(4)]
    assert other_version.rotate(sides, 4) == [[0.0, 1.0, 2.0, 3.0]] * 4
    assert called[::4] == [0, 1, 2, 3]


@needs_torch
@pytest.mark.torch
def test_clean_runs_draw_what_the_probe_tests():
    """Formats with the kinds of shapes that exact_matmul gives them: FP8 has no batch, and would be refused."""
    from benchmarks import clean_runs
    from canaryd.probe import Context
    from canaryd.worker.numeric.stack import cpu
    from probes import exact_matmul

    ctx = Context(device=cpu(), level="deep", seed=1, budget=60.0)
    drawn = [make(random.Random(1)).name.partition("@")[0].split("/") for make in clean_runs.products(ctx)]
    speeds = dict.fromkeys((name[0] for name in drawn), 1e9)
    tested = [case.name.partition("@")[0].split("/") for case in exact_matmul.every_case(ctx, speeds)[0]]
    kinds = {(source, kind) for source, _, kind, _ in tested}
    assert {(source, kind) for source, _, kind, _ in drawn if ">int32" not in source} <= kinds


@needs_torch
@pytest.mark.torch
@pytest.mark.slow
def test_exact_capture(bench):
    """Every fault is counted once, by its place and what was said; a capture without a fault raises no alarm."""
    data = bench("exact_capture", "--faults", 2, "--clean", 1, "--formats", "float32", result="exact_capture")
    assert sum(number for *_, number in data["counts"]) == 16
    assert sum(n for *_, outcome, n in data["counts"] if outcome != "named") == len(data["not_named"])
    assert (data["clean"], data["false_alarms"]) == (1, 0)


def test_healthy_days(bench):
    """Hosts without a fault live through changes, and no device is accused."""
    data = bench("healthy_days", "--device-days", 9, "--days", 1, "--hours", 6, "--processes", 1, result="healthy_days")
    assert (data["hardware_accusations"], data["device_rounds"]) == ([], 36)


@pytest.mark.slow
def test_quarter(bench):
    """Each history is played and weighed: the fleet adds up, and the gate drains no sound device as hardware."""
    data = bench("quarter", "--seeds", 1, "--wrong", 1, "--sound", 1, result="quarter")
    assert sum(data["weights"].values()) == pytest.approx(10_000)
    assert {each["kind"] for each in data["lives"]} == {*data["weights"]}
    assert all(each["device"] in ("", each["defect"]) for each in data["lives"] if each["cause"] == "hardware")


@needs_torch
@pytest.mark.torch
@pytest.mark.slow
def test_engines(bench):
    """Every format is compared under every instruction set; a server serves two models, or is listed as missing."""
    words = ("--seeds", 2, "--others", 2, "--compiled", 0, "--engines", "mlx", "--level", "quick")
    data = bench("engines", *words, result="engines")
    assert {row[2] for row in data["in process"]} == {"float64", "float32", "bfloat16", "float16"}
    assert {row[0] for row in data["in process"]} == {"torch, native", "torch, avx2", "torch, baseline"}
    assert all(row[-2] > 0 == row[-1] for row in data["in process"])
    assert all(row[4] == 2 and row[-2] > 0 == row[-1] for row in data["served"])
    assert data["served"] or any("not installed" in line for line in data["not run"])


@needs_torch
@pytest.mark.torch
def test_the_simulated_cases_of_a_gpu_are_those_that_serve(monkeypatch):
    """The model is within a fifth of the H200's records; most 16-bit cases are aligned and fill the chip twice."""
    from benchmarks import case_list

    assert all(0.8 < float(ratio) < 1.2 for *_, ratio in case_list.recorded())
    monkeypatch.setattr(case_list, "SEEDS", range(48))  # kinds and layouts come in turn
    for chip in case_list.CHIPS:
        for level, waves, bound in (("quick", 0.6, 0.5), ("standard", 0.8, 0.86)):
            found = case_list.figures(chip, level, case_list.names(chip, level), case_list.BURST, digests=True)
            assert found["aligned"] >= 0.8, (chip.name, level)
            assert found["two_waves"] >= waves, (chip.name, level)
            assert found["bound"] >= bound, (chip.name, level)
            assert found["pools"] < case_list.exact_matmul.SPEC.budget[level]
