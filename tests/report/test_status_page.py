"""The page `/`: the facts of `canaryd status`, in a real browser, from a real daemon, whatever a part is called."""

from __future__ import annotations

import http.client
import re
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from canaryd.config.settings import Config
from canaryd.facts import printable
from canaryd.formatting import format_time
from canaryd.model import Ack, Cause, Device, Event, Finding, Rival, State, Verdict
from canaryd.report import status, status_page
from canaryd.report.events import KINDS
from canaryd.report.status_text import as_json as status_json
from canaryd.report.terminal import cause_words, rival_words
from canaryd.store.notes import LOG_PROBLEM_NOTE, RELEASE_NOTE
from canaryd.store.store import Store
from canaryd.web.server import Answer, Server
from tests.command import Daemon, canaryd, configure, eventually, running, soon
from tests.engine.test_unread import out_of_reach
from tests.nvml_stand_in import StandIn
from tests.pages import Page, unwrapped
from tests.programs import measured, opened

NOW = 1_790_000_000.0
HOSTILE = """<script>document.title='owned'</script> "H200" & </article> 'x' \u202e\x1b[2J"""
GPU = Device(uuid="GPU-3", backend="cuda", index=3, model=HOSTILE)
SOUND = Device(uuid="GPU-4", backend="cuda", index=4, model="NVIDIA H200")
STATES = (State.HEALTHY, State.DEGRADED, State.UNKNOWN, State.SUSPECT, State.FAULTY)


def facts(document: dict[str, Any]) -> Iterator[str]:
    """Yield all that `status --json` says, as a page in the same zone of time has to say it."""
    yield document["state"]
    yield document["answer"]
    yield document["advice"]
    yield from document["problems"]
    if document["released_until"]:
        yield format_time(document["released_until"])
    for device in document["devices"]:
        yield from (device["device"], device["name"], device["model"], device["state"], format_time(device["since"]))
        yield from () if device["cause"] == "none" else (in_words(device["cause"]),)
        yield from () if device["present"] else ("GONE",)
        for probe, at in device["evidence"].items():
            yield from (probe, "none yet" if at is None else format_time(at))
        for finding in device["findings"]:
            yield from (
                finding["message"],
                finding["action"],
                *finding["evidence"],
                finding["repro"],
                finding["rule"],
                *finding["runs"],
            )
            for rival in finding["rivals"]:
                yield rival_words(Rival(**rival | {"cause": Cause(rival["cause"])}))
        for ack in device["acks"]:
            yield from (
                ack["kind"],
                ack["reason"],
                ack["by"],
                format_time(ack["until"], seconds=False) if ack["until"] else "",
            )
        for event in device["events"]:
            as_values = event["kind"] in ("counter", "flag")
            yield KINDS[event["kind"]]
            yield from () if event["detail"] else (event["name"], event["before"], event["after"])
            yield from (f"{event['count']:g}",) if as_values else (event["detail"],)
            yield format_time(event["last"])


def in_words(cause: str) -> str:
    return cause_words(Cause(cause))


def missing(document: dict[str, Any], text: str) -> list[str]:
    """Return the facts of `status --json` that a page's text does not tell."""
    return [fact for fact in facts(document) if unwrapped(printable(fact)) not in text]


def condemn(store: Store) -> None:
    """Leave in the store a faulty device with everything that can be told of one, and a sound one."""
    rivals = (
        Rival(cause=Cause.SOFTWARE, why="7 siblings are clean on the same <bytes>.", rejected=True),
        Rival(cause=Cause.ENVIRONMENT, why="Nobody has looked at the power & heat.", rejected=False),
    )
    finding = Finding(
        rule="exact-mismatch-confirmed",
        state=State.FAULTY,
        cause=Cause.HARDWARE,
        message='a result with 1 wrong bit: "0x3f" < 0x40',
        action="Take <it> out of service.",
        evidence=("All 3 retests failed.", "Element (1, 2) & bit 3."),
        probe="exact_matmul",
        repro=f"canaryd check --device 'GPU-3' --probe exact_matmul --case {'bfloat16/cancel' * 30}",
        runs=("0192f3a4b5c6-aabbcc",),
        rivals=rivals,
    )
    for device in (GPU, SOUND):
        store.see_device(device, NOW)
    faulty = {"state": State.FAULTY, "cause": Cause.HARDWARE, "findings": (finding,)}
    healthy = {"state": State.HEALTHY, "cause": Cause.NONE, "findings": ()}
    for device, said in ((GPU, faulty), (SOUND, healthy)):
        store.set_verdict(Verdict(device=device.uuid, decided=NOW - 60, since=NOW - 7200, **said))
    store.add_ack(Ack(device=GPU.uuid, kind="acknowledged", at=NOW - 60, until=NOW + 9e4, reason="RMA <7>", by="anna"))
    store.add_events(
        [
            Event(
                device=GPU.uuid, kind="xid", name="79", first=NOW - 60, last=NOW - 60, count=2, detail="off <the> bus"
            ),
            Event(device=GPU.uuid, kind="change", name="driver", first=NOW, last=NOW, before="570", after="580"),
        ]
    )


