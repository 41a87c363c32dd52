"""The judge of the soak: what grows is told from what does not, and too little is not judged."""

import random
from pathlib import Path

import pytest

from benchmarks import soak

HOURS = [(20.0 * i, i / 180) for i in range(361)]
"""(seconds, hours) of the samples of 2 h."""
PER_HOUR = soak.Quantity(name="memory", unit="MiB", growth=2.0, most=75.0)


@pytest.mark.parametrize(
    ("growth", "verdict"), [(0.0, "holds"), (1.0, "holds"), (2.0, "not resolved"), (3.0, "grows"), (20.0, "too much")]
)
def test_growth_is_told_from_noise(growth, verdict):
    """Samples scatter by half a unit around a line of `growth` an hour, beside a bound of 2."""
    noise = random.Random(7)
    points = [(at, 50.0 + growth * hours + noise.gauss(0.0, 0.5)) for at, hours in HOURS]
    found = soak.slope(points)
    assert found.low <= growth <= found.high
    assert soak.judged(PER_HOUR, found, max(value for _, value in points)) == verdict


def test_a_daemon_that_ended_early_is_said_and_not_judged():
    """The whole soak lies before what is judged: a sentence, and what went wrong before it."""
    ended = soak.Soak(Path(), None, None, "http://127.0.0.1:9", Path())
    ended.samples = [{"at": 20.0 * i} for i in range(9)]
    ended.wrong = ["the daemon ended by itself with -15"]
    with pytest.raises(soak.TooFewError, match=r"by itself with -15\n0 samples of .* after the first 60 min"):
        soak.report(ended, 7200.0)
