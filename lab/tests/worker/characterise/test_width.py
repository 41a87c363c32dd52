"""The measurement of accumulators: it finds the width of accumulators that are known."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.torch


def simulated(bits: int, *, truncate: bool):
    """Return a product that adds term by term in an accumulator of so many bits."""
    import torch

    def multiply(made):
        a, b = (t.to(torch.float64) for t in made)
        total = torch.zeros((a.shape[0], b.shape[1]), dtype=torch.float64)
        for k in range(a.shape[1]):
            total = total + a[:, k : k + 1] * b[k : k + 1]
            significand, exponent = torch.frexp(total)
            scaled = significand * 2.0**bits
            kept = torch.trunc(scaled) if truncate else torch.round(scaled)
            total = torch.ldexp(kept / 2.0**bits, exponent)
        return total

    return multiply


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize("bits", [11, 14, 22])
def test_the_width_and_the_rounding_of_a_known_accumulator_are_found(bits, truncate):
    """Fourteen bits that truncate, as Hopper's FP8 accumulation, are told from twenty-four that round."""
    from canaryd_lab.worker.characterise.width import measure

    from canaryd.worker.numeric.tensors import FORMATS

    found = measure(FORMATS["bfloat16"], FORMATS["float32"], simulated(bits, truncate=truncate))
    assert found["kept_bits"] == bits
    assert found["loss"] == ("truncates" if truncate else "rounds to nearest")


def test_a_width_below_what_the_goldens_assume_is_wrong(monkeypatch):
    """The premise of a golden is a strict claim: a device that accumulates in 11 bits must not look exact."""
    from canaryd_lab.observation import Claim, Seen
    from canaryd_lab.worker.characterise import width
    from canaryd_lab.worker.characterise.bench import Bench

    from canaryd.worker.numeric.stack import cpu
    from canaryd.worker.runtime import interface

    narrow = simulated(11, truncate=False)
    monkeypatch.setattr(interface.named("torch"), "run", lambda operation, made, out: narrow(made))
    bench = Bench(cpu(), 60.0)
    width._one(bench, "float32", "float32", "float32", Claim.STRICT)
    assert [o.seen for o in bench.seen] == [Seen.WRONG]
    assert bench.seen[0].values["kept_bits"] == 11
