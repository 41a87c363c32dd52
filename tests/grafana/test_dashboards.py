"""The dashboards: what Grafana's schema and linter would say of the JSON, and whether every query finds its data."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from canaryd.metrics import families
from canaryd.model import Cause, State
from tests.command import ROOT
from tests.grafana.field import fleet
from tests.programs import accepted, needed
from tools import grafana_queries as queries
from tools.grafana_queries import Window

FILES = sorted((ROOT / "grafana/dashboards").glob("*.json"))
DASHBOARDS = {path.stem: json.loads(path.read_text()) for path in FILES}
RULES = sorted((ROOT / "deploy/prometheus").glob("*.rules.yml"))
OURS = {"up", "scrape_duration_seconds", "scrape_samples_scraped"}
"""Series that Prometheus itself makes of every target."""

EMPTY = {
    "Fleet / Software versions that differ / A": "both nodes have one stack",
    "Fleet / Results shared by a minority of nodes / A": "the odd value is on one node alone",
    "Itself / Nodes that do not answer, over time / A": "no node is silent in this story",
    "Itself / Problems over time / A": "the stores work",
    "Itself / Problems over time / B": "the configurations are right",
    "Itself / Problems over time / C": "the kernel logs are readable",
    "Itself / Problems over time / E": "the drivers are persistent",
    "Itself / Starts and reloads / A": "no daemon starts anew",
    "Device / Memory taken out of use / C": "this generation replaces rows instead of retiring pages",
    "Device / Memory taken out of use / D": "only AMD devices give it",
    "Device / Links: errors / B": "needs a port that reports AER, which the stand-in's PCI tree has not",
    "Device / Links: errors / C": "no device-to-device link errs in this story",
}
"""Queries that may find nothing in the story, and why. They must still be queries."""
OTHER_SCOPE = {
    "up": "has no model and no device",
    "canaryd:fleet_voters": "is one group's, not a node's",
    "canaryd:fleet_votes": "is one group's, not a node's",
    "canaryd:fleet_nodes": "is one group's, not a node's",
    "canaryd:fleet_no_majority": "is one group's, not a node's",
    "canaryd:fleet_stacks_differ": "is one group's, not a node's",
    "canaryd:fleet_split": "is one group's, not a node's",
}
SELECTOR = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(\{[^{}]*\})")
every = pytest.mark.parametrize("dashboard", DASHBOARDS.values(), ids=lambda d: d["uid"])


def panels(dashboard: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return list(queries.panels(dashboard))


def walk(value: object, where: str = "") -> Iterator[tuple[str, object]]:
    """Yield every value of a document with its path."""
    yield where, value
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from walk(inner, f"{where}/{key}")
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from walk(inner, f"{where}/{number}")


def names_in(text: str) -> set[str]:
    """Return the metrics that a query names."""
    bare = re.sub(r'"[^"]*"', '""', text)
    bare = re.sub(r"\b(by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)", "", bare)
    bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]", "", bare)
    found = set(re.findall(r"(?<![\w:$])([a-zA-Z_:][\w:]*)(?!\w*\s*\()", bare))
    return found - {"and", "or", "unless", "bool", "by", "without", "on", "group_left", "count_values"}


def recorded() -> set[str]:
    """Return the names of the series that the shipped rules record."""
    groups = [group for path in RULES for group in yaml.safe_load(path.read_text())["groups"]]
    return {rule["record"] for group in groups for rule in group["rules"] if "record" in rule}


# --- The files --------------------------------------------------------------------------------------------------------


@every
def test_a_file_is_an_export_without_what_is_ours_alone(dashboard):
    """No number of one Grafana, no value that somebody chose; sorted, so that a change shows as that change alone."""
    assert not dashboard.keys() & {"id", "version", "__inputs", "__requires", "__elements"}
    assert not any(mark.get("builtIn") for mark in dashboard["annotations"]["list"])
    for variable in dashboard["templating"]["list"]:
        assert variable.get("current", {}).get("value", "$__all") == "$__all", variable["name"]
        assert not variable.get("options"), variable["name"]
    text = json.dumps(dashboard, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    assert (ROOT / f"grafana/dashboards/{dashboard['uid']}.json").read_text() == text, "see grafana/README.md"


def test_the_provisioning_files_lead_to_the_dashboards():
    """The provider reads a directory, the data source has the type that the dashboards ask for."""
    folder = ROOT / "grafana/provisioning"
    (provider,) = yaml.safe_load((folder / "dashboards/canaryd.yaml").read_text())["providers"]
    assert provider["type"] == "file"
    assert Path(provider["options"]["path"]).is_absolute()
    (source,) = yaml.safe_load((folder / "datasources/prometheus.yaml").read_text())["datasources"]
    assert source["type"] == "prometheus"
    assert "timeInterval" in source["jsonData"]


# --- Lint: the rules of Grafana's dashboard-linter, and ours ----------------------------------------------------------


@every
def test_no_data_source_is_named(dashboard):
    """Each panel, target, variable and annotation takes the one that the reader chooses, and all of them take one."""
    assert dashboard["templating"]["list"][0]["type"] == "datasource"
    found = [value for _, value in walk(dashboard) if isinstance(value, dict) and "datasource" in value]
    assert len(found) > 20
    assert {json.dumps(value["datasource"], sort_keys=True) for value in found} == {
        '{"type": "prometheus", "uid": "${datasource}"}'
    }
    for panel in panels(dashboard):
        assert "datasource" in panel, panel["title"]
        assert all("datasource" in target for target in panel.get("targets", ())), panel["title"]


@every
def test_every_panel_says_what_it_shows(dashboard):
    """A title, a description of a sentence, a unit, and what it means when there is nothing."""
    titles = Counter(panel["title"] for panel in panels(dashboard))
    assert set(titles.values()) == {1}, titles.most_common(2)
    for panel in panels(dashboard):
        assert panel["title"].strip()
        assert len(panel["description"]) > 20, panel["title"]
        assert panel["description"].endswith((".", "?")), panel["title"]
        if panel["type"] == "text":
            continue
        defaults = panel["fieldConfig"]["defaults"]
        assert defaults["unit"], panel["title"]
        if panel["type"] in ("stat", "table", "state-timeline"):
            assert defaults["noValue"], panel["title"]
        assert panel["targets"], panel["title"]
        refs = Counter(target["refId"] for target in panel["targets"])
        assert set(refs.values()) == {1}, panel["title"]


@every
def test_every_query_can_be_narrowed(dashboard):
    """Each series of canaryd is asked by job and instance; those that cannot be are listed with a reason."""
    for query in queries.queries(dashboard):
        if query.kind == "variable":
            continue
        asked = SELECTOR.findall(query.text)
        bare = {n for n in names_in(query.text) if n.startswith(("canaryd", "process", "up", "scrape"))}
        assert asked or bare, query.where
        for name, selector in asked:
            if name not in OTHER_SCOPE or "job" in selector:
                assert 'job=~"$job"' in selector or "$model" in selector, query.where
                assert 'instance=~"$instance"' in selector or name in OTHER_SCOPE, query.where
        for name in bare - {name for name, _ in asked}:
            assert name in OTHER_SCOPE, (query.where, name)


@every
def test_variables_are_filled_when_the_time_range_changes(dashboard):
    """A node that came today is in the list today; where several can be chosen, all of them is `.+`, but of jobs."""
    variables = {v["name"]: v for v in dashboard["templating"]["list"]}
    assert {"datasource", "job", "instance"} <= variables.keys()
    for variable in variables.values():
        if variable["type"] == "query":
            assert variable["refresh"] == 2
            assert variable["label"]
            if variable.get("multi"):
                assert variable["includeAll"]
                # Other exporters' jobs are no nodes of canaryd: there "All" is the list of its own.
                assert variable.get("allValue") == (None if variable["name"] == "job" else ".+")
    used = {name for q in queries.queries(dashboard) for name in re.findall(r"\$\{?([A-Za-z_]\w*)", q.text)}
    assert used - {"__rate_interval", "__interval", "__range"} <= variables.keys()
    for name in variables.keys() - {"datasource"}:
        assert name in used, f"${name} is asked for nowhere"


@every
def test_states_have_one_colour_and_a_word_everywhere(dashboard):
    """Whoever sees no colour reads the word; the same state is the same colour in each panel of each dashboard."""
    colors: dict[str, set[str]] = {}
    for _, value in walk(dashboard):
        if isinstance(value, dict) and value.get("type") == "value":
            if "4" in value["options"]:
                assert [value["options"][str(s.severity)]["text"] for s in State] == [s.value for s in State]
            for said in value["options"].values():
                assert said["text"]
                colors.setdefault(said["text"], set()).add(said["color"])
    for word in [*(s.value for s in State), *(c.value for c in Cause)]:
        assert len(colors.get(word, ())) <= 1, (word, colors[word])
    first = DASHBOARDS["canaryd-fleet"]
    ranks = next(p for p in panels(first) if p["type"] == "state-timeline")["fieldConfig"]["defaults"]["mappings"][0]
    assert [ranks["options"][str(n)]["text"] for n in range(5)] == [s.value for s in State]
    if dashboard["uid"] != "canaryd-itself":
        for state in State:
            assert colors[state.value] == {ranks["options"][str(state.severity)]["color"]}


@every
def test_links_lead_to_dashboards_that_exist(dashboard):
    """They keep time range and data source, and set variables that the other dashboard has."""
    urls = [v for where, v in walk(dashboard) if where.endswith("/url") and isinstance(v, str) and v]
    if dashboard["uid"] != "canaryd-device":
        assert urls
    for url in urls:
        found = re.fullmatch(r"/d/([a-z-]+)\?\$\{__url_time_range\}&\$\{datasource:queryparam\}(.*)", url)
        assert found, url
        there = {v["name"] for v in DASHBOARDS[found[1]]["templating"]["list"]}
        assert set(re.findall(r"&var-(\w+)=", found[2])) <= there, url
    (tagged,) = dashboard["links"]
    assert (tagged["type"], tagged["tags"]) == ("dashboards", dashboard["tags"])
    assert tagged["keepTime"]
    assert tagged["includeVars"]


@every
def test_every_metric_is_one_that_canaryd_has(dashboard):
    """Or one of its process, of the scrape, or of the rules that it ships."""
    known = OURS | set(families.FAMILIES) | recorded()
    known |= set(re.findall(r"`(process_\w+)`", (ROOT / "docs/metrics.md").read_text()))
    for query in queries.queries(dashboard):
        used = {n for n in names_in(query.text) if not n.startswith("__")}
        assert used
        assert used <= known, query.where


def test_every_family_is_shown_somewhere_or_left_out_for_a_reason():
    """What canaryd exports is worth a look: each metric is on a dashboard, or in this list."""
    left_out = {
        "canaryd_device_verdict_timestamp_seconds": "evidence ages by its probes; this says when the judge was asked",
        "canaryd_device_acknowledged_timestamp_seconds": "for the vote; canaryd status tells since when",
        "canaryd_budget_withheld": "what was put off is shown; canaryd status tells what waits now",
        "canaryd_recording_first_difference": "canaryd history and the dossier name it with its case",
    }
    shown = {name for d in DASHBOARDS.values() for q in queries.queries(d) for name in names_in(q.text)}
    core = {name for name in families.FAMILIES if not name.startswith(READINGS_LEFT)}
    assert core - shown == set(left_out)


READINGS_LEFT = tuple(
    f"canaryd_{name}"
    for name in (
        *(
            "sxid",
            "ecc_sram_uncorrected",
            "ecc_sram_aggregate",
            "temperature_threshold",
            "temperature_margin_threshold",
        ),
        *("fan_", "energy", "throttle_seconds", "throttle_events", "performance_state", "pcie_generation", "fabric"),
        *("persistence", "compute_", "mig_", "device_health", "device_fault", "device_recoveries"),
        *("endpoint_prompt", "endpoint_start", "endpoint_nonfinite"),
        *("edac_controllers", "ras", "cpu_cores", "load_average", "swap", "clock_source", "boot_time", "crash_records"),
        *("retired_pages_pending", "memory_available", "memory_used", "memory_total", "memory_reserved"),
    )
)
"""Details that `canaryd status`, the dossier and ad-hoc queries give; a page with all of them would hide the rest."""


# --- Against a real Prometheus ----------------------------------------------------------------------------------------


@every
def test_prometheus_reads_every_query(dashboard, tmp_path):
    """With the choices filled in; the story below, which `.ci/full` tells, shows what each finds."""
    promtool = needed("promtool", untested="no query was read by it")
    chosen, window = (
        dict.fromkeys(("job", "instance", "device", "model"), ".+"),
        Window(start=0, end=60, step=1, scrape=4),
    )
    asked = [queries.fill(query.text, chosen, window) for query in queries.queries(dashboard)]
    read = [{"record": f"q{n}", "expr": text} for n, text in enumerate(asked)]
    path = tmp_path / "rules.yml"
    path.write_text(json.dumps({"groups": [{"name": "all", "rules": read}]}))
    accepted(promtool, "check", "rules", path)


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """A fleet with a story, scraped: (API, nodes, window)."""
    begun = time.time()
    with fleet(tmp_path_factory.mktemp("fleet"), before=8, after=12) as (api, nodes):
        end = time.time()
        yield api, nodes, Window(start=begun, end=end, step=1, scrape=4)


def chosen_for(dashboard, api, nodes, window) -> list[dict[str, str]]:
    """Return the choices of a reader who follows the trouble, device by device."""
    if dashboard["uid"] in ("canaryd-fleet", "canaryd-itself"):
        return [queries.choices(dashboard, api, window)]
    if dashboard["uid"] == "canaryd-node":
        return [queries.choices(dashboard, api, window, instance=nodes[0].name)]
    wanted = ["cpu:0", *(f"cuda:{n}" for n in range(8))]
    return [queries.choices(dashboard, api, window, instance=nodes[0].name, device=name) for name in wanted]


@pytest.mark.slow
@every
def test_every_query_finds_its_data(dashboard, seen):
    """Panels, variables and annotations, asked as Grafana asks; what is empty in this story is listed with a reason."""
    api, nodes, window = seen
    choices = chosen_for(dashboard, api, nodes, window)
    empty = set()
    for query in queries.queries(dashboard):
        found = 0
        for chosen in choices:
            if query.kind == "variable":
                found += len(queries.now(api, query.text, chosen, window))
            else:
                found += sum(len(line.points) for line in queries.over_time(api, query.text, chosen, window))
                found += sum(len(line.points) for line in queries.now(api, query.text, chosen, window))
        if not found:
            empty.add(query.where.removeprefix("canaryd / "))
    assert empty <= {where for where in EMPTY if dashboard["title"].endswith(where.partition(" / ")[0])}


@pytest.mark.slow
@every
def test_variables_offer_what_is_there(dashboard, seen):
    """Nodes by their names, devices by the names that people type."""
    api, nodes, window = seen
    chosen: dict[str, str] = {"job": ".+", "instance": nodes[0].name}
    for variable in dashboard["templating"]["list"]:
        if variable["type"] != "query":
            continue
        offered = queries.options(variable, chosen, api, window)
        if variable["name"] == "instance":
            assert [text for text, _ in offered] == [node.name for node in nodes]
        elif variable["name"] == "device":
            names = dict(offered)
            assert {names[f"cuda:{n}"] for n in range(8)} == set(nodes[0].uuids)
            assert "cpu:0" in names
        else:
            assert offered


def rows_of(title: str, uid: str, seen, **wanted: str) -> list[dict[str, Any]]:
    api, _, window = seen
    dashboard = DASHBOARDS[uid]
    panel = next(p for p in panels(dashboard) if p["title"] == title)
    chosen = queries.choices(dashboard, api, window, **wanted)
    answers = {t["refId"]: queries.now(api, t["expr"], chosen, window) for t in panel["targets"]}
    return queries.table(panel, answers).rows


@pytest.mark.slow
def test_the_fleet_names_what_is_wrong_worst_first(seen):
    """One row for each device that is not healthy, with cause, and since when."""
    _, nodes, window = seen
    rows = rows_of("What is wrong now", "canaryd-fleet", seen)
    assert [row["state"] for row in rows] == sorted((row["state"] for row in rows), reverse=True)
    worst = rows[0]
    assert (worst["instance"], worst["device name"], worst["state"], worst["cause"]) == (
        nodes[0].name,
        "cuda:3",
        4.0,
        "hardware",
    )
    assert window.start < worst["since"] / 1000 < window.end
    assert {row["device name"]: row["acknowledged"] for row in rows}["cuda:4"] == 1
    assert len({(row["instance"], row["device"]) for row in rows}) == len(rows)


@pytest.mark.slow
def test_a_lane_of_the_fleet_is_named_cuda_3(seen):
    """The same panel that showed the tail of a uuid; what is unknown by name keeps its uuid and its lane."""
    api, nodes, window = seen
    panel = next(p for p in panels(DASHBOARDS["canaryd-fleet"]) if p["type"] == "state-timeline")
    chosen = queries.choices(DASHBOARDS["canaryd-fleet"], api, window)
    (target,) = panel["targets"]
    found = queries.over_time(api, target["expr"], chosen, window)
    names = {(line.labels["instance"], line.labels["name"]) for line in found}
    assert (nodes[0].name, "cuda:3") in names
    assert len(names) == len({(line.labels["instance"], line.labels["device"]) for line in found})
    assert all(name.startswith(("cuda:", "cpu:")) for _, name in names)


@pytest.mark.slow
def test_the_vote_names_the_device_that_differs(seen):
    """And nobody else."""
    _, nodes, _ = seen
    rows = rows_of("Which device differs from identical ones", "canaryd-fleet", seen)
    assert [(row["instance"], row["device name"]) for row in rows] == [(nodes[0].name, "cuda:6")]
    votes = rows_of("Comparison with the fleet", "canaryd-device", seen, instance=nodes[0].name, device="cuda:6")
    assert [(row["probe"], row.get("outvoted")) for row in votes] == [("says_all", 1.0)]


@pytest.mark.slow
def test_devices_stand_side_by_side_in_one_row_each(seen):
    """The queries of a table meet in the same rows: nothing is doubled, nothing torn apart."""
    _, nodes, _ = seen
    rows = rows_of("Side by side", "canaryd-node", seen, instance=nodes[0].name)
    names = [row["device name"] for row in rows]
    assert names == ["cpu:0", *(f"cuda:{n}" for n in range(8))]
    by_name = {row["device name"]: row for row in rows}
    assert by_name["cuda:3"]["mismatches"] > 0
    assert by_name["cuda:3"]["Xids"] == 1
    assert by_name["cuda:5"]["drift / tolerance"] == float("inf")
    assert by_name["cuda:4"]["held back"] == 1
    assert by_name["cuda:0"]["mismatches"] == 0
    probes = rows_of("Probes", "canaryd-device", seen, instance=nodes[0].name, device="cuda:3")
    assert {row["probe"] for row in probes} >= {"says_all", "nvidia_telemetry", "passes"}
    assert len({row["probe"] for row in probes}) == len(probes)


@pytest.mark.slow
def test_changes_and_xids_are_marked_when_they_happened(seen):
    """Annotations lie after the quiet beginning, and name the Xid and the component."""
    api, nodes, window = seen
    dashboard = DASHBOARDS["canaryd-node"]
    chosen = queries.choices(dashboard, api, window, instance=nodes[0].name)
    for mark, label, wanted in zip(
        dashboard["annotations"]["list"], ("component", "xid"), ({"driver"}, {"31", "48"}), strict=True
    ):
        lines = queries.over_time(api, mark["expr"], chosen, window)
        assert {line.labels[label] for line in lines} == wanted
        assert all(line.points[0][0] > window.start + 8 for line in lines)
        assert mark["target"]["expr"] == mark["expr"]


@pytest.mark.slow
def test_the_preview_draws_every_panel(seen, tmp_path):
    """tools/grafana_preview.py makes a page of each dashboard; panels without data are those that have a reason."""
    api, nodes, _ = seen
    argv = [sys.executable, "-m", "tools.grafana_preview", "--prometheus", api.url, "--out", tmp_path]
    argv += [
        "--since",
        str(1 / 60),  # panels of steps of a minute have one at its end
        "--scrape",
        "1",
        "--set",
        f"instance={nodes[0].name}",
        "--set",
        "device=cuda:3",
        "--no-png",
    ]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    for uid, dashboard in DASHBOARDS.items():
        page = (tmp_path / f"{uid}.html").read_text()
        assert page.count('class="panel"') == sum(panel["type"] != "row" for panel in dashboard["panels"])
        assert page.count("▸ ") == sum(panel.get("collapsed", False) for panel in dashboard["panels"])
    told = next(line for line in done.stdout.splitlines() if "canaryd-fleet.html" in line)
    empty = set(told.partition("without data: ")[2].split("; "))
    assert empty <= {where.split(" / ")[1] for where in EMPTY} | {"none"}
