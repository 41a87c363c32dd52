"""The fleet vote: its rules in promtool, and in a real Prometheus that scrapes synthetic nodes; queries of its page."""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections import defaultdict

import pytest

from canaryd.metrics.families import FAMILIES
from canaryd.model import State
from tests.command import ROOT, eventually
from tests.http_server import Handler, listening
from tests.programs import accepted, needed
from tests.prometheus import prometheus

RULES = ROOT / "deploy/prometheus/canaryd-fleet.rules.yml"
PAGE = ROOT / "docs/alerting.md"
BIG = 2**53 - 1


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
def exporting(nodes):
    """Serve each node's page under /NAME, and nothing under another name; yield HOST:PORT."""

    class Nodes(Handler):
        def respond(self):
            node = nodes.get(self.path[1:])
            page = node.page() if node else b""
            self.reply(200 if node else 503, page, {"Content-Type": "text/plain; version=0.0.4"})

    with listening(Nodes) as address:
        yield address


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
    for name, age in (("a", 600), ("b", 3600), ("c", -3600)):
        of = {"device": f"one-{name}", "index": "0", "model": "one odd"}
        nodes[name].add("canaryd_device_verdict_timestamp_seconds", time.time() - age, **of)
    return nodes | {"bare": Node("bare")}


@pytest.fixture(scope="module")
def trouble(tmp_path_factory):
    """Yield a Prometheus that has scraped these nodes, and one that is silent, and evaluated the shipped rules."""
    directory, nodes = tmp_path_factory.mktemp("trouble"), troubled()
    for path in RULES.parent.glob("*.rules.yml"):
        text = re.sub(r"(?m)^( *interval:) .*$", r"\1 1s", path.read_text())
        # Long enough for every node to be scraped: a majority of the first ones must not stand.
        (directory / path.name).write_text(re.sub(r"for: \d+m", "for: 8s", text))
    with exporting(nodes) as exporter:
        targets = [
            {"targets": [exporter], "labels": {"instance": name, "__metrics_path__": f"/{name}"}}
            for name in [*nodes, "silent"]
        ]
        config = {
            "global": {"scrape_interval": "1s", "scrape_timeout": "1s"},
            "rule_files": [f"{directory}/*.rules.yml"],
            "scrape_configs": [{"job_name": "canaryd", "static_configs": targets}],
        }
        with prometheus(directory / "prometheus", config) as running:
            yield running


def test_the_alerts_fire_for_these_and_for_no_others(trouble):
    """One device, one whole node, and three models whose results differ without an accused device."""

    def firing():
        alerts = [s["metric"] for s in trouble.query('ALERTS{alertname=~"CanarydFleet.*",alertstate="firing"}')]
        return {(a["alertname"], a.get("instance", ""), a.get("device", ""), a["model"]) for a in alerts}

    assert eventually(lambda: firing() if len(firing()) == 7 else None) == {
        ("CanarydFleetMinority", "b", "one-b", "one odd"),
        ("CanarydFleetMinority", "c", "", "whole node"),
        # Alertmanager mutes these two beside the alert of their node.
        ("CanarydFleetMinority", "c", "node-c-0", "whole node"),
        ("CanarydFleetMinority", "c", "node-c-1", "whole node"),
        ("CanarydFleetSplit", "", "", "shared"),
        ("CanarydFleetNoMajority", "", "", "fleet of two"),
        ("CanarydFleetNoMajority", "", "", "no majority"),
    }


def questions():
    """Return the queries of docs/alerting.md by the question above each."""
    (block,) = re.findall(r"```promql\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return {query.partition("\n")[0].lstrip("# "): query for query in block.strip().split("\n\n")}


SIDES = {("fleet of two", "97"), ("fleet of two", "98"), ("no majority", "7"), ("no majority", "8")} | {
    ("shared", "3"),
    ("shared", "4"),
}
ANSWERS = {
    "Which devices differ": (
        ("instance", "device", "fingerprint"),
        {("b", "one-b", str(BIG - 1)), ("d", "known-d", "11")} | {("c", "node-c-0", "2"), ("c", "node-c-1", "9")},
    ),
    "Which nodes differ": (("instance", "model"), {("c", "whole node")}),
    "Which votes are disputed": (("model", "fingerprint"), SIDES),
    "Which nodes gave": (
        ("model", "fingerprint", "instance"),
        {("fleet of two", "97", "a"), ("fleet of two", "98", "b")}
        | {("no majority", "7" if name in "ab" else "8", name) for name in "abcd"}
        | {("shared", "3" if name in "ab" else "4", name) for name in "abcdef"},
    ),
    "What is not compared": (("model",), {("fleet of two",), ("stale",)}),
    "Which devices have no vote": (
        ("why", "instance", "device"),
        {("accused", "d", "known-d"), ("duplicate", "a", "twice"), ("duplicate", "b", "twice")},
    ),
    "Which devices are not healthy": (("instance", "device", "state"), {("d", "known-d", "suspect")}),
    "Which nodes are silent": (("instance",), {("silent",)}),
    "Which nodes answer": (
        ("alertname", "instance"),
        {("CanarydVerdictStale", "b"), ("CanarydVerdictStale", "c"), ("CanarydNoDevice", "bare")},
    ),
    "Which evidence is stale": (("instance", "device", "probe"), {("e", "old", "p")}),
    "Which models": (("model", "probe"), {("two stacks", "p")}),
    "Was nothing compared": ((), set()),
}
"""The beginning of each question → labels that its answer has here, and their values."""


@pytest.mark.parametrize("begin", ANSWERS)
def test_the_page_has_a_query_for_each_question(trouble, begin):
    """As docs/alerting.md has it to be copied, asked of a real Prometheus: it names these, and nobody else."""
    labels, wanted = ANSWERS[begin]
    (query,) = (query for question, query in questions().items() if question.startswith(begin))

    def answer():
        return {tuple(s["metric"].get(label, "") for label in labels) for s in trouble.query(query)}

    eventually(lambda: answer() == wanted)


def test_every_query_of_the_page_is_asked():
    """None stands on the page untried."""
    found = questions()
    assert len(found) == len(ANSWERS)
    assert all(sum(question.startswith(begin) for begin in ANSWERS) == 1 for question in found)


def test_a_prometheus_without_the_rules_says_that_nothing_was_compared(tmp_path):
    """No answer to the other questions then means nothing; the last query of the page tells it."""
    (query,) = (query for question, query in questions().items() if question.startswith("Was nothing compared"))
    nodes = {name: Node(name).device(f"M-{name}", "M", p=BIG) for name in "abcd"}
    with exporting(nodes) as exporter:
        targets = [{"targets": [exporter], "labels": {"instance": n, "__metrics_path__": f"/{n}"}} for n in nodes]
        config = {
            "global": {"scrape_interval": "1s"},
            "scrape_configs": [{"job_name": "canaryd", "static_configs": targets}],
        }
        with prometheus(tmp_path, config) as running:
            eventually(lambda: [s["value"][1] for s in running.query(query)] == ["4"])


# -- in promtool ------------------------------------------------------------------------------------------------------


def test_promtool_plays_the_scenarios():
    """Every one of tests/deploy/fleet ends as it says."""
    scenarios = sorted((ROOT / "tests/deploy/fleet").glob("*.yml"))
    assert len(scenarios) == 2
    accepted(needed("promtool", untested="no scenario was played"), "test", "rules", *scenarios)
