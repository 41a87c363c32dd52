"""`canaryd history`: what a real store knows of a device, in text that is read at night and in JSON."""

import json
import re
import time

import jsonschema
import pytest

from canaryd.config.settings import Config
from canaryd.facts import Comparison, Evidence, Exactness, Reading
from canaryd.formatting import DAY, HOUR, format_time, time_zone
from canaryd.judge.slower import summary
from canaryd.model import Ack, Cause, Device, Event, Finding, Outcome, Rival, Run, State, Verdict
from canaryd.report import history, terminal
from canaryd.report.history import as_json, as_text, gather
from canaryd.store.store import Store
from tests.command import ROOT

SCHEMA = json.loads((ROOT / "docs/history.schema.json").read_text())
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)
NOW = 20_500.5 * DAY
GPU = Device(uuid="GPU-1", backend="cuda", index=3, model="NVIDIA H200")
OTHER = Device(uuid="GPU-2", backend="cuda", index=4, model="NVIDIA H200")


@pytest.fixture
def store(tmp_path):
    with Store.open(tmp_path / "state", now=lambda: NOW) as opened:
        yield opened


def verdict(state, cause, *messages, since=NOW - 7200, decided=NOW - 60):
    rival = Rival(cause=Cause.SOFTWARE, why="the stack is the same", rejected=True)
    found = tuple(Finding(rule=m.split()[0], state=state, cause=cause, message=m, rivals=(rival,)) for m in messages)
    return Verdict(device=GPU.uuid, state=state, cause=cause, findings=found, decided=decided, since=since)


def run(number, at, *readings, stack="2.9", parts=None, **more):
    common = {"id": f"r{number:05}", "device": GPU.uuid, "probe": "exact_matmul", "probe_version": 1, "seconds": 1.0}
    common |= {"outcome": Outcome.COMPLETED, "stack": parts or {"torch": stack, "driver": "570"}}
    return Run(**{**common, "started": at, "readings": readings, **more})


def wrong(number, at, **more):
    evidence = Evidence(
        wrong=1, total=1024, first=(((0, 1), "00", "01"),), bits={}, zeroed=0, nonfinite=0, lines={}, pattern="one"
    )
    seen = Comparison(
        case="bfloat16/cancel", shape="M=1", seed=1, exactness=Exactness.UNIVERSAL, trials=9, wrong_trials=2,
        evidence=evidence,
    )  # fmt: skip
    return run(number, at, comparisons=(seen,), **more)


def event(kind, name, at, **more):
    return Event(**{"device": GPU.uuid, "kind": kind, "name": name, "first": at, "last": at, **more})


def speed(value):
    return Reading(name="speed_float32", value=value, unit="flops per second")


def eventful(store):
    """A device to which everything happened that a history tells."""
    store.see_device(GPU, NOW - 60 * DAY)
    store.see_device(OTHER, NOW)
    store.set_present({GPU.uuid, OTHER.uuid}, NOW)
    store.set_verdict(verdict(State.HEALTHY, Cause.NONE, since=NOW - 20 * DAY))
    store.set_verdict(verdict(State.SUSPECT, Cause.UNDETERMINED, "exact-mismatch in x", since=NOW - 5 * HOUR))
    both = ("exact-mismatch in x", "confirmed by three re-runs")
    store.set_verdict(verdict(State.FAULTY, Cause.HARDWARE, *both, since=NOW - 4 * HOUR))
    for day in range(40):
        for n in range(4):
            store.add_run(run(10 * day + n, NOW - (40 - day) * DAY + n * HOUR, speed(4e12)))
    for n in range(3):
        store.add_run(wrong(900 + n, NOW - 5 * HOUR + n * 600, confirms="r00900" if n else ""))
    store.add_run(run(950, NOW - 3 * HOUR, outcome=Outcome.TIMED_OUT, detail="killed after 300 s"))
    store.add_run(run(951, NOW - 2 * HOUR, unknown=("prefill/1",)))
    store.add_run(run(960, NOW - 1.5 * HOUR, stack="2.10"))
    store.add_events(
        [
            event("xid", "79", NOW - 6 * HOUR, detail="off the bus"),
            event("change", "driver", NOW - 9 * DAY, before="560", after="570"),
            event("xid", "31", NOW, device=OTHER.uuid, detail="of the other"),
        ]
    )
    store.add_ack(Ack(device=GPU.uuid, kind="acknowledged", at=NOW - HOUR, reason="ticket 7", until=NOW + DAY, by="jo"))


