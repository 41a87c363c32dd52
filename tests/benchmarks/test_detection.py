"""The campaign at its smallest: canaryd finds all that changed a bit, other rules miss what they must."""

import json

import pytest

torch = pytest.importorskip("torch", reason="the numeric worker is tested where torch is installed")
pytestmark = pytest.mark.torch


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """As the campaign runs: the products are tiny."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def rows():
    from benchmarks import detection

    return detection.run(1500, 5)


def by_fault(rows):
    from benchmarks import detection

    return detection.summary(rows, 0)


def test_canaryd_finds_every_fault_that_changed_a_bit(rows):
    """In every class and every format; what changed nothing has a reason. No clean result is called wrong."""
    for key, row in rows.items():
        assert row.found["canaryd"] == row.judged["canaryd"] == row.changed, key
        assert row.changed + row.unobserved.total() == row.injected, key
        assert row.clean["canaryd"] > row.alarms["canaryd"] == 0, key
    total = by_fault(rows)["all"]
    assert total.injected >= 1500
    assert total.changed > 0.9 * total.injected


def test_comparing_with_the_first_product_misses_what_is_always_there(rows):
    """A consistent fault, a stuck bit and a band of values are in the first product too; NaN compares false."""
    faults = by_fault(rows)
    for fault in ("the same wrong bit every time", "stuck bit in one lane of an operand", "values of one exponent"):
        assert faults[fault].judged["gpu-burn"] > 0 == faults[fault].found["gpu-burn"], fault
        assert faults[fault].found["RVS"] < faults[fault].judged["RVS"], fault
    nan = faults["NaN or infinity in one element"]
    assert nan.found["gpu-burn"] < nan.judged["gpu-burn"]
    assert nan.found["RVS"] < nan.judged["RVS"]
    assert nan.found["DCGM"] == nan.judged["DCGM"]


def test_tolerances_miss_the_lowest_bit(rows):
    """Relative rules see no lowest mantissa bit at all, and no NaN where the comparison is false for it."""
    faults = by_fault(rows)
    lowest = faults["lowest mantissa bit of one element"]
    assert lowest.changed == lowest.found["canaryd"] > 0
    assert lowest.found["SuperBench"] == lowest.found["relative L2"] == 0
    nan = faults["NaN or infinity in one element"]
    assert nan.found["SuperBench"] < nan.judged["SuperBench"]
    assert nan.found["relative L2"] == nan.found["not finite"] == nan.changed
    assert faults["one element zeroed"].found["relative L2"] < faults["one element zeroed"].changed


def test_the_wide_arithmetic_of_faulty_units_is_that_of_the_format():
    """Without its stuck bit a sum by blocks, rounded once, is the clean result: else the fault would not be the bit."""
    from benchmarks import injections

    for form, trials in injections.sources(3).items():
        for _, trial in zip(range(12), trials, strict=False):
            a, b = injections._wide(trial)
            blocks = [slice(k, k + injections.TILE) for k in range(0, trial.K, injections.TILE)]
            sums = sum(a[..., :, block] @ b[..., block, :] for block in blocks)
            found = injections._rounded(trial, sums, touched=False)
            assert torch.equal(found.result, trial.clean), form


@pytest.mark.parametrize("kind", ["one bit of one element flipped", "the same wrong bit every time"])
def test_ai_chip_integrity_judges_given_tensors(kind):
    """Where it is installed: the clean result passes, one that differs from the first run does not."""
    pytest.importorskip("chip_integrity", reason="ai-chip-integrity is not installed")
    from benchmarks import injections, rivals

    trials = injections.sources(3)["float32"]
    _, strike = injections.FAULTS[kind]
    found = []
    for _, trial in zip(range(24), trials, strict=False):
        assert rivals.chip_integrity(trial, injections.Struck(trial.clean, trial.clean), "float32") is False
        found.append(rivals.chip_integrity(trial, strike(trial, injections.draws(len(found))), "float32"))
    assert all(found) == kind.startswith("one")


def test_other_faults_are_found_and_their_controls_are_not():
    """Gather, comparator and memory; what a comparator does not look at stays unseen where no flipped bit falls."""
    from benchmarks import other_faults

    parts = other_faults.run(26, 5)
    for name in other_faults.STRIKES:
        assert parts[name].found["canaryd"] == parts[name].changed > 0, name
    for name in other_faults.CONTROLS:
        assert parts[name].changed > parts[name].found["canaryd"], name
    assert set(parts["memory: alias"].told) == {"alias"}


def test_a_core_that_errs_is_found_and_named():
    """Four campaigns at one in ten: all found, the core named, nothing missed, no alarm before the fault."""
    from benchmarks import time_to_detect

    campaigns = time_to_detect.Campaigns(0.1, False, [], [])
    for seed in range(4):
        time_to_detect._campaign(campaigns, seed)
    assert len(campaigns.waits) == len(campaigns.named_after) == 4
    assert (campaigns.wrongly_named, campaigns.missed, campaigns.false_alarms) == (0, 0, 0)


@pytest.mark.slow
def test_equal_seeds_give_equal_counts_and_the_report_holds_them(rows, tmp_path, monkeypatch, capsys):
    """The run is a function of its seed; the command writes report, plot and data."""
    from benchmarks import detection

    words = ["--injections", "1500", "--campaigns", "1", "--seed", "5", "--out", str(tmp_path)]
    monkeypatch.setattr("sys.argv", ["detection", *words])
    detection.main()
    data = json.loads((tmp_path / "detection.json").read_text())
    written = {(row["fault"], row["format"]): row for row in data["rows"]}
    assert {key: (row.injected, row.changed) for key, row in rows.items()} == {
        key: (row["injected"], row["changed"]) for key, row in written.items()
    }
    assert [c["rate"] for c in data["campaigns"]] == [0.1, 0.01, 0.001, 0.0001]
    assert "the same wrong bit every time" in capsys.readouterr().out
    assert (tmp_path / "detection.svg").read_text().count("<polyline") == 4