def gathered(store: Store, now: float = NOW) -> status.Status:
    """Return the status as the daemon gathers it."""
    return status.gather(
        store, Config(), now, daemon=True, evidence={GPU.uuid: {"exact_matmul": NOW - 600, "sdpa": None}}
    )


def read(found: status.Status, now: float = NOW) -> Page:
    return Page(status_page.render(found).decode())


# --- What it says ----------------------------------------------------------------------------------------------------


def test_every_fact_of_the_status_is_on_the_page(store):
    """Devices, states, causes, findings, rivals, acknowledgements, events, evidence, problems: none is left out."""
    condemn(store)
    store.set_note(LOG_PROBLEM_NOTE, "no permission <at all>")
    store.set_note(RELEASE_NOTE, str(NOW + 60))
    store.set_present({GPU.uuid}, NOW)
    found = gathered(store)
    assert [d.present for d in found.devices] == [True, False]
    document = status_json(found)
    assert len(list(facts(document))) > 40
    assert missing(document, read(found).text) == []


@pytest.mark.parametrize("state", STATES)
def test_the_worst_state_is_a_word_and_a_shape(store, state):
    """Colour alone says nothing to who cannot see it: each state has an outline of its own."""
    store.see_device(SOUND, NOW)
    store.set_verdict(
        Verdict(device=SOUND.uuid, state=state, cause=Cause.UNDETERMINED, findings=(), decided=NOW, since=NOW)
    )
    document = status_page.render(gathered(store)).decode()
    assert (
        re.search(rf"<h1><span class=\"state {state.value}\"><svg[^>]*>(.*?)</svg> {state.value}", document)[1]
        == (status_page.SHAPES[state])
    )
    assert f"<title>{state.value.upper()} " in document
    assert len({shape.split("/>")[0] for shape in status_page.SHAPES.values()}) == len(STATES)


def test_whatever_a_part_is_called_is_harmless(store):
    """Markup in a model's name, a message or an event is text; no control character reaches the reader."""
    condemn(store)
    document = status_page.render(gathered(store)).decode()
    found = Page(document)
    assert "script" not in found.tags
    assert "&lt;script&gt;" in document
    assert printable(HOSTILE) in found.text
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u202a-\u202e]", document)
    assert not [a for _, attributes in found.elements for a in attributes if a.startswith("on")]


def test_it_is_one_document_that_fetches_nothing(store):
    """No address but that of the metrics, no script, no file of its own; it reloads itself."""
    condemn(store)
    found = read(gathered(store))
    assert [a for a in found.addresses if not a.startswith("data:")] == ["/metrics"]
    assert ("meta", {"http-equiv": "refresh", "content": "30"}) in found.elements
    assert not re.search(r"url\(|@import", status_page.STYLE)


def test_the_page_says_of_when_it_is(store):
    """Ages are those of the moment at which the daemon gathered it."""
    condemn(store)
    found = read(gathered(store, NOW + 200))
    assert "judged 4 minutes ago" in found.text
    assert f"This is the state at {format_time(NOW + 200)}" in found.text


