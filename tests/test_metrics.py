"""The exposition and its HTTP server."""

import contextlib
import dataclasses
import http.client
import logging
import math
import os
import re
import resource
import shutil
import socket
import subprocess
import time
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from canaryd import metrics
from canaryd.metrics import CONTENT_TYPE, FAMILIES, DeviceView, Limits, PollView, Server, Snapshot, render
from canaryd.model import Cause, Device, Finding, Outcome, Reading, Run, State, Verdict
from canaryd.readings import READINGS
from canaryd.recorded import Drift

HERE = Path(__file__).parent
GOLDEN = HERE / "data" / "metrics.txt"
DOCS = HERE.parent / "docs" / "metrics.md"
NOW = 1_790_000_000.0
UNITS = ("seconds", "bytes", "celsius", "watts", "joules", "hertz")
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


def snapshot(*views, **changes):
    fields = {"version": "0.1.0", "counters": {}, "store_problem": "", "abandoned_workers": 0, "expected_devices": None}
    return Snapshot(devices=views, **{**fields, "config_reload_ok": True, "config_reloaded": NOW - 3600, **changes})


def counter(name, value, /, **labels):
    return {(name, frozenset(labels.items())): value}


def example():
    """Return a snapshot with every metric: a healthy, an accused, an unjudged and a vanished device."""
    good, bad, fresh, gone = (gpu(i) for i in range(4))
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
            last_success={"exact_matmul": NOW - 60},
            fault_rate={"exact_matmul": 2.5e-05},
            fingerprints={("exact_matmul", stack_id): 123_456_789},
            drifts=[
                Drift(
                    probe="canary_prompts",
                    reading="bfloat16",
                    status={"known": 3, "unknown": 1, "learning": 0},
                    ratio=math.inf,
                    agreement=0.25,
                    first=10,
                ),
                Drift(probe="endpoint_canary", reading="chat", status={"known": 0, "unknown": 0, "learning": 2}),
            ],
            polls={"nvidia_telemetry": PollView(seconds=0.02, last_success=NOW - 3, absent=2)},
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
        ),
        view(dataclasses.replace(fresh, weak_identity=True, detail={}), probes=["exact_matmul"]),
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
        store_problem="/var/lib/canaryd: no space left on device",
        abandoned_workers=1,
        expected_devices=4,
    )


def samples(page):
    """Return {(name, labels)} → value of an exposition."""
    families = text_string_to_metric_families(page.decode())
    return {(s.name, frozenset(s.labels.items())): s.value for f in families for s in f.samples}


def select(page, name, **labels):
    """Return the values of the series of `name` that carry `labels`."""
    return [v for (n, found), v in samples(page).items() if n == name and set(labels.items()) <= found]


def promtool(page):
    """Return what `promtool check metrics` says of a page; "" is praise."""
    tool = shutil.which("promtool")
    if not tool:
        pytest.skip("promtool is not installed: the exposition was not linted")
    done = subprocess.run([tool, "check", "metrics"], input=page, capture_output=True, check=False, timeout=30)
    return (done.stdout + done.stderr).decode()


# --- exposition ---------------------------------------------------------------------------------------------------


def test_golden():
    """The whole page is what tests/data/metrics.txt says, byte for byte."""
    wanted = GOLDEN.read_text()
    assert render(example()).decode() == wanted, f"meant? then: python {Path(__file__).name}"


def test_golden_shows_every_metric():
    """The golden page leaves no metric out."""
    declared = set(re.findall(r"^# TYPE (\S+)", GOLDEN.read_text(), re.MULTILINE))
    assert declared == set(FAMILIES)


@pytest.mark.parametrize("page", [render(example()), render(snapshot()), metrics.process_metrics()])
def test_promtool_has_nothing_to_say(page):
    """Prometheus's own linter accepts names, types and help texts."""
    assert promtool(page) == ""


