"""`canaryd status` and `canaryd release`: what the store knows, and letting go."""

import json
import time

import pytest

from canaryd import status
from canaryd.config import Config
from canaryd.model import Cause, Device, Event, Finding, State, Verdict
from canaryd.report import status_json, status_text
from canaryd.store import Store
from canaryd.watch import DAEMON_LOCK, RELEASE_NOTE
from tests.command import Daemon, canaryd, configure, eventually, running

NOW = 1_790_000_000.0
GPU = Device(uuid="GPU-1", backend="cuda", index=3, model="NVIDIA H200")


@pytest.fixture
def store(tmp_path):
    with Store.open(tmp_path / "state", now=lambda: NOW) as opened:
        yield opened


def verdict(state, cause, *messages, decided=NOW - 60):
    found = tuple(Finding(rule="a-rule", state=state, cause=cause, message=m) for m in messages)
    return Verdict(device=GPU.uuid, state=state, cause=cause, findings=found, decided=decided, since=NOW - 7200)


def ask(store, now=NOW, config=None):
    return status.gather(store, config or Config(), now)


def test_nothing_known_is_unknown(store):
    """An empty store is no healthy machine."""
    found = ask(store)
    assert found.state is State.UNKNOWN
    assert "no device has been seen yet" in status_text(found)


def test_a_verdict_is_told_with_why_and_what_happened(store):
    """State, cause, since when, the finding, the events of the last day: in text and in JSON alike."""
    store.see_device(GPU, NOW)
    store.set_verdict(verdict(State.FAULTY, Cause.HARDWARE, "a row could not be remapped"))
    old = Event(device=GPU.uuid, kind="xid", name="31", first=NOW - 9e4, last=NOW - 9e4, detail="long ago")
    new = Event(device=GPU.uuid, kind="xid", name="79", first=NOW - 60, last=NOW - 60, count=2, detail="off the bus")
    store.add_events([old, new])
    found = ask(store)
    text = status_text(found)
    for words in ("cuda:3", "FAULTY, cause: hardware", "a row could not be remapped", "off the bus", "2 times"):
        assert words in text
    assert "long ago" not in text
    document = json.loads(json.dumps(status_json(found)))
    assert (document["state"], document["exit_code"], document["daemon_running"]) == ("faulty", 2, False)
    assert document["devices"][0]["findings"][0]["message"] == "a row could not be remapped"
    assert [e["name"] for e in document["devices"][0]["events"]] == ["79"]


def test_a_verdict_that_nobody_renews_is_unknown(store):
    """A daemon that stopped hours ago leaves no healthy device behind; an alarm it left stays one."""
    store.see_device(GPU, NOW)
    store.set_verdict(verdict(State.HEALTHY, Cause.NONE, decided=NOW - 3 * 3600))
    found = ask(store)
    assert found.state is State.UNKNOWN
    assert "nobody has judged it for 3.0 h (it was healthy/none)" in status_text(found)
    store.set_verdict(verdict(State.FAULTY, Cause.HARDWARE, "broken", decided=NOW - 3 * 3600))
    found = ask(store)
    assert found.state is State.FAULTY
    assert "nobody has judged it" in status_text(found)


def test_a_device_without_verdict_and_one_that_is_gone_are_not_healthy(store):
    """What was never judged is unknown; what is gone is shown as gone until it is forgotten or was taken out."""
    store.see_device(GPU, NOW)
    assert ask(store).state is State.UNKNOWN
    store.set_verdict(verdict(State.UNKNOWN, Cause.UNDETERMINED, "vanished"))
    store.set_present(set(), NOW)
    assert "GONE" in status_text(ask(store))
    assert ask(store, now=NOW + 40 * 86400).devices == ()
    taken_out = Config().devices.__class__(absent=(GPU.uuid,))
    assert ask(store, config=Config(devices=taken_out)).devices == ()


def test_an_instance_of_a_gpu_that_was_divided_anew_is_forgotten(store):
    """Other instances have taken its place: it is not missed, nor does it make the machine unknown."""
    old = Device(uuid="MIG-1", backend="cuda", index=3, model="NVIDIA H200", parent=GPU.uuid)
    for device in (GPU, old):
        store.see_device(device, NOW)
        store.set_verdict(Verdict(**{**vars(verdict(State.HEALTHY, Cause.NONE)), "device": device.uuid}))
    store.set_present({GPU.uuid}, NOW)
    found = ask(store)
    assert [d.device.uuid for d in found.devices] == [GPU.uuid]
    assert found.state is State.HEALTHY


def test_many_events_are_summed_up(store):
    """A terminal shows the newest; JSON has all."""
    store.see_device(GPU, NOW)
    store.add_events(
        [Event(device=GPU.uuid, kind="xid", name=str(n), first=NOW, last=NOW, detail=f"line {n}") for n in range(30)]
    )
    found = ask(store)
    assert "and 20 earlier kinds of event" in status_text(found)
    assert len(status_json(found)["devices"][0]["events"]) == 30


def test_a_running_daemon_and_a_release_are_told(store):
    """Whoever holds the daemon's lock is the daemon; a release is told until it is over."""
    store.set_note(RELEASE_NOTE, str(NOW + 60))
    with store.lock(DAEMON_LOCK), Store.open(store.state_dir, now=lambda: NOW) as other:
        found = ask(other)
        assert found.daemon
        assert found.released_until == NOW + 60
        assert "released until" in status_text(found)
        assert "daemon: running" in status_text(found)
    assert ask(store, now=NOW + 61).released_until == 0.0
    assert "not running" in status_text(ask(store))


def test_nothing_to_release_without_a_daemon(tmp_path):
    """Between two commands nothing is held: said, and no error."""
    answer = canaryd("release", "--config", configure(tmp_path, "passes"), "--state-dir", tmp_path / "state")
    assert answer.code == 0
    assert "no daemon runs" in answer.out


def test_a_daemon_releases_and_takes_back(tmp_path):
    """`canaryd release` returns when nothing is held; polls stop, and go on after `--end`."""
    said = tmp_path / "said.json"
    said.write_text(json.dumps({"readings": [["persistence_mode", 0, {}]]}))
    config = configure(tmp_path, "says", each={"says": {"settings": {"file": str(said)}}})
    state = tmp_path / "state"
    common = ("--config", config, "--state-dir", state)
    pids = tmp_path / "said.json.pids"
    with running(Daemon(config, state)) as daemon:
        eventually(pids.exists)
        eventually(lambda: "canaryd_device_handles_held 1.0" in daemon.get("/metrics")[1])
        answer = canaryd("release", "--for", "10m", *common)
        assert (answer.code, answer.err) == (0, "")
        assert "canaryd_released 1.0" in daemon.get("/metrics")[1]
        before = pids.read_text()
        document = canaryd("status", "--json", *common).document
        assert document["daemon_running"]
        assert document["released_until"] > time.time() + 500
        assert canaryd("release", "--end", *common).code == 0
        eventually(lambda: pids.read_text() != before)
        assert "canaryd_released 0.0" in daemon.get("/metrics")[1]
