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


@pytest.fixture
def one_probe(tmp_path):
    """Return a configuration under which only the cheapest probe runs."""
    path = tmp_path / "canaryd.yaml"
    names = {path.stem for path in (ROOT / "probes").glob("*.py")} - {"exact_integer"}
    off = "".join(f"  {name}: {{enabled: false}}\n" for name in sorted(names) if not name.endswith("_telemetry"))
    path.write_text(f"schedule: {{level: quick}}\nprobes:\n{off}")
    return path


@needs_torch
@pytest.mark.torch
def test_verified_gemm(bench):
    """Verified products are timed against unverified ones, and the account is complete."""
    data = bench("verified_gemm", "--sizes", 48, "--pairs", 2, result="verified_gemm-cpu-float32")
    (row,) = data["rows"]
    assert (row["size"], row["ratio"]["pairs"], row["judged"]) == (48, 2, "no target")
    assert set(row["account"]) == {"product", "comparison", "spoiling", "making", "upload", "host", "digest"}
    assert data["machine"]["cpu"]


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
def test_clean_runs(bench):
    """Every run is distinct and right, is counted in each of its groups, and a flipped bit is found."""
    words = ("--runs", 20, "--instruction-sets", "native", "--threads", 1)
    data = bench("clean_runs", *words, result="clean_runs")
    assert data["clean"]
    assert data["distinct_keys"] == data["distinct_goldens"] == data["outcomes"]["right"] == 20
    assert (data["controls_found"], data["controls_missed"]) == (3, 0)
    assert all(sum(n["right"] for n in names.values()) == 20 for names in data["groups"].values())


@needs_torch
@pytest.mark.torch
@pytest.mark.slow
def test_detection(bench):
    """Every class and format is injected at least once, other faults too, and each rate has its campaign."""
    data = bench("detection", "--injections", 1, "--campaigns", 1, result="detection")
    assert all(row["injected"] == 1 for row in data["rows"])
    assert all(part["injected"] == 2 for part in data["others"].values())
    assert [len(campaign["waits"]) for campaign in data["campaigns"]] == [1, 1, 1, 1]


@needs_torch
@pytest.mark.torch
@pytest.mark.slow
def test_exact_capture(bench):
    """Every fault is counted once, by its place and what was said; a capture without a fault raises no alarm."""
    data = bench("exact_capture", "--faults", 2, "--clean", 1, "--formats", "float32", result="exact_capture")
    assert sum(number for *_, number in data["counts"]) == 16
    assert sum(n for *_, outcome, n in data["counts"] if outcome != "named") == len(data["not_named"])
    assert (data["clean"], data["false_alarms"]) == (1, 0)


@pytest.mark.slow
def test_footprint(bench, one_probe):
    """The daemon is measured after its first round and has nothing foreign mapped."""
    words = ("--config", one_probe, "--seconds", 1, "--quiet", 0.5)
    data = bench("footprint", *words, result="footprint")
    assert data["foreign"] == []
    assert data["memory"]["resident"] > data["memory"]["proportional"] > 0
    assert data["rest"]["scrapes"] == 1


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler here: the stand-in for NVML cannot be built")
def test_telemetry(bench):
    """A sweep is taken apart, a daemon that polls 8 GPUs is watched and scraped, and its own time accounted for."""
    few = ("--rounds", 2, "--sweeps", 1, "--scrapes", 5, "--period", 5, "--settled", 5, "--account", 6)
    data = bench("telemetry", *few, result="telemetry")
    rows, scrapes = data["sweep"]["worker_ms"], data["daemon"]["scrapes_ms"]  # twice as many, where others are busy
    assert 2 <= len(rows) <= 4
    assert {len(row) for row in rows} == {len(data["sweep"]["parts"])}
    assert 1 <= len(data["daemon"]["sweeps"]) <= 2
    assert 5 <= len(scrapes) <= 10
    assert data["daemon"]["series"] > 8 * 100
    assert data["daemon"]["memory"]["daemon"]["resident"] > data["daemon"]["memory"]["daemon"]["proportional"] > 0
    assert data["account"]["sweeps"] >= 1
    assert data["account"]["total"] >= data["account"]["items"]["the page: rendering"] > 0


@pytest.mark.slow
def test_check_time(bench):
    """A check of one sound processor ends with a verdict, beside another tree too; products are counted by record."""
    words = ("--runs", 1, "--beside", ROOT)
    data = bench("check_time", *words, result="check_time-quick-beside")
    for (checked,) in data["checks"].values():
        assert checked["state"] == "healthy"
        assert 0 < checked["float32"] < checked["operations"]


def test_healthy_days(bench):
    """Hosts without a fault live through changes, and no device is accused."""
    data = bench("healthy_days", "--device-days", 9, "--days", 1, "--hours", 6, "--processes", 1, result="healthy_days")
    assert (data["hardware_accusations"], data["device_rounds"]) == ([], 36)


@pytest.mark.slow
def test_scrape_is_measured_in_every_format(tmp_path):
    """Of one device, beside this same version: what it says of the target is not asserted here."""
    words = ("--blocks", 1, "--scrapes", 1, "--devices", 1, "--beside", ROOT, "--out", tmp_path)
    argv = [sys.executable, "-m", "benchmarks.scrape", *map(str, words)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    assert len(json.loads((tmp_path / "scrape-beside.json").read_text())["formats"]) == 2 * 4


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