def test_documentation():
    """docs/metrics.md lists each metric with its type, labels and meaning, and no other; and every value of a set."""
    for member in (*Outcome, *State, *Cause):
        assert re.search(rf"\b{member.value}\b", DOCS.read_text().rpartition("|\n")[2]), member
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| (.*?) \| (.*?) \| (.*?) \|$", DOCS.read_text(), re.MULTILINE)
    documented = {name: (kind, tuple(re.findall(r"`(\w+)`", labels)), text) for name, kind, labels, _, text in rows}
    ours = {name: row for name, row in documented.items() if name.startswith("canaryd_")}
    assert ours == {name: tuple(family) for name, family in FAMILIES.items()}
    process = dict(re.findall(r"^# TYPE (\S+) (\S+)", metrics.process_metrics().decode(), re.MULTILINE))
    assert {name: row[0] for name, row in documented.items() if name.startswith("process_")} == process
    for name, _, _, unit, _ in rows:
        base = name.removesuffix("_total").rpartition("_")[2]
        assert (base if base in UNITS else "1") == unit, name


def test_process_metrics_are_those_of_this_process():
    """The daemon's own memory and descriptors can be read beside the prepared page."""
    page = metrics.process_metrics()
    assert select(page, "process_resident_memory_bytes")[0] > 1e6
    assert select(page, "process_open_fds")[0] > 2


def test_what_happened_is_counted_from_zero():
    """Common Xids and known components start at 0 on a device that can have them; rare ones appear when they occur."""
    bad = gpu(1)
    page = render(example())
    assert select(page, "canaryd_xid_errors_total", device=bad.uuid, xid="79") == [2.0]
    assert select(page, "canaryd_xid_errors_total", device=bad.uuid, xid="160") == [1.0]
    assert select(page, "canaryd_xid_errors_total", device=bad.uuid, xid="31") == [0.0]
    assert select(page, "canaryd_stack_changes_total", device=bad.uuid, component="serial") == [0.0]
    cpu = Device(uuid="CPU-1", backend="cpu", index=0, model="EPYC")
    assert not select(render(snapshot(view(cpu))), "canaryd_xid_errors_total")


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


def test_telemetry_probes_have_no_mismatches():
    """A poll compares nothing: it shows outcomes, duration and age, but neither trials nor mismatches."""
    page = render(example())
    mine = {name for name, labels in samples(page) if ("probe", "nvidia_telemetry") in labels}
    assert mine == {
        "canaryd_probe_runs_total",
        "canaryd_probe_duration_seconds",
        "canaryd_probe_last_success_timestamp_seconds",
        "canaryd_readings_absent",
    }


def test_state_and_cause_are_state_sets():
    """Exactly one state and one cause are 1; all the others are there and 0."""
    page = render(example())
    for name, label, kind, bad in (
        ("canaryd_device_state", "state", State, "faulty"),
        ("canaryd_device_cause", "cause", Cause, "hardware"),
    ):
        for member in kind:
            wanted = float(member.value == bad)
            assert select(page, name, device="GPU-0001", **{label: member.value}) == [wanted]


def test_no_verdict_is_unknown():
    """A device that was never judged is unknown, cause undetermined, and has no time of judgement."""
    page = render(snapshot(view(gpu())))
    assert select(page, "canaryd_device_state", state="unknown") == [1.0]
    assert select(page, "canaryd_device_state", state="healthy") == [0.0]
    assert select(page, "canaryd_device_cause", cause="undetermined") == [1.0]
    assert not select(page, "canaryd_device_verdict_timestamp_seconds")


def test_counters_start_at_zero():
    """A planned probe shows all its counters as 0 before its first run, so that increase() sees a first mismatch."""
    page = render(snapshot(view(gpu(), probes=["exact_matmul"])))
    assert select(page, "canaryd_probe_runs_total", probe="exact_matmul") == [0.0] * len(Outcome)
    for name in ("probe_mismatches", "probe_trials", "drill_runs", "drill_mismatches"):
        assert select(page, f"canaryd_{name}_total", probe="exact_matmul") == [0.0]
    assert not select(page, "canaryd_probe_duration_seconds")


def test_vanished_device():
    """A vanished device keeps its presence, 0, its identity and the verdict, so that no alarm ends with the part."""
    page = render(example())
    left = {name for name, labels in samples(page) if ("device", "GPU-0003") in labels}
    verdict = {"canaryd_device_state", "canaryd_device_cause", "canaryd_device_verdict_timestamp_seconds"}
    assert left == {"canaryd_device_present", "canaryd_device_info", *verdict}
    assert select(page, "canaryd_device_present", device="GPU-0003") == [0.0]


