"""What the JSON of a dashboard asks Prometheus, with its variables filled in as Grafana would. Standard library alone.

The tests and the previews read dashboards through this; it knows only what our own dashboards use.
"""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

Labels = Mapping[str, str]
Json = Mapping[str, Any]


class Refused(Exception):
    """Prometheus does not take a query; the message is its own."""


@dataclass(frozen=True)
class Api:
    """The HTTP API of one Prometheus."""

    url: str

    def get(self, path: str, **parameters: Any) -> Any:
        """Return the data of one answer. Raises `Refused`, or `OSError` where nobody answers."""
        query = urllib.parse.urlencode(parameters, doseq=True)
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{query}", timeout=60) as answer:  # noqa: S310  as told
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            with error:
                raise Refused(f"{parameters}: {json.load(error).get('error')}") from error


@dataclass(frozen=True, kw_only=True)
class Window:
    """The time range that is looked at, in seconds since the epoch, and the resolution."""

    start: float
    end: float
    step: float
    scrape: float
    """The scrape interval that the data source is told."""

    def of(self, panel: Json) -> Window:
        """Return the window for a panel, which may ask for coarser steps."""
        least = panel.get("interval", "0s")
        seconds = float(least[:-1]) * {"s": 1, "m": 60, "h": 3600}[least[-1]]
        return replace(self, step=max(self.step, seconds))

    @property
    def times(self) -> Mapping[str, str]:
        """Grafana's own variables."""
        span = round(self.end - self.start)
        return {
            "__rate_interval": f"{max(self.step + self.scrape, 4 * self.scrape):.0f}s",
            "__interval": f"{self.step:.0f}s",
            "__range": f"{span}s",
        }


class Query(NamedTuple):
    """One query of a dashboard."""

    where: str
    """Dashboard, panel and reference, for messages."""
    text: str
    """With variables still in it; of a variable the PromQL in it."""
    kind: str
    """"panel", "annotation" or "variable"."""


def panels(dashboard: Json) -> Iterator[Json]:
    """Yield panels, those of folded rows among them; rows themselves are left out."""
    for panel in dashboard["panels"]:
        if panel["type"] == "row":
            yield from panel.get("panels", ())
        else:
            yield panel


def queries(dashboard: Json) -> Iterator[Query]:
    """Yield everything that a dashboard asks."""
    title = dashboard["title"]
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            yield Query(f"{title} / ${variable['name']}", _inner(variable)[0], "variable")
    for mark in dashboard["annotations"]["list"]:
        yield Query(f"{title} / {mark['name']}", mark["expr"], "annotation")
    for panel in panels(dashboard):
        for target in panel.get("targets", ()):
            yield Query(f"{title} / {panel['title']} / {target['refId']}", target["expr"], "panel")


def _inner(variable: Json) -> tuple[str, str]:
    """Return the PromQL in a variable's query, and the label that it wants ("" for whole series)."""
    text = variable["query"]["query"]
    if found := re.fullmatch(r"label_values\((.+), (\w+)\)", text):
        return found[1], found[2]
    if found := re.fullmatch(r"query_result\((.+)\)", text):
        return found[1], ""
    raise ValueError(f"${variable['name']}: {text!r} is neither label_values nor query_result")


def options(variable: Json, chosen: Mapping[str, str], api: Api, window: Window) -> list[tuple[str, str]]:
    """Return what a variable offers: (text, value)."""
    text, label = _inner(variable)
    text = fill(text, chosen, window)
    if label:
        values = api.get(f"label/{label}/values", **{"match[]": text, "start": window.start, "end": window.end})
        return [(value, value) for value in values]
    found = []
    for sample in api.get("query", query=text, time=window.end)["result"]:
        labels = dict(sample["metric"])
        said = labels.pop("__name__", "") + "{" + ",".join(f'{k}="{v}"' for k, v in sorted(labels.items())) + "} 1"
        # JavaScript writes a named group without the P.
        match = re.search(variable["regex"].strip("/").replace("(?<", "(?P<"), said)
        if match:
            found.append((match["text"], match["value"]))
    return sorted(found)


