"""What operators copy for Prometheus and Alertmanager: it loads, it says what to do, and it asks for what there is."""

from __future__ import annotations

import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import pytest
import yaml

from canaryd.cli.main import parser
from canaryd.metrics.families import FAMILIES
from canaryd.report import textfile
from canaryd.store.locks import WAIT
from canaryd.store.store import DRILL_EXPIRY
from tests.command import ROOT, canaryd
from tests.programs import accepted, needed

PROMETHEUS = ROOT / "deploy/prometheus"
ALERTMANAGER = ROOT / "deploy/alertmanager/alertmanager.yml"
RULES = sorted(PROMETHEUS.glob("*.rules.yml"))
OURS = PROMETHEUS / "canaryd.rules.yml"
VIEWS = PROMETHEUS / "canaryd-views.rules.yml"
TRENDS = PROMETHEUS / "canaryd-trends.rules.yml"
UNITS = sorted((ROOT / "tests/deploy/rules").glob("*.yml"))
RUNBOOK = "https://github.com/canaryd/canaryd/blob/main/docs/runbook.md#"
TARGET = {"job", "instance"}
"""Labels that come from the scrape."""
SEVERITIES = {"critical", "warning", "ticket", "drill", "none"}


def run(program: str, *arguments: object) -> str:
    """Run promtool or amtool; it must be content. Returns its output."""
    return accepted(needed(program, untested="nothing that is shipped was checked by it"), *arguments)


def rules(path: Path, kind: str) -> list[dict[str, Any]]:
    """Return the rules of a file that are alerts, or that record."""
    return [r for group in yaml.safe_load(path.read_text())["groups"] for r in group["rules"] if kind in r]


ALERTS = {(path.name, alert["alert"]): alert for path in RULES for alert in rules(path, "alert")}
NAMES = sorted({name for _, name in ALERTS})


# --- Checked by their own tools ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", RULES, ids=lambda p: p.name)
def test_promtool_takes_the_rules(path):
    """No expression that does not parse, no rule twice."""
    assert "SUCCESS" in run("promtool", "check", "rules", path)


def test_promtool_takes_the_configuration():
    """With every file of rules that is shipped."""
    run("promtool", "check", "config", PROMETHEUS / "prometheus.yml")
    content = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    assert sorted(content["rule_files"]) == [path.name for path in RULES]


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=pytest.mark.slow if path.stem in ("trends", "hours") else ()) for path in UNITS],
    ids=lambda p: p.name,
)
def test_promtool_sees_the_alerts_fire_and_stay_silent(path):
    """The unit tests of the rules."""
    assert "SUCCESS" in run("promtool", "test", "rules", path)


def test_amtool_takes_the_configuration():
    """Routes, receivers and inhibition load."""
    assert "SUCCESS" in run("amtool", "check-config", ALERTMANAGER)


@pytest.mark.parametrize(
    ("labels", "receiver"),
    [
        *((f"alertname={name} severity=critical", "canaryd-page") for name in ("CanarydHostFaulty", "CanarydAbsent")),
        ("alertname=CanarydDeviceFaultyHardware severity=critical device=GPU-1", "canaryd-page"),
        ("alertname=CanarydDeviceFaultySoftware severity=critical device=GPU-1", "canaryd-page"),
        ("alertname=CanarydDeviceSuspect severity=warning device=GPU-1", "canaryd-warning"),
        ("alertname=CanarydDown severity=warning", "canaryd-warning"),
        ("alertname=CanarydDeviceDegraded severity=ticket", "canaryd-ticket"),
        ("alertname=CanarydDrill severity=drill", "canaryd-drill"),
        ("alertname=CanarydDeviceAcknowledged severity=none", "canaryd-nobody"),
        ("alertname=Somebodys", "canaryd-warning"),
    ],
)
def test_each_severity_has_its_receiver(labels, receiver):
    """As amtool routes them; a drill and an inhibitor never page, and nothing is lost."""
    out = run("amtool", "config", "routes", "test", f"--config.file={ALERTMANAGER}", *labels.split())
    assert out.split() == [receiver]


# --- What an alert says -----------------------------------------------------------------------------------------------


def headings() -> set[str]:
    """Return the anchors of the runbook's headings."""
    found = re.findall(r"^#+ (.+)$", (ROOT / "docs/runbook.md").read_text(), re.MULTILINE)
    return {re.sub(r"[^a-z0-9 -]", "", heading.lower()).replace(" ", "-") for heading in found}