def test_forgotten_device():
    """Counters of a device that is no longer known are left out."""
    assert b"GPU-forgotten" not in render(example())


def test_expected_devices_only_if_configured():
    """Without an expectation there is no series, rather than a 0."""
    assert select(render(snapshot(expected_devices=0)), "canaryd_devices_expected") == [0.0]
    assert not select(render(snapshot()), "canaryd_devices_expected")


def test_drills_are_shown_apart():
    """A drill that finds a fault leaves state and counters of the device as they were."""
    page = render(example())
    assert select(page, "canaryd_drill_device_state", device="GPU-0000", state="faulty") == [1.0]
    assert select(page, "canaryd_device_state", device="GPU-0000", state="healthy") == [1.0]
    assert select(page, "canaryd_drill_mismatches_total", device="GPU-0000", probe="exact_matmul") == [3.0]
    assert select(page, "canaryd_probe_mismatches_total", device="GPU-0000", probe="exact_matmul") == [0.0]
    assert not select(page, "canaryd_drill_device_state", device="GPU-0001")


def test_a_drill_cannot_pass_for_evidence():
    """Handing over a drill's run or verdict as real is refused."""
    device = gpu()
    with pytest.raises(ValueError, match="view of GPU-0000: a drill among the real evidence"):
        view(device, last_runs={"exact_matmul": run(device, "exact_matmul", drill="zeros")})
    with pytest.raises(ValueError, match="drill among"):
        view(device, verdict=verdict(device, drill=True))


@pytest.mark.parametrize("value", [0, 1, 123_456, 1_234_567, 10**15, 10**15 + 1, 2**52 + 1, 2**53 - 2, 2**53 - 1])
def test_fingerprints_are_exact(value):
    """An integer below 2^53 arrives digit for digit, exponents or not."""
    page = render(snapshot(view(gpu(), fingerprints={("exact_matmul", "abc"): value})))
    text = re.search(rb"^canaryd_golden_fingerprint\{.*\} (\S+)$", page, re.MULTILINE)[1]
    assert int(float(text)) == value


@pytest.mark.parametrize("value", [-1, 2**53])
def test_fingerprints_that_cannot_be_exact_are_refused(value):
    """A number that a float may round cannot be compared across nodes."""
    with pytest.raises(ValueError, match=r"fingerprint \('p', 'abc'\) is -?\d+; wanted an integer in \[0, 2\^53\)"):
        view(gpu(), fingerprints={("p", "abc"): value})


@pytest.mark.parametrize(
    "model",
    ['A "quoted" name', "back\\slash", "trailing\\", "two\nlines", "\\n", "a}b,c=d", "Ünïcode™", "tab\tcr\r", ""],
)
def test_label_values_survive(model):
    """Any text of a vendor can be read back from a label."""
    page = render(snapshot(view(gpu(model=model))))
    assert dict(next(labels for name, labels in samples(page) if name == "canaryd_device_info"))["model"] == model
    assert promtool(page) == ""


def test_lone_surrogates():
    """A label that UTF-8 cannot carry gets a question mark instead of breaking the page."""
    assert b'model="a?b"' in render(snapshot(view(gpu(model="a\ud800b"))))


def test_a_full_node_renders_fast():
    """16 devices with 10 probes each: every series is there; rendering is far from seconds."""
    probes = [f"probe_{i}" for i in range(10)]
    views, counters = [], {}
    for device in map(gpu, range(16)):
        runs = {p: run(device, p) for p in probes}
        marks = {(p, runs[p].stack_id): 10**15 + i for i, p in enumerate(probes)}
        rates = dict.fromkeys(probes, 1e-6)
        times = dict.fromkeys(probes, NOW)
        views.append(view(device, last_runs=runs, last_success=times, fault_rate=rates, fingerprints=marks))
        for p in probes:
            counters |= counter("probe_runs", 3, device=device.uuid, probe=p, outcome="completed")
    full = snapshot(*views, counters=counters)
    started = time.perf_counter()
    page = render(full)
    seconds = time.perf_counter() - started
    assert len(select(page, "canaryd_probe_runs_total")) == 16 * 10 * len(Outcome)
    happened = len(metrics.XIDS) + 2
    assert len(samples(page)) == 16 * (2 + len(State) + len(Cause) + 1 + happened + 10 * (len(Outcome) + 4 + 4)) + 9
    assert seconds < 1.0


