"""`canaryd fleet` and its rules: a real Prometheus that scrapes synthetic nodes, and hostile servers."""

from __future__ import annotations

import base64
import contextlib
import http.server
import json
import re
import shutil
import socketserver
import subprocess
import threading
import time
import urllib.request
from collections import defaultdict
from typing import ClassVar

import jsonschema
import pytest

from canaryd.fleet import vote, vote_text
from canaryd.fleet.prometheus import FleetError, Prometheus
from canaryd.judge import verdict
from canaryd.metrics.families import FAMILIES
from canaryd.model import State
from tests import documented
from tests.command import ROOT, canaryd, eventually, free_port, in_turn

RULES = ROOT / "deploy/prometheus" / vote.RULES
VALIDATOR = jsonschema.Draft202012Validator(json.loads((ROOT / "docs/fleet.schema.json").read_text()))
BIG = 2**53 - 1
PATIENCE = 20.0


def needs(program):
    """Return the path of a program; skip aloud without it."""
    return shutil.which(program) or pytest.skip(f"{program} is not installed here")


# -- synthetic nodes --------------------------------------------------------------------------------------------------


class Node:
    """One node's exposition; every series has exactly the labels that canaryd gives it."""

    def __init__(self, name):
        self.name = name
        self.series = defaultdict(list)
        self.add("canaryd_build_info", 1, version="0.1.0")

    def add(self, metric, value, **labels):
        assert set(labels) == set(FAMILIES[metric].labels), metric
        inside = ",".join(f"{key}={json.dumps(text)}" for key, text in labels.items())
        self.series[metric].append(f"{metric}{{{inside}}} {float(value)!r}\n")

    def device(self, uuid, model, *, state="healthy", age=60.0, cause="hardware", rule="", stack="s", **marks):
        """Add a device; `marks` are its fingerprints by probe, `rule` a finding of its state."""
        of = {"device": uuid, "index": "0", "model": model}
        self.add("canaryd_device_present", 1, **of)
        for each in State:
            self.add("canaryd_device_state", each.value == state, **of, state=each.value)
        if rule:
            self.add("canaryd_finding", 1, **of, rule=rule, state=state, cause=cause)
        parts = dict.fromkeys(FAMILIES["canaryd_stack_info"].labels, "") | of | {"stack": stack, "driver": f"d-{stack}"}
        self.add("canaryd_stack_info", 1, **parts)
        for probe, mark in marks.items():
            self.add("canaryd_golden_fingerprint", mark, **of, probe=probe, stack=stack)
            self.add("canaryd_probe_period_seconds", 60, **of, probe=probe)
            self.add("canaryd_probe_last_success_timestamp_seconds", time.time() - age, **of, probe=probe)
        return self

    def page(self):
        return "".join(
            f"# TYPE {metric} {FAMILIES[metric].type}\n{''.join(lines)}" for metric, lines in self.series.items()
        ).encode()


