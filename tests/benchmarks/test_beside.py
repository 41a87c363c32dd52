"""The benchmark beside a server: its arithmetic, and one whole run at its smallest where somebody has the time."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="the imitation of a server multiplies by torch")
pytestmark = pytest.mark.torch

ROOT = Path(__file__).resolve().parents[2]


def turns(without, beside_it, count=5):
    """Turns that each have one rate and one latency on either side, the inverse of the rate."""
    from benchmarks import beside

    rates = {False: without, True: beside_it}
    latencies = {present: torch.full((100,), 1 / rate, dtype=torch.float64) for present, rate in rates.items()}
    return [beside.Turn(rates, latencies)] * count


def account(**changes):
    from benchmarks import beside

    return beside.Account(**{"one": 3.6, "wanted": 2.0, "taken": 0.1} | changes)


@pytest.mark.parametrize(
    ("rest", "others", "said"),
    [
        (100.0, 0.0, "reached"),
        (98.0, 0.0, "missed"),
        (100.0, 0.06, "not resolved, disturbed"),
    ],
)
def test_what_is_judged(rest, others, said):
    """Whole intervals alone decide, and nothing while others use the machine."""
    from benchmarks import beside

    judged = beside.report(turns(100.0, rest), turns(100.0, rest), account(), others, 0.003)[1]
    assert judged == {"throughput": said, "p99": said}


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="it wants a core for the server and one aside")
def test_a_whole_run(tmp_path):
    """Daemons, workers and the imitation are real; what it says of the bars is not asserted here."""
    words = ["--turns", "2", "--probes", "exact_integer", "--out", str(tmp_path)]
    argv = [sys.executable, "-m", "benchmarks.beside", *words]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    data = json.loads((tmp_path / "beside.json").read_text())
    assert (len(data["turns"]["rest"]), len(data["turns"]["rounds"])) == (2, 1)
    assert data["account"]["one"] > 0
    assert 0 < data["account"]["taken"] < 1
    assert 0 < data["worked"] < 0.1
    latencies = [requests for turn in data["turns"]["rest"] for requests in turn["requests"]]
    assert min(latencies) > 0