# --- server -------------------------------------------------------------------------------------------------------

BODY = b"canaryd_build_info 1\n" * 100
BIG = b"x" * 32_000_000


def broken(accept):
    raise RuntimeError("secret of the house")


ROUTES = {
    "/metrics": lambda accept: (200, CONTENT_TYPE, BODY),
    "/accept": lambda accept: (503, "text/plain", accept.encode()),
    "/big": lambda accept: (200, "text/plain", BIG),
    "/broken": broken,
}


@contextlib.contextmanager
def serving(host="127.0.0.1", **limits):
    server = Server(host, 0, ROUTES, Limits(**limits))
    server.start()
    try:
        yield server
    finally:
        server.close()


@pytest.fixture(scope="module")
def server():
    with serving() as running:
        yield running


def connect(server):
    return socket.create_connection(("127.0.0.1", server.port), timeout=5)


def get(server, path="/metrics", method="GET", host="127.0.0.1", **headers):
    """Return (response, body, seconds) of one request on a connection of its own."""
    started = time.perf_counter()
    connection = http.client.HTTPConnection(host, server.port, timeout=5)
    with contextlib.closing(connection):
        connection.request(method, path, headers=headers)
        response = connection.getresponse()
        return response, response.read(), time.perf_counter() - started


def say(server, data):
    """Send bytes, and return all that comes back until the server closes."""
    with connect(server) as client:
        client.sendall(data)
        return b"".join(iter(lambda: client.recv(65536), b""))


def closed(client):
    """Tell whether the server hung up, waiting for at most the client's timeout."""
    try:
        return client.recv(1) == b""
    except ConnectionResetError:
        return True


def test_get(server):
    """A scrape gets the prepared bytes, their type and length, and no word about the software behind."""
    response, body, _ = get(server, "/metrics?name=x")
    assert (response.status, body) == (200, BODY)
    assert response.headers["Content-Type"] == CONTENT_TYPE
    assert response.headers["Content-Length"] == str(len(BODY))
    assert response.headers["Server"] is None


def test_head(server):
    """HEAD answers with the headers of GET and no body, and the connection stays usable."""
    answer = say(server, b"HEAD /metrics HTTP/1.1\r\n\r\nGET /metrics HTTP/1.0\r\n\r\n")
    first, _, rest = answer.partition(b"\r\n\r\n")
    assert f"Content-Length: {len(BODY)}".encode() in first
    assert rest.startswith(b"HTTP/1.1 200 OK")
    assert rest.endswith(BODY)


def test_route_sees_accept_and_chooses_the_status(server):
    """A route is handed the Accept header, whatever its spelling, and its status is sent on."""
    response, body, _ = get(server, "/accept", ACCEPT="text/plain;version=0.0.4;q=0.5,*/*")
    assert (response.status, body) == (503, b"text/plain;version=0.0.4;q=0.5,*/*")


def test_unknown_path(server):
    """An unknown path answers 404 and says what there is."""
    response, body, _ = get(server, "/nothing")
    assert response.status == 404
    assert body == b"not found: there is /accept, /big, /broken, /metrics\n"


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "BREW"])
def test_other_methods(server, method):
    """Everything but GET and HEAD is refused, with what is allowed."""
    response, body, _ = get(server, method=method)
    assert (response.status, response.headers["Allow"]) == (405, "GET, HEAD")
    assert body == b"method not allowed: use GET or HEAD\n"


