"""The arithmetic of the benchmark beside a server, which .ci/full runs as a whole."""

import pytest

torch = pytest.importorskip("torch", reason="the imitation of a server multiplies by torch")
pytestmark = pytest.mark.torch


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