def look(store, device="GPU-1", span=30 * DAY, days=None):
    return gather(store, Config(), device, NOW - span, NOW, days or {})


def test_everything_that_happened_is_told_newest_first(store):
    """Verdicts with why, failures of a day together, events, acks and stacks; nothing of another device."""
    eventful(store)
    ((_, items),) = look(store).devices
    told = [(i.kind, i.role, i.count) for i in items]
    assert told == [
        ("ack", "mark", 1),
        ("stack", "calm", 1),
        ("run", "bad", 1),
        ("run", "calm", 1),
        ("verdict", "bad", 1),
        ("run", "bad", 3),
        ("verdict", "bad", 1),
        ("event", "bad", 1),
        ("event", "calm", 1),
        ("verdict", "good", 1),
    ]
    text = [i.text for i in items]
    assert text[0] == f"acknowledged until {format_time(NOW + DAY)} by jo: ticket 7"
    assert "torch 2.9 → 2.10" in text[1]
    assert "differ from the baseline, in case prefill/1" in text[2]
    assert "timed out: killed after 300 s" in text[3]
    assert text[4] == "became faulty (hardware): confirmed by three re-runs"  # what it was suspected of was told before
    assert text[5] == "6 wrong results in 3 runs of exact_matmul (2 of them retests), in case bfloat16/cancel"
    assert text[6] == "became suspect (cause unknown): exact-mismatch in x"
    assert "off the bus" in text[7]
    assert "560 → 570" in text[8]
    assert items[5].runs == ("r00900", "r00901", "r00902")


def test_a_run_that_the_device_broke_is_told(store):
    """An error of the device is no outcome of the probe's own: it has words too."""
    store.see_device(GPU, NOW)
    store.add_run(run(1, NOW - HOUR, outcome=Outcome.DEVICE_ERROR, detail="CUDA error: unspecified launch failure"))
    told = " ".join(as_text(look(store)).split())
    assert "a run of exact_matmul ended with a device error: CUDA error: unspecified launch failure" in told


def test_what_is_older_or_of_the_future_is_not_told(store):
    """The window is kept on both sides: a clock that ran ahead leaves nothing on top."""
    eventful(store)
    store.add_events([event("xid", "31", NOW + DAY, detail="ahead")])
    ((_, items),) = look(store, span=5.5 * HOUR).devices
    assert min(i.at for i in items) >= NOW - 5.5 * HOUR
    assert not any("ahead" in i.text for i in items)


def test_the_text_begins_with_the_verdict_and_fits(store):
    """80 columns, the zone of its times, sentences."""
    eventful(store)
    text = as_text(look(store))
    lines = text.splitlines()
    assert lines[0] == f"FAULTY   cuda:3  NVIDIA H200  since {format_time(NOW - 4 * HOUR, seconds=False)} (hardware)"
    assert max(map(len, lines)) <= 80
    assert (lines[-2].partition("; ")[2], lines[-1]) == (
        f"times: {time_zone()}. Everything:",
        "canaryd history --json",
    )


def test_nothing_is_cut_in_silence(store):
    """What does not fit is counted, and where all of it is."""
    store.see_device(GPU, NOW)
    hours = [NOW - n * HOUR for n in range(40)]
    store.add_events([event("xid", str(n), at, detail="x") for n, at in enumerate(hours)])
    found = look(store)
    text = as_text(found)
    assert f"and {40 - history.MOST_ITEMS} more: canaryd history --json" in text
    assert len(as_json(found)["devices"][0]["timeline"]) == 40