def test_facts_that_nobody_renews_lose_their_say(store):
    """After half an hour nothing on the page is healthy; alarms stay."""
    condemn(store)
    old = gathered(store, NOW + status.UNTENDED)
    assert [d.verdict.state for d in old.devices] == [State.FAULTY, State.UNKNOWN]
    assert "healthy" not in {a.get("class") for _, a in read(old).elements}


def test_the_page_of_a_large_machine_is_made_at_once(store):
    """64 devices with 2,000 events: a reader waits for no second."""
    for index in range(64):
        device = Device(uuid=f"GPU-{index}", backend="cuda", index=index, model="NVIDIA H200")
        store.see_device(device, NOW)
        events = [Event(device=device.uuid, kind="xid", name=str(n), first=NOW, last=NOW) for n in range(32)]
        store.add_events(events)
    found = gathered(store)
    begun = time.perf_counter()
    body = status_page.render(found)
    assert time.perf_counter() - begun < soon(1.0)
    assert body.count(b"<article") == 64


# --- How it is served ------------------------------------------------------------------------------------------------


def test_every_answer_forbids_scripts(store):
    """The headers that keep a browser from running or fetching anything, on the page and on everything else."""
    condemn(store)
    found = gathered(store)
    server = Server("127.0.0.1", 0, {"/": lambda _: Answer(200, status_page.CONTENT_TYPE, status_page.render(found))})
    server.start()
    try:
        for path, code in (("/", 200), ("/elsewhere", 404)):
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
            connection.request("GET", path)
            answer = connection.getresponse()
            answer.read()
            connection.close()
            assert answer.status == code
            policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
            assert answer.headers["Content-Security-Policy"] == policy
            assert answer.headers["X-Content-Type-Options"] == "nosniff"
            assert answer.headers["Content-Type"].startswith("text/html" if code == 200 else "text/plain")
    finally:
        server.close()


# --- A real daemon, a real browser -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A daemon on three GPUs one of which is broken and has a hostile name: (daemon, options of commands, machine)."""
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed in this interpreter")
    directory = tmp_path_factory.mktemp("served")
    machine = StandIn(directory, 3)
    machine.set(1, "name", "<script>document.title='owned'</script> H200 & co")
    machine.set(1, "remapped.failed", 1)
    settings = {"period": "5s", "settings": {"sysfs": str(directory / "sys")}}
    config = configure(
        directory, "passes", "mismatches", "skips", each={"nvidia_telemetry": settings | {"enabled": True}}
    )
    state = directory / "state"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in machine.environment.items():
            patch.setenv(name, value)
        process = Daemon(config, state)
    with running(process) as daemon:
        with Store.open(state) as store:
            eventually(lambda: len(store.devices()) == 4)
            now = time.time()
            said = {"at": now, "until": now + 1e5, "reason": "RMA <4711> filed", "by": "anna"}
            store.add_ack(Ack(device=machine.uuids[1], kind="acknowledged", **said))
            store.add_events(
                [Event(device=machine.uuids[0], kind="xid", name="31", first=now, last=now, detail="MMU <fault>")]
            )
        yield daemon, ("--config", config, "--state-dir", state), machine


def settled(options: tuple[object, ...], broken: str) -> dict[str, Any]:
    """Return the status once the device `broken` is faulty, the others have evidence, and the operator was heard."""

    def ask() -> dict[str, Any] | None:
        document = canaryd("status", "--json", *options).document
        states = {d["device"]: d for d in document["devices"]}
        rules = {f["rule"] for d in states.values() for f in d["findings"]}
        runs = sum(at is not None for d in states.values() for at in d["evidence"].values())
        told = states[broken]["state"] == "faulty" and {"acknowledged", "exact-mismatch"} <= rules
        return document if told and runs >= 5 else None

    return eventually(ask)


def test_a_browser_sees_what_the_command_says(served, tmp_path):
    """The facts of `canaryd status --json` are in the document that chromium made of the daemon's page."""
    daemon, options, machine = served
    document = settled(options, machine.uuids[1])
    faulty = next(d for d in document["devices"] if d["device"] == machine.uuids[1])
    assert (faulty["state"], faulty["cause"]) == ("faulty", "hardware")

    def lacking() -> list[str]:
        said = canaryd("status", "--json", *options).document
        for device in said["devices"]:  # a poll that the store does not hold yet is newer on the page
            device["evidence"] = {p: at for p, at in device["evidence"].items() if p != "nvidia_telemetry"}
        found = Page(opened(daemon.address + "/", tmp_path / "profile"))
        assert "script" not in found.tags
        assert found.text.startswith("FAULTY · ")
        # Each command has the options that choose the daemon's record; JSON has none of them.
        return missing(said, found.text.replace(f" {' '.join(map(str, options))}", ""))

    for _ in range(5):  # a verdict may be renewed between the two questions
        left_out = lacking()
        if not left_out:
            break
    assert left_out == []


