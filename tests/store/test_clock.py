"""A clock that is set back."""

import pytest

from canaryd.formatting import DAY
from canaryd.store.store import Store
from tests.store.made import NOW, failure, ids, run


def test_a_clock_set_back_hides_no_run(tmp_path, clock):
    """Runs keep the order in which they came, and `since` finds those made while the clock was wrong."""
    with Store.open(tmp_path, now=clock) as store:
        store.add_run(run("a", started=clock.now))
        clock.now -= 10 * 365 * DAY
        store.add_run(failure("b", started=clock.now))
    with Store.open(tmp_path, now=clock) as store:
        store.add_run(failure("c", started=clock.now))
        clock.now = NOW + DAY
        store.add_run(run("d", started=clock.now))
        assert ids(store.runs()) == ["a", "b", "c", "d"]
        assert ids(store.runs(since=NOW - 1)) == ["a", "b", "c", "d"]
        assert ids(store.runs(since=NOW + 1)) == ["d"]
        store.prune(NOW + 2 * DAY)
        assert ids(store.runs()) == ["a", "b", "c", "d"]


def test_pruning_with_a_clock_set_back_forgets_nothing(store):
    """A clock at the epoch makes nothing old."""
    store.add_run(run("a"))
    store.prune(0.0)
    assert ids(store.runs()) == ["a"]


def test_a_clock_set_back_takes_the_confirmed_time_back_after_a_day_without_a_jump(tmp_path, clock):
    """Until then a wrong result is dated by the confirmed time, and not beside one of a month ago."""
    with Store.open(tmp_path, now=clock, monotonic=lambda: clock.lived) as store:

        def live(hours: int) -> None:
            for _ in range(hours):
                clock.now, clock.lived = clock.now + 3600, clock.lived + 3600
                store.prune(clock.now)

        live(48)
        before, back = store.reached, 40 * DAY
        assert before == clock.now
        clock.now -= back
        live(23)
        assert store.reached == before
        live(3)
        assert store.reached == pytest.approx(clock.now, abs=3600)
