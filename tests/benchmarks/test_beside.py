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


def pieces(*values):
    return [torch.tensor(each, dtype=torch.float64) for each in values]


def test_a_quantile_of_a_mixture():
    """One part in a hundred of slow ones is beyond the 99th percentile; a little more is in it."""
    from benchmarks import beside

    assert beside.quantile([(1.0, pieces(range(1, 51), range(51, 101)))]) == 99
    assert beside.quantile([(0.991, pieces([1.0])), (0.009, pieces([5.0]))]) == 1.0
    assert beside.quantile([(0.98, pieces([1.0] * 7)), (0.02, pieces([5.0] * 2, [5.0]))]) == 5.0
    assert beside.quantile([(1.0, pieces([2.0])), (0.0, pieces([5.0]))]) == 2.0


def test_an_hour_is_made_of_its_parts():
    """Half the throughput for a hundredth of the time costs half of a hundredth."""
    from benchmarks import beside

    rest, rounds = turns(100.0, 100.0), turns(100.0, 50.0)
    assert beside.mixed(beside.throughput, 0.01, rest, rounds).median == pytest.approx(0.995)
    assert beside.mixed(beside.latency, 0.005, rest, rounds).median == 1.0
    assert beside.mixed(beside.latency, 0.02, rest, rounds).median == pytest.approx(0.5)


def test_each_daemon_is_held_against_its_own_turns():
    """A machine that has become slower between the two measurements costs canaryd nothing."""
    from benchmarks import beside

    rest, rounds = turns(100.0, 100.0), turns(80.0, 80.0)
    assert beside.mixed(beside.throughput, 0.5, rest, rounds).median == 1.0
    assert beside.mixed(beside.latency, 0.5, rest, rounds).median == 1.0


def test_the_schedule_or_the_share_says_how_much_of_an_hour_is_rounds():
    """Two rounds of 3.6 s are a five-hundredth of it; the share is the most."""
    assert account().share == pytest.approx(0.002)
    assert account(wanted=20.0).share == 0.005
    assert account().part(0.002) == pytest.approx(0.02)
    assert account(taken=0.001).part(0.002) == 1.0


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


def test_noise_is_not_resolved():
    """An interval on both sides of a bar decides nothing."""
    from benchmarks import beside

    noisy = [turn for rate in (90.0, 110.0) for turn in turns(100.0, rate)]
    judged = beside.report(noisy, noisy, account(), 0.0, 0.003)[1]
    assert judged["throughput"] == "not resolved"


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
