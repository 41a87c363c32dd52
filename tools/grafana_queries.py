"""Read the queries of a dashboard's JSON, and send them to Prometheus with variables filled in as Grafana would.

The tests and the previews use this. It needs the standard library alone, and knows only what our dashboards use.
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
    """Raised if Prometheus refuses a query; the message contains the text of Prometheus."""


@dataclass(frozen=True)
class Api:
    """The HTTP API of one Prometheus."""

    url: str

    def get(self, path: str, **parameters: Any) -> Any:
        """Return the "data" of one answer. Raises `Refused`, or `OSError` if no server answers."""
        query = urllib.parse.urlencode(parameters, doseq=True)
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{query}", timeout=60) as answer:  # noqa: S310  as told
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            with error:
                raise Refused(f"{parameters}: {json.load(error).get('error')}") from error


@dataclass(frozen=True, kw_only=True)
class Window:
    """The time range of a dashboard in seconds since the epoch, and its resolution in seconds."""

    start: float
    end: float
    step: float
    scrape: float
    """The scrape interval in the settings of the data source, in seconds."""

    def of(self, panel: Json) -> Window:
        """Return the window for a panel; its step is the panel's minimum interval if that is larger."""
        least = panel.get("interval", "0s")
        seconds = float(least[:-1]) * {"s": 1, "m": 60, "h": 3600}[least[-1]]
        return replace(self, step=max(self.step, seconds))

    @property
    def times(self) -> Mapping[str, str]:
        """The values of Grafana's own variables, such as `__rate_interval`."""
        span = round(self.end - self.start)
        return {
            "__rate_interval": f"{max(self.step + self.scrape, 4 * self.scrape):.0f}s",
            "__interval": f"{self.step:.0f}s",
            "__range": f"{span}s",
        }


class Query(NamedTuple):
    """One query of a dashboard."""

    where: str
    """Dashboard and panel (or variable, annotation) of the query, for messages."""
    text: str
    """The PromQL, in which variables are not filled in yet."""
    kind: str
    """"panel", "annotation" or "variable"."""


def panels(dashboard: Json) -> Iterator[Json]:
    """Yield all panels of a dashboard, also those in folded rows, but not the rows themselves."""
    for panel in dashboard["panels"]:
        if panel["type"] == "row":
            yield from panel.get("panels", ())
        else:
            yield panel


def queries(dashboard: Json) -> Iterator[Query]:
    """Yield all queries of a dashboard: of its variables, annotations and panels."""
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
    """Return the PromQL in a variable's query, and the label whose values it lists ("" for whole series)."""
    text = variable["query"]["query"]
    if found := re.fullmatch(r"label_values\((.+), (\w+)\)", text):
        return found[1], found[2]
    if found := re.fullmatch(r"query_result\((.+)\)", text):
        return found[1], ""
    raise ValueError(f"${variable['name']}: {text!r} is neither label_values nor query_result")


def options(variable: Json, chosen: Mapping[str, str], api: Api, window: Window) -> list[tuple[str, str]]:
    """Return the options of a variable as (text, value); `chosen`: values of the variables before it."""
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
    """Return a value for each variable: the `wanted` one (by text or value), else all values, else the first option."""
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
    """Return the text with values in place of `$name` and `${name}`. Raises `KeyError` for an unknown variable."""
    values = {**chosen, **window.times}
    return re.sub(r"\$(?:\{(\w+)\}|([A-Za-z_]\w*))", lambda found: values[found[1] or found[2]], text)


class Line(NamedTuple):
    """One series: its labels, and its points (epoch s, value) in order."""

    labels: Labels
    points: Sequence[tuple[float, float]]


def over_time(api: Api, text: str, chosen: Mapping[str, str], window: Window) -> list[Line]:
    """Return the series of the query `text` over the whole window."""
    found = api.get(
        "query_range", query=fill(text, chosen, window), start=window.start, end=window.end, step=window.step
    )
    return [Line(one["metric"], [(float(at), float(value)) for at, value in one["values"]]) for one in found["result"]]


def now(api: Api, text: str, chosen: Mapping[str, str], window: Window) -> list[Line]:
    """Return the series of the query `text` at the end of the window, with one point each."""
    found = api.get("query", query=fill(text, chosen, window), time=window.end)
    return [Line(one["metric"], [(float(one["value"][0]), float(one["value"][1]))]) for one in found["result"]]


def legend(form: str, labels: Labels) -> str:
    """Return the name of a series in a legend. `form` is Grafana's format, such as "{{device}}"."""
    if form == "__auto":
        return ", ".join(f'{k}="{v}"' for k, v in sorted(labels.items()) if k != "__name__")
    return re.sub(r"\{\{\s*(\w+)\s*\}\}", lambda found: labels.get(found[1], ""), form)


@dataclass
class Rows:
    """A table after the transformations of its panel."""

    columns: list[str]
    """Titles of the columns."""
    rows: list[dict[str, str | float]] = field(default_factory=list)


def table(panel: Json, answers: Mapping[str, Sequence[Line]]) -> Rows:
    """Return a panel as a table after "merge", "filterFieldsByName" and "organize". `answers`: query → series."""
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
    """Return the text and colour that a panel's value mappings give to a value, or None if no mapping matches."""
    key = f"{value:g}" if isinstance(value, float) else str(value)
    for one in config.get("mappings", ()):
        if one["type"] == "value" and key in one["options"]:
            found: Json = one["options"][key]
            return found
    return None


def threshold(config: Json, value: float) -> str:
    """Return the colour that a panel's thresholds give to a value."""
    color = "text"
    for step in config.get("thresholds", {}).get("steps", ()):
        if step["value"] is None or value >= step["value"]:
            color = step["color"]
    return color