def test_a_store_that_knows_nothing(store):
    """An empty record, and a device without any evidence, are said to be just that."""
    start = "nothing is recorded yet\nDo now: Start the daemon:\n        canaryd run\n        Or test once:\n"
    assert as_text(look(store, None)).startswith(f"{start}        canaryd check\n")
    store.see_device(GPU, NOW)
    text = as_text(look(store, None))
    assert "UNKNOWN" in text
    assert "nothing on record" in text


def test_all_devices_are_told_the_worst_first(store):
    """Where none is named."""
    eventful(store)
    assert [d.device.uuid for d, _ in look(store, None).devices] == ["GPU-1", "GPU-2"]


def test_colour_only_where_asked_and_never_from_a_part(store):
    """What a device calls itself cannot paint the terminal."""
    device = Device(uuid="GPU-1", backend="cuda", index=3, model="evil\x1b[31m\nname")
    store.see_device(device, NOW)
    store.set_verdict(verdict(State.FAULTY, Cause.HARDWARE, "bad\x1b]0;title\x07"))
    plain, coloured = as_text(look(store)), as_text(look(store), color=True)
    assert "\x1b" not in plain
    assert "evil?[31m" in plain
    assert set(re.findall("\x1b[^m]*m", coloured)) <= {*terminal.COLOURS.values(), terminal.RESET}
    assert re.sub("\x1b[^m]*m", "", coloured) == plain


def test_the_json_is_as_its_schema_says(store):
    """Valid, with the findings and their rivals."""
    eventful(store)
    document = json.loads(json.dumps(as_json(look(store, None))))
    VALIDATOR.validate(document)
    (one, _) = document["devices"]
    assert (document["schema"], one["state"], one["name"]) == ("canaryd.history/2", "faulty", "cuda:3")
    (rival,) = one["findings"][0]["rivals"]
    assert (rival["cause"], rival["why"], rival["rejected"]) == ("software", "the stack is the same", True)


def test_summaries_of_days_reach_back_beyond_the_runs(store):
    """Where the runs are gone, the days tell the change of the software."""
    store.see_device(GPU, NOW)
    days = []
    for n in range(60):
        at = (20_440 + n) * DAY
        days.append(summary(GPU.uuid, 20_440 + n, [run(n, at + HOUR, speed(4e12), stack=f"2.{n // 30}")], []))
    ((_, items),) = look(store, span=90 * DAY, days={GPU.uuid: days}).devices
    assert [item.text for item in items] == ["the software changed: torch 2.0 → 2.1"]


def test_the_end_of_an_acknowledgement_is_no_new_one(store):
    """It is said who ended it; one that merely ran out later is told as it was given."""
    store.see_device(GPU, NOW)
    for at, until, by in ((NOW - 90, NOW + DAY, "jo"), (NOW - 60, NOW - 60, "jo"), (NOW - 30, NOW - 30, "")):
        store.add_ack(Ack(device=GPU.uuid, kind="acknowledged", at=at, reason="ticket 7", until=until, by=by))
    ((_, items),) = look(store).devices
    assert [i.text for i in items] == [
        "an operator ended the acknowledgement: ticket 7",
        "jo ended the acknowledgement: ticket 7",
        f"acknowledged until {format_time(NOW + DAY)} by jo: ticket 7",
    ]


def test_a_look_at_a_full_store_takes_seconds(store):
    """What is read is bounded, however much is there."""
    store.see_device(GPU, NOW)
    for n in range(900):
        store.add_poll(run(n, NOW - n * 300, speed(1.0), probe="nvidia_telemetry"), {})
    started = time.process_time()
    as_text(look(store))
    assert time.process_time() - started < 5.0  # 0.4 s where this was written