@pytest.mark.parametrize(("file", "name"), ALERTS)
def test_an_alert_says_how_bad_it_is_and_what_to_do(file, name):
    """A severity that is routed, a sentence, a paragraph, and a section of the runbook."""
    alert = ALERTS[file, name]
    assert alert["labels"]["severity"] in SEVERITIES
    assert alert["annotations"]["summary"].strip()
    assert alert["annotations"]["description"].strip()
    assert alert["annotations"]["runbook_url"] == RUNBOOK + name.lower()
    assert name.lower() in headings()


@pytest.mark.parametrize(("file", "name"), ALERTS)
def test_an_alert_gives_its_command_on_a_line_of_its_own(file, name):
    """What is to be typed can be copied: it is the last line, and a command that exists with its options."""
    text = ALERTS[file, name]["annotations"]["description"]
    *prose, last = text.splitlines()
    assert not any(re.match(r"(canaryd|systemctl|journalctl) ", line) for line in prose)
    assert prose[-1].endswith(":") == (not last.endswith(".")), text
    if last.startswith("canaryd "):
        words = re.sub(r"\{\{.*?\}\}", "cuda:0", last).split()[1:]
        parser().parse_args(words)


def test_a_drill_names_the_same_times_everywhere():
    """How long it waits, when its alert arrives, and when that ends: README, guide, help, alert, runbook, files."""
    readme, install, alerting, runbook = (
        " ".join((ROOT / name).read_text().split())
        for name in ("README.md", "docs/install.md", "docs/alerting.md", "docs/runbook.md")
    )
    assert (WAIT, DRILL_EXPIRY) == (600.0, 3600.0)
    assert all("up to ten minutes" in text for text in (readme, install))
    assert "(default: 10 minutes)" in " ".join(canaryd("drill", "--help").out.split())
    alert = ALERTS[OURS.name, "CanarydDrill"]
    assert "ends one hour after the drill" in alert["annotations"]["description"]
    assert "the alert ends an hour after the drill" in runbook
    assert "`CanarydDrill` ends after an hour" in readme
    (evaluated,) = (g["interval"] for g in yaml.safe_load(OURS.read_text())["groups"] if alert in g["rules"])
    scraped = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())["scrape_configs"][0]["scrape_interval"]
    route = yaml.safe_load(ALERTMANAGER.read_text())["route"]
    (told,) = (r for r in route["routes"] if r["receiver"] == "canaryd-drill")
    waits = scraped, evaluated, alert.get("for", "0s"), told.get("group_wait", route["group_wait"])
    most = 1 + sum(int(wait.removesuffix("s")) for wait in waits)
    assert f"at most {most} s" in alerting
    assert most < int(re.findall(r"sleep (\d+)", readme)[0])


def test_the_runbook_has_no_section_for_an_alert_that_is_not_there():
    """Each section under an alert's name belongs to one."""
    assert {h for h in headings() if h.startswith("canaryd")} == {name.lower() for name in NAMES}


# --- What is asked for exists -----------------------------------------------------------------------------------------


def texts(path: Path) -> Iterator[str]:
    """Yield every expression of a file, and the queries in annotations."""
    for rule in (*rules(path, "alert"), *rules(path, "record")):
        yield rule["expr"]
        for text in rule.get("annotations", {}).values():
            for query in re.findall(r'printf "((?:[^"\\]|\\.)*)"', text):
                yield query.replace("%q", "''")


@pytest.mark.parametrize("path", RULES, ids=lambda p: p.name)
def test_every_metric_and_label_of_the_rules_exists(path):
    """A metric that was renamed would silence an alert without a word."""
    recorded = {rule["record"] for file in RULES for rule in rules(file, "record")}
    known = {"up", "ALERTS"} | recorded | set(textfile.FAMILIES)
    families = {**FAMILIES, **textfile.FAMILIES}
    every = TARGET | {"fingerprint", "why", "severity", "alertname", "alertstate", "scope", "rule_group"}
    every |= {x for family in families.values() for x in family.labels}
    for text in texts(path):
        bare = re.sub(r'"[^"]*"|\'[^\']*\'', "''", text)
        for metric, inside in re.findall(r"([a-zA-Z_][\w:]*)\{([^}]*)\}", bare):
            labels = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", inside))
            assert metric not in families or labels <= {*families[metric].labels, *TARGET}, text
            assert labels <= every, text
        for metric in re.findall(r"(?<![\w:])((?:canaryd_|process_)\w+|\w+:\w+(?::\w+)?)(?![\w:])", bare):
            assert metric in FAMILIES or metric in known or metric.startswith("process_"), (metric, text)
        for listed in re.findall(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([\w\s,]*)\)", bare):
            assert set(re.findall(r"\w+", listed)) <= every, text


