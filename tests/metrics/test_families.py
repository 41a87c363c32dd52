"""What is exported, as the scraper reads it: the golden page, the documentation, the bounds."""

import dataclasses
import math
import re
import time
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from canaryd.facts import Reading
from canaryd.judge.recordings.drift import Drift
from canaryd.judge.telemetry.readings import READINGS
from canaryd.judge.telemetry.signals import Poll
from canaryd.metrics import families as metrics_families
from canaryd.metrics.families import FAMILIES, DeviceView, Snapshot, render
from canaryd.model import Cause, Device, Finding, Outcome, Run, State, Verdict
from tests.command import soon
from tests.full_node import VALUES_OF_NODE, node
from tests.programs import linted

HERE = Path(__file__).parents[1]
GOLDEN = HERE / "data" / "metrics.txt"
DOCS = HERE.parent / "docs" / "metrics.md"
NOW = 1_790_000_000.0
STACK = {"torch": "2.13.0+cu130", "cuda": "13.0", "driver": "580.95", "kernel": "6.1.0", "python": "3.11.9"}


def gpu(index=0, **changes):
    fields = {"uuid": f"GPU-{index:04x}", "backend": "cuda", "index": index, "model": "NVIDIA H100 80GB HBM3"}
    detail = {"bus_id": f"00000000:{index:02x}:00.0", "serial": f"165{index:04d}"}
    return Device(**{**fields, "detail": detail, **changes})


def verdict(device, state=State.HEALTHY, cause=Cause.NONE, **changes):
    return Verdict(
        device=device.uuid, state=state, cause=cause, findings=(), decided=NOW - 5, since=NOW - 900, **changes
    )


def run(device, probe, **changes):
    fields = {"id": "019a-1", "probe_version": 1, "started": NOW - 60, "seconds": 2.5, "outcome": Outcome.COMPLETED}
    return Run(device=device.uuid, probe=probe, **{**fields, "stack": STACK, **changes})


def view(device, **changes):
    fields = {"present": True, "verdict": None, "drill_verdict": None}
    maps = {"last_runs": {}, "last_success": {}, "fault_rate": {}, "fingerprints": {}}
    return DeviceView(device=device, **{**fields, **maps, **changes})


def snapshot(*views, counters=None, **values):
    return Snapshot(devices=views, counters=counters or {}, values=VALUES_OF_NODE | values)


def counter(name, value, /, **labels):
    return {(name, frozenset(labels.items())): value}


def example():
    """Return a snapshot with every metric: a healthy, an accused, an unjudged and a vanished device."""
    good, bad, fresh, gone = (gpu(i) for i in range(4))
    poll = run(good, "nvidia_telemetry", seconds=0.02, started=NOW - 3, absent={"a": "none", "b": "none"})
    matmul = run(good, "exact_matmul")
    stack_id = matmul.stack_id
    return snapshot(
        view(
            good,
            verdict=verdict(good),
            drill_verdict=verdict(good, State.FAULTY, Cause.UNDETERMINED, drill=True),
            last_runs={
                "exact_matmul": matmul,
                "fp8_matmul": run(good, "fp8_matmul", outcome=Outcome.SKIPPED, stack={}),
            },
            stacks={stack_id: STACK},
            periods={"exact_matmul": 600.0},
            last_success={"exact_matmul": NOW - 60},
            fault_rate={"exact_matmul": 2.5e-05},
            fingerprints={("exact_matmul", stack_id): 123_456_789},
            drifts=[
                Drift(
                    probe="model_canary",
                    reading="bfloat16",
                    status={"known": 3, "unknown": 1, "learning": 0},
                    ratio=math.inf,
                    agreement=0.25,
                    first=10,
                ),
                Drift(probe="endpoint_canary", reading="chat", status={"known": 0, "unknown": 0, "learning": 2}),
            ],
            polls={"nvidia_telemetry": Poll(period=15.0, newest=poll, completed=poll)},
            spent={"round": 16.5},
            skipped={"load": 2, "share": 0},
            withheld="load",
            readings=[
                Reading(name=name, value=i, labels=dict.fromkeys(kind.labels, "x"))
                for i, (name, kind) in enumerate(READINGS.items())
            ],
        ),
        view(
            bad,
            verdict=dataclasses.replace(
                verdict(bad, State.FAULTY, Cause.HARDWARE),
                findings=2 * (Finding(rule="gpu-lost", state=State.FAULTY, cause=Cause.HARDWARE, message="lost"),),
            ),
            last_runs={"exact_matmul": run(bad, "exact_matmul")},
            acknowledged=True,
            acknowledged_at=NOW - 86_400.0,
        ),
        view(dataclasses.replace(fresh, weak_identity=True, detail={}), periods={"exact_matmul": 600.0}),
        view(gone, present=False, verdict=verdict(gone), last_runs={"exact_matmul": run(gone, "exact_matmul")}),
        counters={
            **counter("probe_runs", 12, device=good.uuid, probe="exact_matmul", outcome="completed"),
            **counter("probe_runs", 1, device=good.uuid, probe="exact_matmul", outcome="timed_out"),
            **counter("probe_trials", 12_000_000, device=good.uuid, probe="exact_matmul"),
            **counter("drill_runs", 1, device=good.uuid, probe="exact_matmul"),
            **counter("drill_mismatches", 3, device=good.uuid, probe="exact_matmul"),
            **counter("probe_mismatches", 7, device=bad.uuid, probe="exact_matmul"),
            **counter("probe_runs", 40, device=good.uuid, probe="nvidia_telemetry", outcome="completed"),
            **counter("xid_errors", 2, device=bad.uuid, xid="79"),
            **counter("xid_errors", 1, device=bad.uuid, xid="160"),
            **counter("sxid_errors", 3, device=bad.uuid, sxid="20034"),
            **counter("kernel_log_events", 4, device=bad.uuid, kind="aer", name="fatal"),
            **counter("stack_changes", 5, device=bad.uuid, component="inforom"),
            **counter("probe_runs", 2, device=gone.uuid, probe="exact_matmul", outcome="completed"),
            **counter("probe_runs", 5, device="GPU-forgotten", probe="exact_matmul", outcome="completed"),
        },
        canaryd_store_problem=1,
        canaryd_workers_abandoned_total=1,
        canaryd_devices_expected=4,
        canaryd_budget_share_ratio=0.005,
    )