def choices(dashboard: Json, api: Api, window: Window, **wanted: str) -> dict[str, str]:
    """Choose a value for each variable: the one wanted, by text or value, else all, else the first."""
    chosen: dict[str, str] = {}
    for variable in dashboard["templating"]["list"]:
        name = variable["name"]
        if variable["type"] == "datasource":
            continue
        offered = options(variable, chosen, api, window)
        if name in wanted:
            chosen[name] = next((value for text, value in offered if wanted[name] in (text, value)), wanted[name])
        elif variable.get("includeAll"):
            every = "|".join(re.escape(value) for _, value in offered)
            chosen[name] = variable.get("allValue") or f"({every})"
        else:
            chosen[name] = offered[0][1] if offered else ""
    return chosen


def fill(text: str, chosen: Mapping[str, str], window: Window) -> str:
    """Put values in the place of `$name` and `${name}`; raises `KeyError` for a variable that nobody has."""
    values = {**chosen, **window.times}
    return re.sub(r"\$(?:\{(\w+)\}|([A-Za-z_]\w*))", lambda found: values[found[1] or found[2]], text)


class Line(NamedTuple):
    """One series: its labels and (seconds, value) in order."""

    labels: Labels
    points: Sequence[tuple[float, float]]


def over_time(api: Api, text: str, chosen: Mapping[str, str], window: Window) -> list[Line]:
    """Ask for a range."""
    found = api.get(
        "query_range", query=fill(text, chosen, window), start=window.start, end=window.end, step=window.step
    )
    return [Line(one["metric"], [(float(at), float(value)) for at, value in one["values"]]) for one in found["result"]]


def now(api: Api, text: str, chosen: Mapping[str, str], window: Window) -> list[Line]:
    """Ask for the end of the window."""
    found = api.get("query", query=fill(text, chosen, window), time=window.end)
    return [Line(one["metric"], [(float(one["value"][0]), float(one["value"][1]))]) for one in found["result"]]


def legend(form: str, labels: Labels) -> str:
    """Return how a series is called."""
    if form == "__auto":
        return ", ".join(f'{k}="{v}"' for k, v in sorted(labels.items()) if k != "__name__")
    return re.sub(r"\{\{\s*(\w+)\s*\}\}", lambda found: labels.get(found[1], ""), form)


@dataclass
class Rows:
    """A table after its transformations."""

    columns: list[str]
    """As they are called above the table."""
    rows: list[dict[str, str | float]] = field(default_factory=list)


def table(panel: Json, answers: Mapping[str, Sequence[Line]]) -> Rows:
    """Make a table's rows from the answers by reference, as "merge", "filterFieldsByName" and "organize" do."""
    several = len(panel["targets"]) > 1
    rows: list[dict[str, str | float]] = []
    for ref, lines in answers.items():
        for line in lines:
            own: dict[str, str | float] = {k: v for k, v in line.labels.items() if k != "__name__"}
            labels = set(own)
            own[f"Value #{ref}" if several else "Value"] = line.points[-1][1]
            for row in rows:
                shared = labels & {k for k in row if not k.startswith("Value")}
                if shared and f"Value #{ref}" not in row and all(row[k] == own[k] for k in shared):
                    row.update(own)
                    break
            else:
                rows.append(own)
    steps = {step["id"]: step["options"] for step in panel["transformations"]}
    kept = steps["filterFieldsByName"]["include"]["names"]
    order, names = steps["organize"]["indexByName"], steps["organize"]["renameByName"]
    columns = sorted(kept, key=lambda name: order[name])
    renamed = [{names.get(k, k): v for k, v in row.items() if k in kept} for row in rows]
    made = Rows([names.get(column, column) for column in columns], renamed)
    for by in panel["options"].get("sortBy", ()):
        key = by["displayName"]
        made.rows.sort(key=lambda row: _sortable(row.get(key)), reverse=bool(by.get("desc")))
    return made


def _sortable(value: str | float | None) -> tuple[int, float, str]:
    if value is None:
        return (0, 0.0, "")
    return (1, value, "") if isinstance(value, float) else (2, 0.0, value)


def mapping(config: Json, value: object) -> Json | None:
    """Return text and colour that value mappings give a value."""
    key = f"{value:g}" if isinstance(value, float) else str(value)
    for one in config.get("mappings", ()):
        if one["type"] == "value" and key in one["options"]:
            found: Json = one["options"][key]
            return found
    return None


def threshold(config: Json, value: float) -> str:
    """Return the colour of a value by thresholds."""
    color = "text"
    for step in config.get("thresholds", {}).get("steps", ()):
        if step["value"] is None or value >= step["value"]:
            color = step["color"]
    return color