def test_recorded_series_are_named_by_convention():
    """level:metric:operation."""
    names = {rule["record"] for path in (OURS, VIEWS) for rule in rules(path, "record")}
    assert all(re.fullmatch(r"[a-z_]+:canaryd_[a-z_]+:[a-z_]+", name) for name in names), names


# --- What the unit tests cover ----------------------------------------------------------------------------------------


def expectations() -> Iterator[tuple[str, list[str]]]:
    """Yield (expression, the labels of the samples expected of it) of every unit test that asks for ALERTS."""
    for path in UNITS:
        for test in yaml.safe_load(path.read_text())["tests"]:
            for case in test.get("promql_expr_test", ()):
                if "ALERTS" in case["expr"]:
                    yield case["expr"], [sample["labels"] for sample in case["exp_samples"]]


@pytest.mark.parametrize("name", sorted({a["alert"] for path in (OURS, TRENDS) for a in rules(path, "alert")}))
def test_every_alert_is_seen_to_fire_and_to_stay_silent(name):
    """Neither an alert that cannot fire nor one that always does is shipped."""
    word = f'alertname="{name}"'
    assert any(word in labels for _, samples in expectations() for labels in samples)
    assert any(word in expr and not samples for expr, samples in expectations())


def test_an_alert_bears_no_label_that_changes_while_its_cause_lasts():
    """Index, cause, state, finding, probe or version as a label would resolve and fire it anew."""
    labels = {x for _, samples in expectations() for sample in samples for x in re.findall(r"(\w+)=", sample)}
    assert labels == {"alertname", "alertstate", "severity", "job", "instance", "hostname", "device", "model"}


# --- Inhibition -------------------------------------------------------------------------------------------------------


def alerts_of(matchers: list[str]) -> set[str]:
    """Return the alerts that matchers name; every word of theirs must name one."""
    (words,) = (m[1] for text in matchers if (m := re.fullmatch(r'alertname=~?"([^"]+)"', text)))
    found: set[str] = set()
    for word in words.split("|"):
        meant = {name for name in NAMES if re.fullmatch(word, name)}
        assert meant, f"{word} is no alert"
        found |= meant
    return found


def test_no_alerts_silence_each_other():
    """Two alerts that inhibit each other, even by way of others, would both be told to nobody."""
    graph: dict[str, set[str]] = {name: set() for name in NAMES}
    for rule in yaml.safe_load(ALERTMANAGER.read_text())["inhibit_rules"]:
        for target in alerts_of(rule["target_matchers"]):
            graph[target] |= alerts_of(rule["source_matchers"]) - {target}
    order = list(TopologicalSorter(graph).static_order())
    assert set(order) == set(NAMES)
    assert any(graph.values())


def test_a_faulty_device_mutes_only_its_own_alerts():
    """It stays faulty, and acknowledged, for weeks: what an endpoint on other devices answers meanwhile is told."""
    for rule in yaml.safe_load(ALERTMANAGER.read_text())["inhibit_rules"]:
        if any(name.startswith("CanarydDeviceFaulty") for name in alerts_of(rule["source_matchers"])):
            assert "device" in rule["equal"], rule


def test_what_is_not_inhibited_is_told():
    """Only pages of a known fault, or of a host that explains them, are ever held back by what is not a page itself."""
    severity = {name: alert["labels"]["severity"] for (_, name), alert in ALERTS.items()}
    for rule in yaml.safe_load(ALERTMANAGER.read_text())["inhibit_rules"]:
        weak = {s for s in alerts_of(rule["source_matchers"]) if severity[s] != "critical"}
        pages = {t for t in alerts_of(rule["target_matchers"]) if severity[t] == "critical"}
        assert not (weak and pages) or weak <= {"CanarydFaultAcknowledged", "CanarydMinorityAcknowledged"}, rule
