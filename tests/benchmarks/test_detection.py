"""The detection benchmark at its smallest: canaryd finds all that changed a bit, other rules miss what they must."""

import json

import pytest

torch = pytest.importorskip("torch", reason="the numeric worker is tested where torch is installed")
pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def rows():
    from benchmarks import detection

    return detection.run(700, 5)


def by_fault(rows):
    from benchmarks import detection

    return detection.summary(rows, 0)


def test_canaryd_finds_every_fault_that_changed_a_bit(rows):
    """In every class and every format; what changed nothing has a reason."""
    for key, row in rows.items():
        assert row.found["canaryd"] == row.changed, key
        assert row.changed + row.unobserved.total() == row.injected, key
    total = by_fault(rows)["all"]
    assert total.injected >= 700
    assert total.changed > 0.9 * total.injected


def test_comparing_with_the_first_product_misses_what_is_always_there(rows):
    """A consistent fault and a stuck operand are in the first product too; NaN compares false."""
    faults = by_fault(rows)
    assert faults["the same wrong bit every time"].changed
    assert faults["the same wrong bit every time"].found["first product"] == 0
    assert faults["stuck bit in one lane of an operand"].changed
    assert faults["stuck bit in one lane of an operand"].found["first product"] == 0
    nan = faults["NaN or infinity in one element"]
    assert nan.found["first product"] < nan.changed


def test_tolerances_miss_the_lowest_bit(rows):
    """Relative rules see no lowest mantissa bit at all, and no NaN where the comparison is false for it."""
    faults = by_fault(rows)
    lowest = faults["lowest mantissa bit of one element"]
    assert lowest.changed == lowest.found["canaryd"] > 0
    assert lowest.found["relative, over K"] == lowest.found["relative L2"] == 0
    nan = faults["NaN or infinity in one element"]
    assert nan.found["relative, over K"] < nan.changed
    assert nan.found["relative L2"] == nan.found["not finite"] == nan.changed
    assert faults["one element zeroed"].found["relative L2"] < faults["one element zeroed"].changed


@pytest.mark.slow
def test_equal_seeds_give_equal_counts_and_the_report_holds_them(rows, tmp_path, monkeypatch, capsys):
    """The run is a function of its seed; the command writes report and data."""
    from benchmarks import detection

    monkeypatch.setattr("sys.argv", ["detection", "--injections", "700", "--seed", "5", "--out", str(tmp_path)])
    detection.main()
    (data,) = tmp_path.glob("detection-*.json")
    written = {(row["fault"], row["format"]): row for row in json.loads(data.read_text())["rows"]}
    assert {key: (row.injected, row.changed) for key, row in rows.items()} == {
        key: (row["injected"], row["changed"]) for key, row in written.items()
    }
    assert "the same wrong bit every time" in capsys.readouterr().out
