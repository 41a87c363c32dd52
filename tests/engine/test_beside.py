"""Two processes on one state directory: what one has found, the other knows when it judges."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest

from canaryd.model import Outcome, State
from canaryd.store.retention import Retention
from canaryd.store.store import Store
from tests.engine.test_engine import carry_out, made, settings, start, the_cpu, verdict
from tests.store.hosts import DAY, GPU, HOUR, NOW, Host

PROBES = ("mismatches", "passes")


def states(engine):
    return [v.state for v in engine.store.verdict_history(the_cpu(engine).uuid)]


def test_what_another_process_found_meanwhile_is_judged(tmp_path):
    """A check that began before the daemon found the fault neither calls the device healthy nor stores that it is."""
    config = settings(tmp_path, *PROBES)
    daemon, check = start(config), start(config)
    carry_out(daemon, "mismatches")
    found = verdict(daemon)
    assert found.state is State.FAULTY
    carry_out(check, "passes")
    check.settle()
    assert (verdict(check).state, verdict(check).since) == (State.FAULTY, found.since)
    assert states(daemon) == [State.SUSPECT, State.FAULTY]
    carry_out(daemon, "passes")
    assert verdict(check).state is State.FAULTY
    assert len(daemon.evidence(found.device)) == len(check.evidence(found.device)) == 6


def test_what_waited_in_the_memory_of_another_process_is_judged_when_it_is_stored(tmp_path):
    """Minutes after it was found: the disk had no room for it."""
    engine = start(settings(tmp_path, "passes"))
    cpu = the_cpu(engine)
    (mine,) = carry_out(engine)
    assert verdict(engine).state is State.HEALTHY
    state, aside = engine.config.state_dir, tmp_path / "aside"
    with Store.open(state, now=lambda: mine.started - 600.0) as other:
        state.rename(aside)
        state.write_text("in the way")
        theirs = made(1, "passes", wrong=True, at=mine.started - 600.0, device=cpu.uuid)
        assert not other.add_run(theirs)
        state.unlink()
        aside.rename(state)
    assert verdict(engine).state is State.SUSPECT
    assert [r.id for r in engine.evidence(cpu.uuid)] == [mine.id, theirs.id]


def test_what_waited_in_the_own_memory_is_no_news(tmp_path):
    """Nor is what another process had stored before, also where the database was opened again in between."""
    with Store.open(tmp_path / "state") as other:
        other.add_run(made(1))
    with Store.open(tmp_path / "state") as store, Store.open(tmp_path / "state") as other:
        assert store.news() == []
        shutil.move(tmp_path / "state", tmp_path / "aside")
        (tmp_path / "state").write_text("in the way")
        assert not store.add_run(made(2))
        assert store.news() == []
        (tmp_path / "state").unlink()
        shutil.move(tmp_path / "aside", tmp_path / "state")
        assert other.add_run(made(3, outcome=Outcome.CRASHED))
        assert store.add_run(made(4))
        assert [r.id for r in store.news()] == [made(3).id]
        assert store.news() == []
        assert [r.id for r in other.news()] == [made(2).id, made(4).id]


def test_a_record_in_the_place_of_a_lost_one_is_another_generation(tmp_path):
    """All of it is read anew, and what comes then is news, whatever its numbers are."""
    with Store.open(tmp_path) as store:
        for number in range(5):
            store.add_run(made(number))
        store.path.unlink()
        with Store.open(tmp_path) as other:
            other.add_run(made(7))
            store.changes()
            assert (store.generation, [r.id for r in store.runs()], store.news()) == (2, [made(7).id], [])
            other.add_run(made(8))
        assert [r.id for r in store.news()] == [made(8).id]


def test_a_record_that_comes_back_is_no_news(tmp_path):
    """The directory is away for a moment, with or without another in its place: no run counts twice, none is missed."""
    now, state, aside = [1_700_000_000.0], tmp_path / "state", tmp_path / "aside"
    with Store.open(state, now=lambda: now[0]) as store, Store.open(state, now=lambda: now[0]) as other:
        for number in range(3):
            store.add_run(made(number))
        other.add_run(made(3))
        assert [r.id for r in store.news()] == [made(3).id]
        for looks in (0, 1):
            now[0] += 600.0
            assert store.news() == []
            shutil.move(state, aside)
            assert [store.news() for _ in range(looks)] == [[]] * looks
            shutil.rmtree(state, ignore_errors=True)
            shutil.move(aside, state)
            other.add_run(made(10 + looks))
            assert [r.id for r in store.news()] == [made(10 + looks).id]
            assert store.news() == []


def test_a_run_after_the_newest_was_pruned_is_news(tmp_path):
    """No other run gets the number of one that was passed."""
    now = [1_700_000_000.0]
    with Store.open(tmp_path, now=lambda: now[0]) as store, Store.open(tmp_path, now=lambda: now[0]) as other:
        for number in range(3):
            store.add_run(made(number))
        assert store.news() == []
        store.keep = Retention(successes=DAY)
        for _ in range(60):
            now[0] += 3 * 3600.0
            store.prune(now[0])
        assert len(store.runs()) < 3
        other.add_run(made(9, wrong=True))
        assert [r.id for r in store.news()] == [made(9).id]


@pytest.mark.parametrize("how", ["restarted", "reloaded"])
def test_the_first_verdict_of_a_release_or_a_configuration_is_stored(tmp_path, how):
    """A roll-out waits for it; an unchanged verdict was stored again after ten minutes only."""
    host = Host(tmp_path, NOW - DAY)
    host.engine.looked = True
    host.live(HOUR)
    if how == "restarted":
        host.restart()
        host.engine.looked = True
    else:
        host.engine.config = replace(host.engine.config)
    for _ in range(2):
        host.now += 1
        host.engine.decide()
    assert host.store.verdict(GPU.uuid).decided == host.now - 1
    host.store.close()


def test_runs_of_a_part_give_way_to_newer_whole_ones(tmp_path):
    """What a check of one case found weeks ago would speak against the device for ever."""
    host = Host(tmp_path, NOW - 40 * DAY)
    host.engine.looked = True
    host.add(cases=("a",))
    for _ in range(450):
        host.now += HOUR
        host.add()
    assert all(run.whole for run in host.engine.evidence(GPU.uuid))
    host.restart()
    assert all(run.whole for run in host.engine.evidence(GPU.uuid))
    host.store.close()