@contextlib.contextmanager
def serving(handler):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextlib.contextmanager
def exporting(nodes):
    """Serve each node's page under /NAME; a node can be taken out of `nodes` meanwhile."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            node = nodes.get(self.path[1:])
            self.send_response(200 if node else 503)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(node.page() if node else b"")

        def log_message(self, *_):
            pass

    with serving(Handler) as url:
        yield url.removeprefix("http://")


@contextlib.contextmanager
def prometheus(directory, nodes, *, rules=True, extra=(), **job):
    """Run a real Prometheus on these nodes, with the shipped rules at test speed; yield its address."""
    program = needs("prometheus")
    directory.mkdir(exist_ok=True, parents=True)
    text = RULES.read_text().replace("interval: 1m", "interval: 1s")
    # Long enough for every node to be scraped: a majority of the first ones must not stand.
    (directory / "rules.yml").write_text(re.sub(r"for: \d+m", "for: 8s", text))
    with exporting(nodes) as exporter, contextlib.ExitStack() as stack:
        targets = [
            {"targets": [exporter], "labels": {"instance": name, "__metrics_path__": f"/{name}"}}
            for name in [*nodes, *extra]
        ]
        config = {
            "global": {"scrape_interval": "1s", "scrape_timeout": "1s"},
            "rule_files": ["rules.yml"] if rules else [],
            "scrape_configs": [{"job_name": "canaryd", "static_configs": targets, **job}],
        }
        (directory / "prometheus.yml").write_text(json.dumps(config))
        port = free_port()
        process = subprocess.Popen(
            [
                program,
                f"--config.file={directory}/prometheus.yml",
                f"--storage.tsdb.path={directory}/data",
                f"--web.listen-address=127.0.0.1:{port}",
                "--log.level=error",
            ],
        )
        stack.callback(process.wait, 30)
        stack.callback(process.terminate)
        url = f"http://127.0.0.1:{port}"
        eventually(lambda: ready(f"{url}/-/ready"))
        yield url


def ready(url):
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


def gather(url, **options):
    found = vote.gather(Prometheus(url, patience=PATIENCE, **options))
    said = json.loads(json.dumps(vote_text.as_json(found)))
    VALIDATOR.validate(said)
    assert said["exit_code"] == verdict.exit_code(found.state)
    return found


def settled(url, holds):
    """Return the fleet once `holds(fleet)` is true: scrapes and rules take a few seconds."""

    def look():
        try:
            found = gather(url)
        except FleetError:
            return None
        return found if holds(found) else None

    return eventually(look, every=0.25)


def healthy(names="abcd", *, model="M", start=0):
    return {n: Node(n).device(f"{model}-{n}-{i}", model, p=BIG) for n in names for i in [start]}


# -- against a real Prometheus ----------------------------------------------------------------------------------------


def troubled():
    """Return nodes with one of everything that the vote tells apart; each in a model of its own."""
    nodes = {name: Node(name) for name in "abcdef"}
    for name, node in nodes.items():
        odd = BIG - 1 if name == "b" else BIG
        node.device(f"one-{name}", "one odd", p=odd, q=odd)
        if name in "ab":
            node.device(f"two-{name}", "fleet of two", p=ord(name))
        if name in "abcd":
            node.device(f"even-{name}", "no majority", p=7 if name in "ab" else 8)
        node.device(f"stacks-{name}", "two stacks", stack="s" if name in "abc" else "t", p=5 if name in "abc" else 6)
        node.device(f"shared-{name}", "shared", p=3 if name in "ab" else 4)
        node.device(f"node-{name}-0", "whole node", p=2 if name == "c" else 1)
        node.device(f"node-{name}-1", "whole node", p=9 if name == "c" else 1)
        accused = {"state": "suspect", "rule": "exact-mismatch"} if name == "d" else {}
        node.device(f"known-{name}", "known", p=11 if name == "d" else 10, **accused)
    for name in "ab":
        nodes[name].device("twice", "seen twice", p=1)
    nodes["e"].device("old", "stale", age=6000.0, p=1)
    return nodes


@pytest.fixture(scope="module")
def trouble(tmp_path_factory):
    with prometheus(tmp_path_factory.mktemp("trouble"), troubled(), extra=["silent"]) as url:
        whole = settled(url, lambda f: len(f.odd) == 6 and f.silent and f.doubted and f.stacks_differ and f.stalest)
        yield url, whole


def test_the_device_that_differs_is_named(trouble):
    """With its node, its probes and all digits of its fingerprint; whole nodes are told apart from single devices."""
    _, found = trouble
    assert {(o.instance, o.device, o.scope) for o in found.accused} == {
        ("b", "one-b", "device"),
        ("c", "node-c-0", "node"),
        ("c", "node-c-1", "node"),
    }
    (one,) = [o for o in found.accused if o.device == "one-b"]
    assert [(x["probe"], x["fingerprint"]) for x in one.results] == [("p", str(BIG - 1)), ("q", str(BIG - 1))]
    assert found.state is State.SUSPECT


def test_nobody_is_accused_without_a_majority(trouble):
    """Neither of two, neither half of four, nor two nodes that share a result; stacks may differ."""
    _, found = trouble
    assert {(d.model, d.majority) for d in found.disputed} == {
        ("fleet of two", False),
        ("no majority", False),
        ("shared", True),
    }
    (two,) = [d for d in found.disputed if d.model == "fleet of two"]
    assert [(s.fingerprint, s.votes, s.nodes, s.some_nodes) for s in two.sides] == [
        ("97", 1, 1, ("a",)),
        ("98", 1, 1, ("b",)),
    ]
    assert [x["model"] for x in found.stacks_differ] == ["two stacks"]
    quiet = {"fleet of two", "no majority", "two stacks", "seen twice", "stale"}
    assert not {o.model for o in found.odd} & quiet
    assert found.duplicates == 1


def test_a_suspect_is_shown_and_not_accused_again(trouble):
    """The vote against it is evidence; its own alarm has been raised."""
    _, found = trouble
    assert [(d.instance, d.device, d.state, d.findings) for d in found.doubted] == [
        ("d", "known-d", "suspect", ({"rule": "exact-mismatch", "state": "suspect", "cause": "hardware"},))
    ]
    assert [o.known for o in found.odd if o.device == "known-d"] == [True]
    assert "also outvoted" in vote_text.as_text(found, 500)


def test_silence_and_age_are_shown(trouble):
    """A target that does not answer, and the node whose evidence is oldest in periods of its probe."""
    _, found = trouble
    assert [(s.instance, s.job, s.why) for s in found.silent] == [("silent", "canaryd", "down")]
    assert (found.stalest[0].instance, found.stalest[0].device) == ("e", "old")
    assert found.stalest[0].periods == pytest.approx(100, abs=5)
    assert all(s.periods < vote.STALE for s in found.stalest[1:])


def test_the_census_counts_devices_by_model_and_stack(trouble):
    """Every device once on each of its stacks."""
    _, found = trouble
    counted = {(s.labels["model"], s.labels["stack"], s.labels["driver"]): s.devices for s in found.stacks}
    assert counted["two stacks", "s", "d-s"] == counted["two stacks", "t", "d-t"] == 3
    assert counted["whole node", "s", "d-s"] == 12
    assert found.nodes == 6
    assert found.versions == {"0.1.0": 6}


def test_the_alerts_fire_for_these_and_for_no_others(trouble):
    """The alerts of the shipped rules, at test speed, agree with what the command prints."""
    url, found = trouble

    def firing():
        asker = Prometheus(url)
        alerts = asker.ask('ALERTS{alertstate="firing"}')
        names = {(s.labels["alertname"], s.labels.get("instance", ""), s.labels["model"]) for s in alerts}
        return names if len(names) == 5 else None

    assert eventually(firing) == {
        ("CanarydFleetMinority", "b", "one odd"),
        ("CanarydFleetMinority", "c", "whole node"),
        ("CanarydFleetSplit", "", "shared"),
        ("CanarydFleetNoMajority", "", "fleet of two"),
        ("CanarydFleetNoMajority", "", "no majority"),
    }
    assert found.groups >= found.decided > 0


def test_the_command_prints_it_and_exits_with_2(trouble):
    """Text for people, one JSON object for machines."""
    url, _ = trouble
    said = canaryd("fleet", "--prometheus", url)
    assert said.code == 2, said
    assert " ".join(said.out.split()).startswith(
        "SUSPECT NO, do not trust all of this fleet: 1 suspect device, 3 devices outvoted by identical ones."
    )
    assert max(map(len, said.out.splitlines())) < 80
    document = json.loads(canaryd("fleet", "--prometheus", f"{url}/", "--json").out)
    VALIDATOR.validate(document)
    assert document["exit_code"] == 2
    assert len(document["disputed"]) == 3


def test_a_healthy_fleet_exits_with_0_and_silence_with_3(tmp_path):
    """And what was learnt of a node before it fell silent does not make it healthy."""
    nodes = healthy()
    with prometheus(tmp_path / "p", nodes) as url:
        whole = settled(url, lambda f: f.decided == 1 and f.nodes == 4)
        assert (whole.state, whole.problems) == (State.HEALTHY, ())
        said = canaryd("fleet", "--prometheus", url)
        assert said.code == 0, said
        assert "YES, every device is healthy" in said.out
        nodes["b"].device("M-b-1", "M", state="degraded", rule="throttled", p=BIG)
        assert settled(url, lambda f: f.state is State.DEGRADED)
        del nodes["c"]
        assert settled(url, lambda f: f.silent).state is State.UNKNOWN
        assert canaryd("fleet", "--prometheus", url).code == 3


def test_a_node_that_answers_and_says_nothing_new_is_silent(tmp_path):
    """A page that a proxy kept, or of a daemon that hangs, and one without a device; not one of another program."""
    nodes = healthy()
    for name, age in (("a", 600), ("b", 3600), ("c", -3600)):
        of = {"device": f"M-{name}-0", "index": "0", "model": "M"}
        nodes[name].add("canaryd_device_verdict_timestamp_seconds", time.time() - age, **of)
    nodes |= {"bare": Node("bare"), "other": Node("other")}
    del nodes["other"].series["canaryd_build_info"]
    nodes["other"].add("canaryd_released", 0)
    with prometheus(tmp_path / "p", nodes) as url:
        found = settled(url, lambda f: f.decided == 1 and f.nodes == 5 and len(f.silent) == 3)
        whys = {"b": "stuck", "c": "stuck", "bare": "empty"}
        assert {s.instance: s.why for s in found.silent} == whys
        assert found.state is State.UNKNOWN
        text = vote_text.as_text(found, 200)
        assert "b (canaryd): its verdicts are older than half an hour, or a clock is wrong" in text
        assert "bare (canaryd): answers, and shows no device" in text


def test_a_node_that_is_no_target_any_more_is_gone_and_not_forgotten(tmp_path):
    """It answered an hour ago; that a target was taken out looks the same as a node that died."""
    promtool = needs("promtool")
    past = time.time() - 3600
    samples = [f'canaryd_build_info{{job="canaryd",instance="left"}} 1 {past + 30 * k:.0f}' for k in range(-10, 10)]
    (tmp_path / "past.om").write_text("\n".join(["# TYPE canaryd_build_info gauge", *samples, "# EOF", ""]))
    data = tmp_path / "p/data"
    data.mkdir(parents=True)
    making = [promtool, "tsdb", "create-blocks-from", "openmetrics", tmp_path / "past.om", data]
    subprocess.run(making, check=True, capture_output=True)
    with prometheus(tmp_path / "p", healthy()) as url:
        found = settled(url, lambda f: f.decided == 1 and f.nodes == 4)
        assert [(s.instance, s.why) for s in found.silent] == [("left", "gone")]
        assert found.state is State.UNKNOWN


def test_nodes_behind_one_target_are_not_gone(tmp_path):
    """Where labels are honoured, as by federation, no node has an `up` of its own, and the target has no device."""
    node = Node("gateway").device("M-a", "M", p=1)
    page = node.page().replace(b"{", b'{job="canaryd",instance="far",')
    node.page = lambda: page
    with prometheus(tmp_path / "p", {"gateway": node}, honor_labels=True) as url:
        assert settled(url, lambda f: f.nodes == 1 and f.states).silent == ()


def test_fingerprints_without_votes_are_a_problem(tmp_path):
    """A Prometheus that does not know the rules has not compared anything: unknown, not healthy."""
    with prometheus(tmp_path / "p", healthy(), rules=False) as url:
        found = settled(url, lambda f: f.nodes == 4)
        assert found.state is State.UNKNOWN
        assert re.search(r"votes: none, with .* fingerprints.*canaryd-fleet.rules.yml", found.problems[0])


def test_a_prometheus_without_canaryd_is_no_healthy_fleet(tmp_path):
    """Nothing found is not the same as nothing wrong."""
    with prometheus(tmp_path / "p", {}) as url:
        with pytest.raises(FleetError, match="has no data of canaryd"):
            vote.gather(Prometheus(url))
        said = canaryd("fleet", "--prometheus", url)
        assert (said.code, said.out) == (3, "")
        assert "has no data of canaryd" in said.err


def test_the_rules_pass_promtool():
    """Syntax, and every scenario of tests/deploy/fleet."""
    program = needs("promtool")
    scenarios = sorted((ROOT / "tests/deploy/fleet").glob("*.yml"))
    assert len(scenarios) == 2
    for arguments in (["check", "rules", RULES], ["test", "rules", *scenarios]):
        done = subprocess.run([program, *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def broken(text, *, old, new):
    assert text.count(old) >= 1, old
    return text.replace(old, new)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("(canaryd:fleet_voters >= 3)", "(canaryd:fleet_voters >= 4)"),
        ("(canaryd:fleet_voters >= 3)", "(canaryd:fleet_voters >= 1)"),
        ("group_left () (canaryd:fleet_voters / 2)", "group_left () (canaryd:fleet_voters / 4)"),
        ("group_left () (canaryd:fleet_nodes / 2)", "group_left () (canaryd:fleet_nodes / 4)"),
        (
            "canaryd_golden_fingerprint unless on (instance, device) canaryd:fleet_voiceless",
            "canaryd_golden_fingerprint",
        ),
        ('unless on (instance, device)\n              canaryd:fleet_voiceless{why="accused"}', ""),
        ("unless on (model, probe, stack, fingerprint)\n              canaryd:fleet_split", ""),
        ('alertstate="firing",scope="device"', 'alertstate="none"'),
        ("> ignoring (why)", ">= bool ignoring (why)"),
        (
            "canaryd_golden_fingerprint\n              unless on (model, probe, stack)",
            "(canaryd_golden_fingerprint < 0)\n              unless on (model, probe, stack)",
        ),
        ("and on (instance, device)\n            ALERTS{", "unless on (instance, device)\n            ALERTS{"),
        ('{model=~".* MIG( .*)?"}', '{model=~"none"}'),
        (
            "max by (job, instance, device) (\n            canaryd_device",
            "max by (job, instance, device) (\n            0 * canaryd_device",
        ),
        ("(canaryd:fleet_vote_nodes > 1)", "(canaryd:fleet_vote_nodes > 0)"),
        ("for: 2m", "for: 0s"),
    ],
    ids=str,
)
def test_the_scenarios_notice_a_broken_rule(tmp_path, old, new):
    """Each clause of the vote is held by a scenario: without it, one fails."""
    program = needs("promtool")
    (tmp_path / RULES.name).write_text(broken(RULES.read_text(), old=old, new=new))
    subprocess.run([program, "check", "rules", tmp_path / RULES.name], check=True, capture_output=True)
    for path in (ROOT / "tests/deploy/fleet").glob("*.yml"):
        text = broken(path.read_text(), old="../../../deploy/prometheus/", new="")
        (tmp_path / path.name.replace(".yml", ".test.yml")).write_text(text)
    tests = sorted(tmp_path.glob("*.test.yml"))
    done = subprocess.run([program, "test", "rules", *tests], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "FAILED" in done.stdout + done.stderr


# -- against servers that are no Prometheus ---------------------------------------------------------------------------

VECTOR = {"resultType": "vector", "result": []}
DEEP = b"[" * 200_000


def result(**changes):
    return json.dumps({"status": "success", "data": VECTOR, **changes}).encode()


def entry(metric, value):
    return result(data={"resultType": "vector", "result": [{"metric": metric, "value": value}]})


class Hostile(http.server.BaseHTTPRequestHandler):
    """The first part of the path chooses how it misbehaves."""

    seen: ClassVar[dict[str, str | None]] = {}
    ANSWERS: ClassVar = {
        "html": (200, b"<html>welcome</html>"),
        "page500": (500, b"<html>oops</html>"),
        "gateway": (502, b""),
        "text": (200, b"OK"),
        "nothing": (200, b""),
        "list": (200, b"[]"),
        "deep": (200, DEEP),
        "binary": (200, bytes(range(256))),
        "other": (200, b'{"status": "fine"}'),
        "nodata": (200, b'{"status": "success"}'),
        "matrix": (200, result(data={"resultType": "matrix", "result": []})),
        "scalar": (200, result(data=3)),
        "nolabels": (200, result(data={"resultType": "vector", "result": [{"value": [1, "2"]}]})),
        "novalue": (200, entry({"a": "b"}, [1])),
        "words": (200, entry({"a": "b"}, [1, "many"])),
        "nan": (200, entry({"version": "1"}, [1, "NaN"])),
        "unauthorized": (401, b"<html>who?</html>"),
        "forbidden": (403, b""),
        "missing": (404, b"404 page not found"),
        "bad": (400, json.dumps({"status": "error", "errorType": "bad_data", "error": "parse \x1b[31m"}).encode()),
        "heavy": (422, json.dumps({"status": "error", "errorType": "execution", "error": "too many samples"}).encode()),
        "busy": (503, json.dumps({"status": "error", "errorType": "timeout", "error": "query timed out"}).encode()),
        "empty": (200, result()),
    }

    def do_GET(self):
        what = self.path.split("/")[1]
        self.seen[what] = self.headers.get("Authorization")
        if what == "hang":
            time.sleep(30)
        elif what in ("drip", "dripheader"):
            self.wfile.write(b"HTTP/1.0 200 OK\r\n" + (b"" if what == "dripheader" else b"\r\n"))
            with contextlib.suppress(OSError):
                for _ in range(100):
                    self.wfile.write(b"x")
                    time.sleep(0.1)
        elif what == "redirect":
            self.send_response(302)
            self.send_header("Location", "http://me:p/w@other.example/elsewhere/api/v1/query")
            self.end_headers()
        elif what == "echo":
            key = self.headers["Authorization"].partition(" ")[2]
            words = f"bad {key} {key.upper()} {base64.b64decode(key + '==')}"
            self.reply(400, json.dumps({"status": "error", "errorType": "bad_data", "error": words}).encode())
        elif what == "cut":
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b'{"status"')
        elif what == "huge":
            self.send_response(200)
            self.end_headers()
            with contextlib.suppress(OSError):
                for _ in range(70):
                    self.wfile.write(b" " * 1024**2)
        else:
            self.reply(*self.ANSWERS[what])

    def reply(self, code, body):
        self.send_response(code)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def hostile():
    with serving(Hostile) as url:
        yield url


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("html", "answers with HTML, wanted JSON"),
        ("page500", "answers 500$"),
        ("gateway", "answers 502$"),
        ("text", "answers with no JSON"),
        ("nothing", "answers with no JSON"),
        ("list", "answers with JSON of another kind"),
        ("deep", "answers with no JSON"),
        ("binary", "answers with no JSON"),
        ("other", "answers with JSON of another kind"),
        ("nodata", "answers JSON that is not a query result"),
        ("matrix", "answers with a matrix, wanted a vector"),
        ("scalar", "answers JSON that is not a query result"),
        ("nolabels", "answers JSON that is not a query result"),
        ("novalue", "answers JSON that is not a query result"),
        ("words", "answers JSON that is not a query result"),
        ("nan", "answers JSON that is not a query result"),
        ("unauthorized", "answers 401: wrong or missing credentials.*--token-file"),
        ("forbidden", "answers 403: wrong or missing credentials"),
        ("missing", "answers 404: no query API at this address"),
        ("bad", r"answers 400: bad_data: parse [^\x1b]*$"),
        ("heavy", "answers 422: execution: too many samples"),
        ("busy", "answers 503: timeout: query timed out"),
        ("empty", "has no data of canaryd"),
        ("hang", r"did not answer within 1\.5 s"),
        ("drip", r"did not answer within 1\.5 s"),
        ("dripheader", r"did not answer within 1\.5 s"),
        ("redirect", r"answers 302, a redirect to …@other\.example/elsewhere/"),
        ("cut", "answers with no JSON"),
        ("huge", "answers with more than 64 MiB"),
    ],
)
def test_a_server_that_misbehaves_is_told_of_in_one_sentence(hostile, what, said):
    """Within the time that was given, and nothing of it is taken for a fleet."""
    patience = 1.5 if what in ("hang", "drip", "dripheader") else PATIENCE
    before = time.monotonic()
    with pytest.raises(FleetError, match=said):
        vote.gather(Prometheus(f"{hostile}/{what}", patience=patience))
    assert time.monotonic() - before < patience + 1


def test_a_timeout_of_the_socket_is_a_server_that_did_not_answer(hostile, monkeypatch):
    """The socket may give up a moment before the clock of the whole query: the sentence is the same."""
    asked = Prometheus(f"{hostile}/hang", patience=PATIENCE)
    monkeypatch.setattr(asked, "_left", lambda: PATIENCE if threading.current_thread().name == "MainThread" else 0.1)
    with pytest.raises(FleetError, match=f"did not answer within {PATIENCE:g} s"):
        vote.gather(asked)


def test_an_answer_that_may_be_partial_is_not_healthy():
    """Thanos and its like answer with what they have, and a warning."""

    class Partial(Hostile):
        def do_GET(self):
            known = entry({"version": "1"}, [1.0, "2"]) if "version" in self.path else result()
            self.reply(200, json.dumps(json.loads(known) | {"warnings": ["a store is away"]}).encode())

    with serving(Partial) as url:
        found = gather(url)
    assert found.problems[-1] == "the answer may be partial: a store is away"
    assert (found.nodes, found.state) == (2, State.UNKNOWN)


def test_nobody_listens():
    """Connection refused, and a name that does not exist."""
    with pytest.raises(FleetError, match="cannot be reached: Connection refused"):
        vote.gather(Prometheus(f"http://127.0.0.1:{free_port()}"))
    said = canaryd("fleet", "--prometheus", f"http://127.0.0.1:{free_port()}", "--json")
    assert (said.code, said.out) == (3, "")
    assert "cannot be reached" in said.err


def test_a_server_that_speaks_no_http():
    """Its bytes are not printed."""

    class Noise(socketserver.BaseRequestHandler):
        def handle(self):
            self.request.recv(1000)
            self.request.sendall(b"\x1b[2J\x00 garbage\r\n\r\n")

    with socketserver.TCPServer(("127.0.0.1", 0), Noise) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(FleetError, match="does not answer like a web server") as caught:
            vote.gather(Prometheus(f"http://127.0.0.1:{server.server_address[1]}"))
        server.shutdown()
    assert "\x1b" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "sent"),
    [("s3cret\n", "Bearer s3cret"), ("Basic dXNlcjpwdw==\n", "Basic dXNlcjpwdw=="), ("bearer x", "bearer x")],
)
def test_a_token_comes_from_a_file_and_goes_nowhere_else(hostile, tmp_path, text, sent):
    """To the server that was named, and not after a redirect."""
    path = tmp_path / "token"
    path.write_text(text)
    Hostile.seen.clear()
    for what in ("empty", "redirect"):
        with pytest.raises(FleetError):
            vote.gather(Prometheus(f"{hostile}/{what}", token_file=path))
    assert Hostile.seen == {"empty": sent, "redirect": sent}


def test_a_token_that_the_server_repeats_is_not_printed(hostile, tmp_path):
    """Nor the password in it."""
    path = tmp_path / "token"
    path.write_text(f"Basic {base64.b64encode(b'alice:hunter2-and-more').decode()}")
    with pytest.raises(FleetError) as caught:
        vote.gather(Prometheus(f"{hostile}/echo", token_file=path))
    assert str(caught.value) == "answers 400: bad_data: bad … … b'alice:…'"


REFUSED = [
    ([], "--prometheus"),
    (["--prometheus", "prometheus:9090"], "is not an address of a Prometheus"),
    (["--prometheus", "ftp://p:9090"], "is not an address of a Prometheus"),
    (["--prometheus", "http://user:pw@p:9090"], "use --token-file"),
    (["--prometheus", "http://p:9090/graph?x=1"], "is not an address of a Prometheus"),
    (["--prometheus", "http://p:9090", "--token-file", "/nonexistent"], "--token-file /nonexistent: cannot be read"),
    (["--prometheus", "http://p:9090", "--token-file", "/dev/null"], "wanted one line with a token"),
    (["--prometheus", "https://p:9090", "--ca-file", "/nonexistent"], "--ca-file /nonexistent"),
    (["--prometheus", "https://p:9090", "--ca-file", "/dev/null"], "--ca-file /dev/null"),
    (["--prometheus", "http://p:9090", "--timeout", "soon"], "--timeout"),
]


@pytest.fixture(scope="module")
def refused():
    """Return the answers to `REFUSED`, of one process."""
    return in_turn(*(["fleet", *arguments] for arguments, _ in REFUSED))


@pytest.mark.parametrize("number", range(len(REFUSED)), ids=[str(arguments) for arguments, _ in REFUSED])
def test_wrong_arguments_are_usage_errors(refused, number):
    """Exit 64, before anybody is asked, and no password is repeated."""
    answer = refused[number]
    assert (answer.code, answer.out) == (64, "")
    assert REFUSED[number][1] in answer.err
    assert "pw@" not in answer.err


def test_what_one_question_cannot_learn_costs_no_other_answer(tmp_path):
    """A query that is refused becomes a problem, and the fleet is not known to be healthy."""

    class Refusing(Hostile):
        def do_GET(self):
            if "probe_period" in self.path:
                self.reply(*self.ANSWERS["heavy"])
            elif "build_info" in self.path:
                self.reply(200, entry({"version": "1", "job": "canaryd", "instance": "a"}, [1000.5, "2"]))
            else:
                self.reply(*self.ANSWERS["empty"])

    with serving(Refusing) as url:
        found = gather(url)
    assert "stalest nodes: unknown, Prometheus answers 422: execution: too many samples" in found.problems
    assert (found.nodes, found.now, found.state) == (2, 1000.5, State.UNKNOWN)


def test_text_of_others_does_not_reach_the_terminal_as_commands():
    """A label may hold anything."""
    found = vote.Fleet(url="http://p", now=1.0, nodes=1, versions={"\x1b[2J": 1}, states={"healthy": 1})
    assert "\x1b" not in vote_text.as_text(found, 100)


def test_long_lists_are_cut_in_text_only():
    """A broken fleet must still fit a terminal."""
    silent = tuple(vote.Silent(job="j", instance=f"n{i}", why="down") for i in range(100))
    found = vote.Fleet(url="http://p", now=1.0, nodes=0, versions={}, states={}, silent=silent)
    assert "and 80 more; --json has them all" in vote_text.as_text(found, 100)
    assert len(vote_text.as_json(found)["silent"]) == 100
    assert found.state is State.UNKNOWN


def test_the_schema_allows_nothing_else():
    """A field that is not documented is noticed."""
    document = vote_text.as_json(vote.Fleet(url="http://p", now=1.0, nodes=0, versions={}, states={}))
    VALIDATOR.validate(document)
    assert not VALIDATOR.is_valid(document | {"more": 1})
    assert not VALIDATOR.is_valid({k: v for k, v in document.items() if k != "odd"})
    fields = documented.section("`canaryd fleet --json`")
    assert not {key for key in document if f"`{key}`" not in fields}
