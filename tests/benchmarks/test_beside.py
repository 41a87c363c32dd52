"""The benchmark beside a server: its arithmetic, and one whole run at its smallest where somebody has the time."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the imitation of a server multiplies by torch")
pytestmark = pytest.mark.torch

ROOT = Path(__file__).resolve().parents[2]
WORKED = {"rest": 0.003, "rounds": 0.2}
"""Share of the processor time by state, as `beside.report` takes it."""


def turn(none, rest, rounds):
    """A turn whose states each have one rate and one latency, its inverse."""
    from benchmarks import beside

    rates = dict(zip(beside.STATES, (none, rest, rounds), strict=True))
    return beside.Turn(rates, {state: [1 / rate] * 100 for state, rate in rates.items()})


def test_a_quantile_of_a_mixture():
    """One part in a hundred of slow ones is beyond the 99th percentile; a little more is in it."""
    from benchmarks import beside

    assert beside.quantile([(1.0, range(1, 101))]) == 99
    assert beside.quantile([(0.991, [1.0]), (0.009, [5.0])]) == 1.0
    assert beside.quantile([(0.98, [1.0] * 7), (0.02, [5.0] * 3)]) == 5.0
    assert beside.quantile([(1.0, [2.0]), (0.0, [5.0])]) == 2.0


def test_an_hour_is_made_of_its_parts():
    """Half the throughput for a hundredth of the time costs half of a hundredth."""
    from benchmarks import beside

    throughput, latency = beside.mixed([turn(100.0, 100.0, 50.0)] * 5, 0.01)
    assert throughput.median == pytest.approx(0.995)
    assert latency.median == 1.0
    assert beside.mixed([turn(100.0, 100.0, 50.0)] * 5, 0.02)[1].median == pytest.approx(0.5)


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

    judged = beside.report([turn(100.0, rest, rest)] * 5, 0.25, 0.02, others, WORKED)[1]
    assert judged == {"throughput": said, "p99": said}


def test_noise_is_not_resolved():
    """An interval on both sides of a bar decides nothing."""
    from benchmarks import beside

    turns = [turn(100.0, rate, rate) for rate in (90.0, 110.0) * 5]
    assert beside.report(turns, 0.25, 0.02, 0.0, WORKED)[1] == {"throughput": "not resolved", "p99": "not resolved"}


@pytest.mark.slow
def test_a_whole_run(tmp_path):
    """Daemons, workers and the imitation are real; what it says of the bars is not asserted here."""
    words = ["--turns", "2", "--seconds", "2", "--probes", "exact_integer", "--out", str(tmp_path)]
    argv = [sys.executable, "-m", "benchmarks.beside", *words]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    data = json.loads((tmp_path / "beside.json").read_text())
    assert len(data["turns"]) == 2
    assert data["rounds"] >= 1
    assert 0 < data["taken"] < 1
    assert 0 < data["part"] <= 1
