"""What the device is held against: the vendor's tool, field by field."""

from __future__ import annotations

import pytest
from canaryd_lab.characterise.outside import _compared
from canaryd_lab.observation import Claim, Seen


@pytest.mark.parametrize(
    ("ours", "seen"), [(70.0, Seen.RIGHT), (74.9, Seen.RIGHT), (76.0, Seen.WRONG), (None, Seen.MEASURED)]
)
def test_a_field_is_right_within_what_may_change_between_two_looks(ours, seen):
    """Beyond it canaryd misreads the device; what canaryd does not read at all is said, and is no fault."""
    readings = {} if ours is None else {"temperature_celsius{sensor=core}": ours}
    theirs = {"value": 70.0, "tolerance": 5.0, "field": "nvidia-smi temperature.gpu"}
    (found,) = _compared(readings, {"temperature_celsius{sensor=core}": theirs})
    assert found.seen is seen
    assert found.claim is (Claim.OPEN if ours is None else Claim.STRICT)
