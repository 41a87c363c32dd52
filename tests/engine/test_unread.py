"""The record is out of reach for a while, under an engine that has read it or at its start: nothing is forgotten."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import threading
import time

import pytest

from canaryd.config.settings import Config
from canaryd.daemon.release import Releases
from canaryd.engine.engine import Engine
from canaryd.model import AckKind, State
from canaryd.store.notes import BOOT_NOTE, RELEASE_NOTE, RELEASED_NOTE, RUNNING_NOTE
from canaryd.store.store import Store
from tests.command import eventually, exchange
from tests.engine.test_polling import Host as Polled
from tests.store.hosts import DAY, GPU, HOUR, NOW, Host

HOT = "CPU0: Core temperature above threshold, cpu clock throttled (total events = {})"


@contextlib.contextmanager
def out_of_reach(state):
    """Nobody can say what lies in the state directory, as where it may not be entered."""
    aside = state.with_name("aside")
    aside.symlink_to(state)
    exchange(state, aside)
    yield
    exchange(state, aside)
    aside.unlink()


@pytest.fixture
def host(tmp_path):
    """A host that was tested for six hours, with a learnt baseline."""
    (tmp_path / "state").mkdir()
    made = Host(tmp_path / "state", NOW - 3 * DAY)
    made.engine.looked = True
    made.live(DAY / 4)
    yield made
    made.store.close()


def fail(host):
    """Find a fault and confirm it."""
    for _ in range(4):
        host.now += 120
        host.add(wrong=True)
    return host.verdict


def test_what_an_operator_said_holds(host):
    """The old fault of a repaired device does not come back as an alarm."""
    assert fail(host).state is State.FAULTY
    host.now += HOUR
    host.say(AckKind.REPAIRED, "a new board")
    host.live(DAY / 4)
    before = host.verdict
    assert before.state is State.HEALTHY
    with out_of_reach(host.place):
        host.live(HOUR)
        assert host.verdict.state is State.HEALTHY
    host.add()
    assert (host.verdict.state, host.verdict.since) == (State.HEALTHY, before.since)


def test_what_was_known_of_a_fault_stays(host):
    """Its time too, and with it whether an acknowledgement is older."""
    since = fail(host).since
    with out_of_reach(host.place):
        host.now += HOUR
        host.add(wrong=True)
        host.engine.recall()
        assert (host.verdict.state, host.verdict.since) == (State.FAULTY, since)
    host.add()
    assert (host.verdict.state, host.verdict.since) == (State.FAULTY, since)
    assert host.store.verdict(GPU.uuid).since == since


def test_a_first_mismatch_forgets_no_clean_run(host):
    """The whole record counts from now on; where it cannot be read, what is in memory does."""
    known = len(host.engine.evidence(GPU.uuid))
    with out_of_reach(host.place):
        host.add(wrong=True)
        assert host.verdict.state is State.SUSPECT
        assert len(host.engine.evidence(GPU.uuid)) == known + 1


def test_a_loss_of_the_record_is_not_forgotten(host):
    """A device that is unknown because of it does not become healthy."""
    host.store.path.unlink()
    host.add()
    assert "history-lost" in host.rules
    with out_of_reach(host.place):
        assert "history-lost" in host.rules


def test_what_an_operator_said_outlives_the_record(host):
    """The old fault of a repaired device does not come back because the state directory was deleted."""
    fail(host)
    host.now += HOUR
    host.say(AckKind.REPAIRED, "a new board")
    host.live(DAY / 4)
    said = host.store.acks()
    shutil.rmtree(host.place)
    host.add()
    assert (host.verdict.state, "history-lost" in host.rules) == (State.UNKNOWN, True)
    assert host.store.acks() == said


@pytest.mark.parametrize("stored", [True, False])
def test_a_record_that_is_mounted_late_is_read(host, stored):
    """A fault on record counts as after a restart, whether or not a record was begun where it is mounted."""
    since = fail(host).since
    host.store.close()
    aside = host.place.with_name("aside")
    host.place.rename(aside)
    if stored:
        host.place.mkdir()
    else:
        host.place.touch()  # for root no directory is closed
    host.now += HOUR
    late = Host(host.place, host.now)
    late.engine.looked = True
    late.numbers = itertools.count(1000)
    late.live(HOUR)
    assert late.verdict.state is State.HEALTHY
    host.place.rename(host.place.with_name("beneath"))
    aside.rename(host.place)
    late.live(HOUR)
    assert late.verdict.state is State.FAULTY
    assert late.store.verdict(GPU.uuid).since == since or not stored
    assert len(late.engine.evidence(GPU.uuid)) > 12, "the runs of before and after"
    late.store.close()


@pytest.mark.parametrize("restarted", [False, True])
def test_a_baseline_is_not_replaced(host, restarted):
    """Neither under a running engine nor by one that has started without it."""
    (before,) = host.store.baselines()
    with out_of_reach(host.place):
        if restarted:
            host.store = Store.open(host.place, now=host.clock)
            host.store.see_device(GPU, host.now)
            host.restart()
        host.live(HOUR)
    host.add()
    (after,) = host.store.baselines()
    assert (after.first, after.learnt) == (before.first, {"": before.learnt[""] + (1 if restarted else 3)})


def test_events_are_kept_and_counted_once(tmp_path):
    """By an engine that knows them, and by one that starts and does not know how far the kernel log was read."""
    host = Polled(tmp_path)

    def heard(engine):
        return [(e.kind, e.count) for e in engine.watch.history.of(host.device)]

    host.hear(*map(HOT.format, range(3)))
    host.engine.read_log(until_end=True)
    assert heard(host.engine) == [("thermal", 3.0)]
    host.watch.disown()
    with out_of_reach(host.engine.config.state_dir):
        host.watch.history.recall(time.time())
        assert heard(host.engine) == [("thermal", 3.0)]
        again = Engine(host.engine.config, Store.open(host.engine.config.state_dir))
        again.recall()
        again.read_log(until_end=True)
        assert "how far it was read before is not known" in again.watch.kernel_log.problem
        assert again.unread
    again.recall()
    again.read_log(until_end=True)
    assert (again.unread, heard(again), again.watch.kernel_log.problem) == (False, [("thermal", 3.0)], "")
    again.store.close()
    host.close()


def test_an_unclean_reboot_is_not_forgotten(tmp_path):
    """A daemon that starts without the record must not overwrite what the one before it left there."""
    host = Polled(tmp_path)
    host.engine.recall()
    host.store.add_events((), notes={BOOT_NOTE: "before", RUNNING_NOTE: "before"})
    with out_of_reach(host.engine.config.state_dir):
        again = Engine(host.engine.config, Store.open(host.engine.config.state_dir))
        again.watch.history.running = True
        again.recall()
    again.recall()
    boots = [e for e in again.watch.history.of(host.device) if e.before == "before"]
    assert [e.name for e in boots] == ["unclean"]
    assert again.store.note(RUNNING_NOTE) == again.store.note(BOOT_NOTE) != "before"
    again.store.close()
    host.close()


def test_a_release_is_not_over(tmp_path):
    """Somebody may be changing the driver; it ends when it was to end."""
    (tmp_path / "state").mkdir()
    others = set(threading.enumerate())
    store = Store.open(tmp_path / "state")
    engine = Engine(Config(state_dir=tmp_path / "state"), store)
    releases = Releases(engine, store, changed=lambda: None, look_around=lambda: None)
    store.set_note(RELEASE_NOTE, str(time.time() + 3.0))
    releases.check()
    eventually(lambda: engine.released)
    with out_of_reach(tmp_path / "state"):
        releases.check()
        assert engine.released
        eventually(lambda: releases.check() or not engine.released)
    assert store.note(RELEASED_NOTE) == ""
    for thread in set(threading.enumerate()) - others:
        thread.join()