def samples(page):
    """Return {(name, labels)} → value of an exposition."""
    families = text_string_to_metric_families(page.decode())
    return {(s.name, frozenset(s.labels.items())): s.value for f in families for s in f.samples}


def select(page, name, **labels):
    """Return the values of the series of `name` that carry `labels`."""
    return [v for (n, found), v in samples(page).items() if n == name and set(labels.items()) <= found]


# --- exposition ---------------------------------------------------------------------------------------------------


def test_golden():
    """The whole page is what tests/data/metrics.txt says, byte for byte."""
    wanted = GOLDEN.read_text()
    assert render(example()).decode() == wanted, "meant? then: python -m tests.metrics.test_families"


def test_golden_shows_every_metric():
    """The golden page leaves no metric out."""
    declared = set(re.findall(r"^# TYPE (\S+)", GOLDEN.read_text(), re.MULTILINE))
    assert declared == set(FAMILIES)


PAGES = {
    "example": lambda: render(example()),
    "empty": lambda: render(snapshot()),
    "scraped": lambda: metrics_families.page_of(snapshot()).text,
    "node": lambda: render(node(2, 7)),
}


@pytest.mark.parametrize("page", PAGES)
def test_promtool_has_nothing_to_say(page):
    """Prometheus's own linter accepts names, types and help texts."""
    assert linted(PAGES[page]().decode()) == ""


def test_documentation():
    """docs/metrics.md names each metric with its labels, and no other; and every value of a set."""
    text = DOCS.read_text()
    for member in (*Outcome, *State, *Cause):
        assert re.search(rf"\b{member.value}\b", text.partition("**Values.**")[2].partition("\n\n")[0]), member
    device, daemon = (
        text.partition(f"## Series of {of}\n")[2].partition("\n## ")[0] for of in ("a device", "the daemon")
    )
    named = {name: ("device", "index", "model", *labels) for name, labels in documented(device).items()}
    named |= {name: labels for name, labels in documented(daemon).items() if name.startswith("canaryd_")}
    assert named == {name: family.labels for name, family in FAMILIES.items()}
    process = set(
        re.findall(r"^# TYPE (process_\w+) ", metrics_families.page_of(snapshot()).text.decode(), re.MULTILINE)
    )
    assert {name for name in documented(daemon) if name.startswith("process_")} == process


def documented(text):
    """Return the labels of each metric that stands in a text as `name{label,label}`."""
    found = re.findall(r"`((?:canaryd|process)_\w+)(?:\{([\w,]+)\})?`", text)
    return {name: tuple(labels.split(",")) if labels else () for name, labels in found}


@pytest.mark.parametrize(
    "reading",
    [
        Reading(name="made_up", value=1),
        Reading(name="power_watts", value="hot"),
        Reading(name="temperature_celsius", value=40),
        Reading(name="power_watts", value=1, labels={"sensor": "core"}),
    ],
)
def test_a_reading_that_is_no_metric_is_not_shown(reading):
    """What a stranger's telemetry probe makes up, mislabels or words costs nothing else."""
    page = render(snapshot(view(gpu(), readings=[reading, Reading(name="load_average", value=0.5)])))
    assert select(page, "canaryd_load_average") == [0.5]
    assert not select(page, f"canaryd_{reading.name}")


def test_a_reading_that_two_probes_give_is_one_series():
    """Prometheus refuses a whole page for one series that stands twice."""
    twice = [Reading(name="power_watts", value=value) for value in (300, 310)]
    page = render(snapshot(view(gpu(), readings=twice)))
    assert select(page, "canaryd_power_watts") == [310.0]
    assert str(page).count("canaryd_power_watts{") == 1