def test_the_page_follows_the_daemon(served):
    """A release is on it, without a restart and without a look at a device; and it is no longer when it is over."""
    daemon, options, _ = served
    assert "About canaryd itself" not in daemon.get("/")[1]
    assert canaryd("release", "--for", "10m", *options).code == 0
    eventually(lambda: "released until" in daemon.get("/")[1])
    assert canaryd("release", "--end", *options).code == 0
    eventually(lambda: "released until" not in daemon.get("/")[1])


@pytest.mark.parametrize("count", [1, 2])
def test_few_devices_use_the_width(store, tmp_path, count):
    """At 1,100 pixels the cards of one or two healthy devices leave nothing of the page empty."""
    for device in (SOUND, GPU)[:count]:
        store.see_device(device, NOW)
        store.set_verdict(
            Verdict(device=device.uuid, state=State.HEALTHY, cause=Cause.NONE, findings=(), decided=NOW - 60, since=NOW)
        )
    script = 'd => [...d.querySelectorAll("article")].map(card => card.getBoundingClientRect().right)'
    edges = measured(status_page.render(gathered(store)).decode(), tmp_path, (1100, 900), script)
    assert len(edges) == count
    assert max(edges) > 1050


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (1280, "dark"), (360, "light"), (2560, "dark")])
def test_nothing_is_cut_off(store, tmp_path, width, scheme):
    """No part is wider than the window, from a telephone to a wall, and the ink stands out from the paper."""
    condemn(store)
    script = """d => {
      const style = getComputedStyle(d.body);
      const widest = Math.max(...[...d.body.querySelectorAll("*")].map(x => x.getBoundingClientRect().right));
      return {widest, scroll: d.documentElement.scrollWidth, ink: style.color, paper: style.backgroundColor};
    }"""
    colors = f"--blink-settings=preferredColorScheme={int(scheme == 'light')}"
    found = measured(status_page.render(gathered(store)).decode(), tmp_path, (width, 900), script, colors)
    assert found["widest"] <= width
    assert found["scroll"] <= width
    ink, paper = (sum(map(int, re.findall(r"\d+", found[part])[:3])) for part in ("ink", "paper"))
    assert (ink - paper > 500) if scheme == "dark" else (paper - ink > 500)


def test_the_page_answers_like_every_route(served):
    """As HTML, with HEAD too, and with the metrics one link away."""
    daemon, _, _ = served
    connection = http.client.HTTPConnection(urlsplit(daemon.address).netloc, timeout=10)
    connection.request("HEAD", "/")
    answer = connection.getresponse()
    assert (answer.status, answer.headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    connection.close()
    assert daemon.get("/metrics")[0] == 200
    assert "use one of /, /endpoints/, /healthz, /metrics, /readyz" in daemon.get("/nowhere")[1]


def test_a_record_that_cannot_be_read_is_the_answer(tmp_path):
    """Waiting does not help; only where nothing is on record yet, the daemon knows all."""
    state = tmp_path / "state"
    Store.open(state).close()
    with out_of_reach(state), Store.open(state) as store:
        seen = status.gather(store, Config(), NOW, daemon=True, evidence={}, itself=True)
        words = Page(status_page.render(seen).decode()).text
        assert f"UNKNOWN whether this node's numbers are right: {store.unreadable}" in words
        assert "cannot read" in store.unreadable
        assert "Do now: Make the stored record readable, then ask again" in words
    new = tmp_path / "new"
    new.symlink_to(tmp_path / "nowhere")
    with Store.open(new) as store:
        assert store.problem
        assert status.gather(store, Config(), NOW, daemon=True, evidence={}, itself=True).unreadable == ""
