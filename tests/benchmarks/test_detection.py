"""The campaign at its smallest: canaryd finds all that changed a bit, other rules miss what they must."""

import json

import pytest

torch = pytest.importorskip("torch", reason="the numeric worker is tested where torch is installed")
pytestmark = pytest.mark.torch
INJECTIONS = 400


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

    return detection.run(INJECTIONS, 5)


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
    assert total.injected >= INJECTIONS
    assert total.changed > 0.9 * total.injected


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

    words = ["--injections", str(INJECTIONS), "--campaigns", "1", "--seed", "5", "--out", str(tmp_path)]
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