def test_a_poll_that_fails_is_no_success():
    """The duration is that of the newest poll, the last success that of the newest one that completed."""
    device, probe = gpu(), "nvidia_telemetry"
    good, lost = (
        run(device, probe, started=NOW - ago, seconds=seconds, outcome=outcome)
        for ago, seconds, outcome in ((600, 0.02, Outcome.COMPLETED), (3, 5.0, Outcome.TIMED_OUT))
    )
    page = render(snapshot(view(device, polls={probe: Poll(period=15.0, newest=lost, completed=good)})))
    assert select(page, "canaryd_probe_duration_seconds", probe=probe) == [5.0]
    assert select(page, "canaryd_probe_last_success_timestamp_seconds", probe=probe) == [NOW - 600]


def test_no_verdict_is_unknown():
    """A device that was never judged is unknown, cause undetermined, and has no time of judgement."""
    page = render(snapshot(view(gpu())))
    assert select(page, "canaryd_device_state", state="unknown") == [1.0]
    assert select(page, "canaryd_device_state", state="healthy") == [0.0]
    assert select(page, "canaryd_device_cause", cause="undetermined") == [1.0]
    assert not select(page, "canaryd_device_verdict_timestamp_seconds")


def test_expected_devices_only_if_configured():
    """Without an expectation there is no series, rather than a 0."""
    assert select(render(snapshot(canaryd_devices_expected=0)), "canaryd_devices_expected") == [0.0]
    assert not select(render(snapshot()), "canaryd_devices_expected")


@pytest.mark.parametrize("value", [0, 1, 123_456, 1_234_567, 10**15, 10**15 + 1, 2**52 + 1, 2**53 - 2, 2**53 - 1])
def test_fingerprints_are_exact(value):
    """An integer below 2^53 arrives digit for digit, exponents or not."""
    page = render(snapshot(view(gpu(), fingerprints={("exact_matmul", "abc"): value})))
    text = re.search(rb"^canaryd_golden_fingerprint\{.*\} (\S+)$", page, re.MULTILINE)[1]
    assert int(float(text)) == value


@pytest.mark.parametrize(
    "model",
    ['A "quoted" name', "back\\slash", "trailing\\", "two\nlines", "\\n", "a}b,c=d", "Ünïcode™", "tab\tcr\r", ""],
)
def test_label_values_survive(model):
    """Any text of a vendor can be read back from a label."""
    page = render(snapshot(view(gpu(model=model))))
    assert dict(next(labels for name, labels in samples(page) if name == "canaryd_device_info"))["model"] == model
    assert linted(page.decode()) == ""


def test_lone_surrogates():
    """A label that UTF-8 cannot carry gets a question mark instead of breaking the page."""
    assert b'model="a?b"' in render(snapshot(view(gpu(model="a\ud800b"))))


def series(page):
    """Return the lines of a page that are series."""
    return [line for line in page.decode().splitlines() if not line.startswith("#")]


SIZES = {"16 GPUs": node(16), "2 GPUs of 7 instances": node(2, 7)}


def test_a_full_node_is_bounded():
    """16 GPUs, every probe, reading and counter: a few hundred series a device, no series twice, made quickly."""
    for full in SIZES.values():
        started = time.thread_time()
        page = render(full)
        assert time.thread_time() - started < soon(1.0)
        lines = series(page)
        names = [line.rpartition(" ")[0] for line in lines]
        assert len(names) == len(set(names))
        assert len(lines) / len(full.devices) < 750  # docs/metrics.md
        assert len(metrics_families.page_of(full).answer({"accept-encoding": "gzip"}).body) < len(page) / 15
        assert {v.device.uuid for v in full.devices} <= {
            d for line in names for d in re.findall(r'device="(.*?)"', line)
        }
        shown = {re.match(r"\w+", name)[0] for name in names}
        assert set(FAMILIES) - shown <= {
            name for name in FAMILIES if name.removeprefix("canaryd_") in READINGS
        }  # what GPUs never give


def test_what_people_and_programs_write_is_no_label():
    """Messages, details, commands and made-up readings appear nowhere: no series is new for them."""
    for index in range(3):
        page = render(node(1, text=f"words of moment {index}"))
        assert b"words of moment" not in page
        assert series(page) == series(render(node(1)))


if __name__ == "__main__":
    GOLDEN.write_bytes(render(example()))


@pytest.mark.parametrize("name", ["xid_errors", "sxid_errors", "kernel_log_events", "stack_changes", "probe_runs"])
def test_a_counter_without_its_labels_costs_no_page(name):
    """Labels that rotted in the store leave out one series, and every other one is shown."""
    device = gpu()
    counters = counter(name, 1.0, device=device.uuid, rotten="31") | counter(name, 1.0, probe="exact_matmul")
    page = render(snapshot(view(device), counters=counters)).decode()
    assert f'canaryd_device_present{{device="{device.uuid}"' in page
    assert "rotten" not in page
