"""What is kept for how long, and what goes first."""

from canaryd.config.settings import StoreConfig
from canaryd.formatting import DAY
from canaryd.model import Outcome, State
from canaryd.store.retention import DEFAULT, Retention
from canaryd.store.store import Store
from tests.store.hosts import Host
from tests.store.made import NOW, failure, fill, ids, junk, passed, run, verdict


def test_failures_are_kept_longer_than_successes(store):
    """A wrong comparison or a lost worker is a failure; a skipped run is not. The newest run stays."""
    store.add_run(run("ok"))
    store.add_run(run("skipped", outcome=Outcome.SKIPPED))
    store.add_run(failure("wrong", probe="exact_attention"))
    store.add_run(run("crashed", outcome=Outcome.CRASHED))
    passed(store, NOW + 44.9 * DAY)
    store.prune(NOW + 44.9 * DAY)
    assert ids(store.runs()) == ["ok", "skipped", "wrong", "crashed"]
    passed(store, NOW + 45.1 * DAY)
    store.prune(NOW + 45.1 * DAY)
    assert ids(store.runs()) == ["wrong", "crashed"]
    passed(store, NOW + 401 * DAY)
    store.prune(NOW + 401 * DAY)
    assert ids(store.runs()) == ["crashed"]


def test_a_clock_years_ahead_deletes_no_failure_however_long_it_stands(tmp_path, clock):
    """After a day the clock is believed, and what it says is far older than failures are kept: they stay."""
    with Store.open(tmp_path, now=clock) as store:
        store.add_run(failure("wrong"))
        store.set_verdict(verdict(State.FAULTY))
        store.set_verdict(verdict(decided=NOW + 1))
        store.prune(NOW)
        for hour in range(10 * 24):
            clock.now = NOW + 800 * DAY + hour * 3600
            store.prune(clock.now)
        assert ids(store.runs()) == ["wrong"]
        assert len(store.verdict_history("GPU-1")) == 2


def test_old_verdicts_go_but_never_the_newest(store):
    """History is kept as long as failures; the last word on a device for ever."""
    store.set_verdict(verdict(State.SUSPECT))
    store.set_verdict(verdict(decided=NOW + 1))
    passed(store, NOW + 500 * DAY)
    store.prune(NOW + 500 * DAY)
    assert store.verdict_history("GPU-1") == [verdict(decided=NOW + 1)]


def test_the_size_bound_costs_successes_first(tmp_path):
    """The file shrinks below its bound; the oldest successes went, and every failure is still there."""
    rows = [(failure if n % 10 == 0 else run)(f"r{n:04}", detail=junk(2000 + n).hex()) for n in range(1000)]
    fill(tmp_path / "s", rows, now=lambda: NOW)
    with Store.open(tmp_path / "s", max_bytes=2_000_000) as store:
        assert store.path.stat().st_size > 2_000_000
        store.prune(NOW)
        assert store.path.stat().st_size < 2_000_000
        kept = store.runs()
        assert ids(store.runs(failed=True)) == [r.id for r in rows[::10]]
        assert len(kept) >= 400, "no more went than needed"
        assert kept[-1].id == "r0999"
        assert store.problems == []


def test_the_size_bound_costs_failures_only_when_nothing_else_is_left(tmp_path):
    """The oldest failures go last, and the store says so."""
    rows = [failure(f"f{n:03}", detail=junk(2000 + n).hex()) for n in range(400)]
    fill(tmp_path / "s", [run("success"), *rows], now=lambda: NOW)
    with Store.open(tmp_path / "s", max_bytes=700_000) as store:
        store.prune(NOW)
        assert store.path.stat().st_size < 700_000
        assert ids(store.runs()) == [r.id for r in rows[-len(store.runs()) :]]
        assert len(store.runs()) >= 100
        assert "raise store.max_size" in store.problems[0]


def test_the_size_bound_never_costs_the_newest_failures_of_a_device(tmp_path):
    """One that fails all day does not make another healthy whose few failures are older."""
    few = [failure(f"a{n}", device="GPU-2", confirms="" if n else "a") for n in range(4)]
    rows = [failure(f"f{n:03}", detail=junk(2000 + n).hex()) for n in range(400)]
    fill(tmp_path / "s", [*few, *rows], now=lambda: NOW)
    with Store.open(tmp_path / "s", max_bytes=700_000) as store:
        store.prune(NOW)
        assert store.path.stat().st_size < 700_000
        assert "were deleted" in store.problems[0]
        assert ids(store.runs("GPU-2")) == [r.id for r in few]
    with Store.open(tmp_path / "s", max_bytes=100_000) as store:
        store.prune(NOW)
        assert ids(store.runs()) == [r.id for r in (*few, *rows[-100:])]
        assert "larger than 100000 bytes" in store.problems[0]


def test_a_suspect_does_not_clear_because_of_a_restart(tmp_path):
    """Tests of two weeks showed how seldom it fails; a month of fewer ones is no acquittal, whatever was pruned."""
    host = Host(tmp_path, NOW)
    for day in range(45):
        host.now += DAY
        host.add(wrong=day == 13, trials=1000 if day < 13 else 100)
        host.engine.days.sum_up()
        passed(host.store, host.now)
        host.store.prune(host.now)
    assert host.verdict.state is State.SUSPECT
    host.restart()
    assert host.verdict.state is State.SUSPECT
    host.store.close()


def test_the_configuration_says_how_long():
    """Who opens a store without a configuration keeps as much as one with its defaults."""
    settings = StoreConfig()
    assert Retention(successes=settings.keep_successes, failures=settings.keep_failures) == DEFAULT