def test_a_body_ends_the_connection(server):
    """An unread body is never taken for the next request, and the answer arrives all the same."""
    smuggled = b"GET /big HTTP/1.1\r\n\r\n"
    head = b"POST /metrics HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % (len(smuggled) + 8_000_000)
    answer = say(server, head + smuggled + b"x" * 8_000_000)
    assert answer.startswith(b"HTTP/1.1 405 ")
    assert answer.count(b"HTTP/1.1") == 1
    assert b"Connection: close" in answer


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (b"GET /metrics\r\n\r\n", "malformed request line"),
        (b"GET /metrics HTTP/2.0\r\n\r\n", "malformed request line"),
        (b"GET  /metrics HTTP/1.1\r\n\r\n", "malformed request line"),
        (b"GET /met\xffrics HTTP/1.1\r\n\r\n", "malformed request line"),
        (b"\x16\x03\x01\x02\x00\x01\r\n\r\n", "malformed request line"),
        (b"GET /metrics HTTP/1.1\r\nno colon\r\n\r\n", "malformed header"),
        (b"GET /metrics HTTP/1.1\r\nName : value\r\n\r\n", "malformed header"),
        (b"GET /" + b"a" * 8192 + b" HTTP/1.1\r\n\r\n", "request line longer than 8192 bytes"),
        (b"a" * 100_000, "request line longer than 8192 bytes"),
        (b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 10_000, "headers longer than 32768 bytes"),
    ],
)
def test_bad_requests(server, request_, reason):
    """Nonsense is answered with 400 and the reason, in plain text, and the connection is closed."""
    head, _, body = say(server, request_).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert b"Content-Type: text/plain" in head
    assert body.startswith(f"bad request: {reason}".encode())


def test_request_line_of_8_kib(server):
    """A request line of exactly 8 KiB is read."""
    line = b"GET /" + b"a" * (8192 - len("GET / HTTP/1.0")) + b" HTTP/1.0"
    assert len(line) == 8192
    assert say(server, line + b"\r\n\r\n").startswith(b"HTTP/1.1 404 ")


def test_a_failing_route_tells_the_log_and_not_the_client(server, caplog):
    """A route that raises costs one answer, which does not say why; the log does."""
    with caplog.at_level(logging.ERROR):
        response, body, _ = get(server, "/broken")
    assert (response.status, body) == (500, b"internal error: see the log of canaryd\n")
    assert "secret of the house" in caplog.text
    assert get(server)[0].status == 200


def test_keep_alive(server):
    """HTTP/1.1 keeps the connection for further requests; HTTP/1.0 and "Connection: close" end it."""
    with connect(server) as client:
        for _ in range(3):
            client.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
            answer = b""
            while not answer.endswith(BODY):
                answer += client.recv(65536)
            assert b"Connection: keep-alive" in answer
        client.sendall(b"GET /accept HTTP/1.1\r\nConnection: close\r\n\r\n")
        assert b"Connection: close" in client.recv(65536)
        assert closed(client)
    assert b"Connection: close" in say(server, b"GET /metrics HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")


def test_two_hundred_scrapes(server):
    """200 scrapes in a row, each on a fresh connection, get the same bytes without delay."""
    seconds = []
    for _ in range(200):
        _, body, took = get(server)
        assert body == BODY
        seconds.append(took)
    assert sorted(seconds)[100] < 0.02


def test_silent_connections_do_not_keep_a_scraper_out():
    """With a hundred connections that say nothing, a scrape is answered at once; the oldest lost their places."""
    with serving() as server, contextlib.ExitStack() as stack:
        idle = [stack.enter_context(connect(server)) for _ in range(100)]
        for _ in range(5):
            response, body, seconds = get(server)
            assert (response.status, body) == (200, BODY)
            assert seconds < 1.0
        assert closed(idle[0])
        idle[-1].sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        assert idle[-1].recv(15) == b"HTTP/1.1 200 OK"
        assert server.refused == 0


def test_kept_connections_do_not_keep_a_scraper_out():
    """Connections kept alive between requests give way, the longest idle first."""
    with serving(connections=2) as server, connect(server) as older, connect(server) as newer:
        for client in (older, newer):
            client.sendall(b"HEAD /metrics HTTP/1.1\r\n\r\n")
            assert client.recv(65536).startswith(b"HTTP/1.1 200 OK")
        assert get(server)[0].status == 200
        assert closed(older)
        newer.sendall(b"HEAD /metrics HTTP/1.1\r\n\r\n")
        assert newer.recv(65536).startswith(b"HTTP/1.1 200 OK")


def test_slow_loris():
    """A client that dribbles its headers is cut off at the deadline, however regularly it sends; others do not wait."""
    with serving(head=0.5) as server, connect(server) as client:
        client.settimeout(0.05)
        started = time.perf_counter()
        cut = False
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            client.sendall(b"GET /metrics HTTP/1.1\r\n")
            while not cut and time.perf_counter() - started < 5:
                client.sendall(b"a")
                assert get(server)[2] < 1.0
                with contextlib.suppress(TimeoutError):
                    cut = client.recv(1) == b""
        assert 0.4 < time.perf_counter() - started < 2


def test_idle_connections_end():
    """A connection that stays silent is closed: after the head's deadline at first, after the idle time later on."""
    with serving(head=0.2, idle=0.6) as server, connect(server) as silent, connect(server) as kept:
        kept.sendall(b"HEAD /metrics HTTP/1.1\r\n\r\n")
        assert kept.recv(65536)
        started = time.perf_counter()
        assert closed(silent)
        assert time.perf_counter() - started < 0.5
        assert closed(kept)
        assert 0.5 < time.perf_counter() - started < 2


def test_a_client_that_does_not_read_is_cut_off():
    """An answer that is not taken in time ends its connection; others are served meanwhile."""
    with serving(write=0.5, patience=0.2) as server, connect(server) as stuck:
        stuck.sendall(b"GET /big HTTP/1.1\r\n\r\n")
        assert get(server)[2] < 0.4
        time.sleep(0.8)
        received = 0
        with contextlib.suppress(ConnectionResetError):
            while chunk := stuck.recv(1 << 20):
                received += len(chunk)
        assert 0 < received < len(BIG)


def test_full_house():
    """While every place is being answered a newcomer is closed at once and counted; a slow reader loses its place."""
    with serving(connections=2, patience=1.0) as server, connect(server) as one, connect(server) as two:
        for client in (one, two):
            client.sendall(b"GET /big HTTP/1.1\r\n\r\n")
            assert client.recv(8) == b"HTTP/1.1"
        with connect(server) as newcomer:
            assert closed(newcomer)
        assert server.refused == 1
        time.sleep(1.1)
        assert get(server)[0].status == 200
        assert server.refused == 1


def test_out_of_file_descriptors():
    """When no connection can be accepted the server waits calmly, and serves it once there is room again."""
    with serving() as server, socket.socket() as client:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(int(fd.name) for fd in Path("/proc/self/fd").iterdir()), hard))
        try:
            fillers = []
            with contextlib.suppress(OSError):
                while True:
                    fillers.append(os.dup(0))
            before = time.process_time()
            client.settimeout(5)
            client.connect(("127.0.0.1", server.port))
            client.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            time.sleep(0.5)
            assert time.process_time() - before < 0.25
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for filler in fillers:
                os.close(filler)
        assert client.recv(15) == b"HTTP/1.1 200 OK"


def test_ipv6():
    """The server listens on IPv6 addresses too."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"this machine has no IPv6 loopback: {error}")
    with serving(host="::1") as server:
        assert get(server, host="::1")[1] == BODY


def test_port_taken(server):
    """A port that is taken is an OSError that names the address and says what to do."""
    with pytest.raises(
        OSError, match=rf"cannot listen on 127\.0\.0\.1:{server.port}: .* in use; .*choose another port"
    ):
        Server("127.0.0.1", server.port, ROUTES)


@pytest.mark.parametrize("host", ["192.0.2.1", "2001:db8::1", "no-such-host.invalid"])
def test_foreign_address(host):
    """An address that this machine does not have, or a name that is none, is named in the error."""
    with pytest.raises(OSError, match=re.escape(host)):
        Server(host, 0, ROUTES)


def test_close():
    """After close nobody is connected and the port is free; a server that was never started closes too."""
    with serving() as server, connect(server) as client:
        port = server.port
        server.close()
        assert closed(client)
    again = Server("127.0.0.1", port, ROUTES)
    again.close()


def table():
    """Return the rows of docs/metrics.md for our own metrics."""
    for name, (kind, labels, text) in FAMILIES.items():
        base = name.removesuffix("_total").rpartition("_")[2]
        shown = " ".join(f"`{label}`" for label in labels) or "\N{EN DASH}"
        yield f"| `{name}` | {kind} | {shown} | {base if base in UNITS else 1} | {text} |"


if __name__ == "__main__":
    GOLDEN.write_bytes(render(example()))
    text = DOCS.read_text()
    begin, end = text.index("| `canaryd_"), text.index("| `process_")
    DOCS.write_text(text[:begin] + "\n".join(table()) + "\n" + text[end:])
