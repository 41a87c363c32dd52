"""What all dashboards share: colours, value mappings, variables, links, annotations, panels and their places.

A dashboard is a `Page`: panels are added from left to right in a grid of 24 columns, and start a new line where they no
longer fit. Everything that a reader must recognise again (states, causes, yes and no) is made here, once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from grafana_foundation_sdk.builders import common as layout
from grafana_foundation_sdk.builders import dashboard as build
from grafana_foundation_sdk.builders import prometheus, stat, statetimeline, table, text, timeseries
from grafana_foundation_sdk.models import common, dashboard
from grafana_foundation_sdk.models.prometheus import PromQueryFormat
from grafana_foundation_sdk.models.text import TextMode

SOURCE = dashboard.DataSourceRef(type_val="prometheus", uid="${datasource}")
"""The data source that the reader chooses; no other is named anywhere."""

GREEN, YELLOW, GREY, ORANGE, RED, BLUE = "#56a64b", "#e0b400", "#8e8e8e", "#ff780a", "#c4162a", "#5794f2"
QUIET = "#464c54"
"""Behind a count of zero: neither good news nor bad."""
STATES = {"healthy": GREEN, "degraded": YELLOW, "unknown": GREY, "suspect": ORANGE, "faulty": RED}
"""States from best to worst, as `canaryd.model.State` ranks them, and their colours on every dashboard."""
CAUSES = {
    "none": GREEN,
    "hardware": RED,
    "software": BLUE,
    "environment": YELLOW,
    "harness": GREY,
    "undetermined": ORANGE,
}

FLEET, NODE, DEVICE, ITSELF = "canaryd-fleet", "canaryd-node", "canaryd-device", "canaryd-itself"
"""The uids."""

Properties = Mapping[str, Any]


def mapped(words: Mapping[str, tuple[str, str]]) -> list[dashboard.ValueMapping]:
    """Return value → (text, colour) as a value mapping."""
    options = {
        value: dashboard.ValueMappingResult(text=shown, color=color, index=number)
        for number, (value, (shown, color)) in enumerate(words.items())
    }
    return [dashboard.ValueMap(options=options)]


RANKS = mapped({str(rank): (state, color) for rank, (state, color) in enumerate(STATES.items())})
"""0 healthy … 4 faulty, in words."""
CAUSE_WORDS = mapped(
    {cause: ("canaryd itself" if cause == "harness" else cause, color) for cause, color in CAUSES.items()}
)
"""Causes as every report of canaryd calls them."""


def yes_no(yes: str, no: str = GREEN, texts: tuple[str, str] = ("yes", "no")) -> list[dashboard.ValueMapping]:
    """Return a mapping of 1 and 0 to words, in these colours."""
    return mapped({"1": (texts[0], yes), "0": (texts[1], no)})


def steps(base: str, *limits: tuple[float, str]) -> build.ThresholdsConfig:
    """Return thresholds: a colour from each value on, `base` below all of them."""
    all_steps = [(None, base), *limits]
    return (
        build.ThresholdsConfig()
        .mode(dashboard.ThresholdsMode.ABSOLUTE)
        .steps([dashboard.Threshold(value=value, color=color) for value, color in all_steps])
    )


RANK_STEPS = ((1, STATES["degraded"]), (2, STATES["unknown"]), (3, STATES["suspect"]), (4, STATES["faulty"]))


# --- Queries ----------------------------------------------------------------------------------------------------------


def _by_rank(series: str, selector: str, least: int = 0) -> str:
    """Return the query of series that carry a state, each times the rank of its own; `least`: the lowest rank."""
    states = list(enumerate(STATES))[least:]
    return " or ".join(f'{series}{{{selector}, state="{state}"}} * {rank}' for rank, state in states)


def ranked(selector: str) -> str:
    """Return the query of each device's state as a number: 0 healthy … 4 faulty."""
    return f"max without (state) ({_by_rank('canaryd_device_state', selector)})"


def standing(selector: str) -> str:
    """Return the query of the state of each device that is not healthy, from the rules' series, as in `ranked`.

    Healthy devices have no such series, so a day of a large fleet can be asked for; that of a silent node goes on.
    """
    return f"max without (state) ({_by_rank('device:canaryd_device_state:held', selector, least=1)})"


HELD = 'reason!~"gpu_idle|applications_clocks|display_clocks"'
"""Reasons that hold clocks down and are neither rest nor somebody's setting."""


def spoken_rules(selector: str) -> str:
    """Return the query of the rules that speak, each with the rank of its state."""
    return _by_rank("canaryd_finding", selector)


def named(query: str, selector: str) -> str:
    """Give the series of a query the name that people type, such as "cuda:3"."""
    return f"({query}) * on (job, instance, device) group_left (name) canaryd_device_info{{{selector}}}"


def lanes(query: str, selector: str) -> str:
    """Give series names as `named` does, those of nodes that fell silent a while ago too; else the uuid is the name.

    The names are read once, at the end of the time range: that is cheap on a large fleet.
    """
    info = f"topk by (job, instance, device) (1, last_over_time(canaryd_device_info{{{selector}}}[15m] @ end()))"
    by = "on (job, instance, device)"
    known = f"({query}) * {by} group_left (name) {info}"
    return f'{known} or label_replace(({query}) unless {by} {info}, "name", "$1", "device", "(.*)")'


def age_in_periods(selector: str) -> str:
    """Return the query of how long ago each probe last found every bit right, in its own periods."""
    last = f"canaryd_probe_last_success_timestamp_seconds{{{selector}}}"
    period = f"canaryd_probe_period_seconds{{{selector}}}"
    return f"(time() - {last}) / on (job, instance, device, probe) {period}"


def neglect(selector: str) -> str:
    """Return `age_in_periods` without devices that are suspect or faulty: theirs are wrong, not late."""
    wrong = f'canaryd_device_state{{{selector}, state=~"suspect|faulty"}} == 1'
    return f"({age_in_periods(selector)}) unless on (job, instance, device) ({wrong})"


# --- Links ------------------------------------------------------------------------------------------------------------


def link_to(uid: str, title: str, **variables: str) -> dashboard.DashboardLink:
    """Return a data link that keeps time range and data source; as a URL, because that is what data links are."""
    chosen = "".join(f"&var-{name}={value}" for name, value in variables.items())
    url = f"/d/{uid}?${{__url_time_range}}&${{datasource:queryparam}}{chosen}"
    return dashboard.DashboardLink(title=title, url=url)


def _link(uid: str, title: str, form: str, *names: str) -> Properties:
    made = link_to(uid, title, **{name: form % name for name in names})
    return {"title": made.title, "url": made.url}


def row_links(*, device: bool) -> list[Properties]:
    """Return the links of a table's row: to its node and, where it has one, to its device."""
    form = "${__data.fields.%s}"
    links = [_link(DEVICE, "This device", form, "job", "instance", "device")] if device else []
    return [*links, _link(NODE, "This node", form, "job", "instance")]


def series_links(*, device: bool) -> list[build.DashboardLink]:
    """Return the links of a line: to its node and, where it has one, to its device."""
    form = "${__field.labels.%s}"
    links = [_link(DEVICE, "This device", form, "job", "instance", "device")] if device else []
    links.append(_link(NODE, "This node", form, "job", "instance"))
    return [build.DashboardLink(link["title"]).url(link["url"]) for link in links]


# --- Variables and annotations ----------------------------------------------------------------------------------------


def datasource() -> build.DatasourceVariable:
    """Return the variable by which the reader chooses a Prometheus."""
    return build.DatasourceVariable("datasource").label("Data source").type("prometheus")


def variable(
    name: str, label: str, query: str, *, many: bool, regex: str = "", every: str = ".+"
) -> build.QueryVariable:
    """Return a variable that is filled from Prometheus whenever the time range changes.

    `every` is what "All" stands for in a query; "" is the list of what there is, for a label that is not canaryd's own.
    """
    made = (
        build.QueryVariable(name)
        .label(label)
        .datasource(SOURCE)
        .query({"query": query, "refId": f"variable-{name}", "qryType": 3 if query.startswith("query_result") else 1})
        .refresh(dashboard.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(dashboard.VariableSort.NATURAL_ASC)
    )
    if regex:
        made = made.regex(regex)
    if many:
        everything = dashboard.VariableOption(selected=True, text="All", value="$__all")
        made = made.multi(many).include_all(many).current(everything)
        made = made.all_value(every) if every else made
    return made


def job() -> build.QueryVariable:
    """Return the variable of the scrape jobs."""
    return variable("job", "Job", "label_values(canaryd_build_info, job)", many=True, every="")


def instance(*, many: bool) -> build.QueryVariable:
    """Return the variable of the nodes: those that do not answer are in it, too."""
    return variable("instance", "Node", 'label_values(up{job=~"$job"}, instance)', many=many)


def device(*, many: bool) -> build.QueryVariable:
    """Return the variable of a node's devices: people read the name, queries get the uuid."""
    query = 'query_result(canaryd_device_info{job=~"$job", instance=~"$instance"})'
    return variable(
        "device", "Device", query, many=many, regex='/[{,]device="(?<value>[^"]+)".*,name="(?<text>[^"]+)"/'
    )


@dataclass(frozen=True, kw_only=True)
class Mark:
    """An annotation: what the query finds above 0 is marked at its time."""

    name: str
    query: str
    title: str
    tags: tuple[str, ...]
    color: str
    enable: bool = True

    def write(self) -> Properties:
        """Return it as Grafana's Prometheus data source reads it, which is more than the SDK has words for.

        `expr` is what versions before 12 read, `target` what those after them do.
        """
        return {
            "name": self.name,
            "datasource": SOURCE.to_json(),
            "enable": self.enable,
            "hide": False,
            "builtIn": 0,
            "iconColor": self.color,
            "expr": self.query,
            "target": {"expr": self.query, "refId": "Annotation", "range": True, "instant": False},
            "titleFormat": self.title,
            "textFormat": ", ".join(f"{tag} {{{{{tag}}}}}" for tag in self.tags),
            "tagKeys": ",".join(self.tags),
        }


def marks(selector: str, *, xids: bool) -> list[Mark]:
    """Return the annotations: changes of the stack and Xids, the latter switched on where `xids`."""
    by = "sum by (instance, device, %s) (increase(%s{%s}[$__rate_interval])) > 0"
    return [
        Mark(
            name="Stack changes",
            query=by % ("component", "canaryd_stack_changes_total", selector),
            title="{{component}} changed",
            tags=("component", "instance", "device"),
            color=BLUE,
        ),
        Mark(
            name="Xids",
            query=by % ("xid", "canaryd_xid_errors_total", selector),
            title="Xid {{xid}}",
            tags=("xid", "instance", "device"),
            color=RED,
            enable=xids,
        ),
    ]


# --- Panels -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ask:
    """One query of a panel and how its series are called."""

    query: str
    legend: str = "__auto"


def _target(ask: Ask, ref: str, *, instant: bool, as_table: bool = False) -> prometheus.Dataquery:
    made = prometheus.Dataquery().expr(ask.query).legend_format(ask.legend).ref_id(ref).datasource(SOURCE)
    made = made.instant() if instant else made.range()
    return made.format(PromQueryFormat.TABLE if as_table else PromQueryFormat.TIME_SERIES)


def _refs(number: int) -> list[str]:
    return [chr(ord("A") + n) for n in range(number)]


def number(
    title: str,
    about: str,
    *asks: Ask,
    unit: str = "none",
    thresholds: build.ThresholdsConfig | None = None,
    mappings: Sequence[dashboard.ValueMapping] = (),
    names: bool = False,
    missing: str = "no data",
    decimals: float | None = None,
    links: Sequence[build.DashboardLink] = (),
) -> stat.Panel:
    """Return a panel of one big value per series; with `names` it shows what the series are called instead."""
    mode = common.BigValueTextMode.NAME if names else common.BigValueTextMode.AUTO
    panel = (
        stat.Panel()
        .title(title)
        .description(about)
        .datasource(SOURCE)
        .unit(unit)
        .no_value(missing)
        .color_mode(common.BigValueColorMode.BACKGROUND_SOLID)
        .graph_mode(common.BigValueGraphMode.NONE)
        .justify_mode(common.BigValueJustifyMode.CENTER)
        .text_mode(mode)
        .reduce_options(layout.ReduceDataOptions().calcs(["lastNotNull"]))
        .thresholds(thresholds or steps(QUIET))
        .color_scheme(build.FieldColor().mode(dashboard.FieldColorModeId.THRESHOLDS))
        .mappings(list(mappings))
        .data_links(list(links))
    )
    if decimals is not None:
        panel = panel.decimals(decimals)
    for ref, ask in zip(_refs(len(asks)), asks, strict=True):
        panel = panel.with_target(_target(ask, ref, instant=True))
    return panel


def lines(
    title: str,
    about: str,
    *asks: Ask,
    unit: str = "none",
    least: float | None = None,
    most: float | None = None,
    usually: float | None = None,
    limits: Sequence[tuple[float, str]] = (),
    stacked: bool = False,
    bars: bool = False,
    colors: Mapping[str, str] | None = None,
    links: Sequence[build.DashboardLink] = (),
    decimals: float | None = None,
) -> timeseries.Panel:
    """Return a panel of lines, or bars, over time.

    `limits` are drawn as lines; `colors` are by the series' names; the axis begins at `usually` or at a lower value.
    """
    panel = (
        timeseries.Panel()
        .title(title)
        .description(about)
        .datasource(SOURCE)
        .unit(unit)
        .no_value("nothing in this time range")
        .draw_style(common.GraphDrawStyle.BARS if bars else common.GraphDrawStyle.LINE)
        .line_width(1 if bars or stacked else 2)
        .fill_opacity(70 if bars or stacked else 0)
        .show_points(common.VisibilityMode.AUTO)
        .legend(
            layout.VizLegendOptions()
            .display_mode(common.LegendDisplayMode.LIST)
            .placement(common.LegendPlacement.BOTTOM)
            .show_legend(True)
        )
        .tooltip(layout.VizTooltipOptions().mode(common.TooltipDisplayMode.MULTI).sort(common.SortOrder.DESCENDING))
        .thresholds(steps("transparent" if limits else GREEN, *limits))
        .data_links(list(links))
    )
    if limits:
        style = layout.GraphThresholdsStyleConfig().mode(common.GraphThresholdsStyleMode.DASHED)
        panel = panel.thresholds_style(style)
    if stacked or bars:
        panel = panel.stacking(layout.StackingConfig().mode(common.StackingMode.NORMAL).group("A"))
    if bars:
        # Windows of increase() overlap by a scrape or so; with narrow bars one event would stand in several.
        panel = panel.interval("1m")
    if usually is not None:
        panel = panel.axis_soft_min(usually)
    if least is not None:
        panel = panel.min(least)
    if most is not None:
        panel = panel.max(most)
    if decimals is not None:
        panel = panel.decimals(decimals)
    for name, color in (colors or {}).items():
        fixed = {"mode": "fixed", "fixedColor": color}
        panel = panel.override_by_name(name, [dashboard.DynamicConfigValue(id_val="color", value=fixed)])
    for ref, ask in zip(_refs(len(asks)), asks, strict=True):
        panel = panel.with_target(_target(ask, ref, instant=False))
    return panel


def timeline(
    title: str,
    about: str,
    *asks: Ask,
    mappings: Sequence[dashboard.ValueMapping],
    thresholds: build.ThresholdsConfig,
    links: Sequence[build.DashboardLink] = (),
) -> statetimeline.Panel:
    """Return a panel with a lane for each series, coloured by its value and labelled with the words of `mappings`."""
    panel = (
        statetimeline.Panel()
        .title(title)
        .description(about)
        .datasource(SOURCE)
        .unit("none")
        .no_value("none in this time range")
        .mappings(list(mappings))
        .thresholds(thresholds)
        .color_scheme(build.FieldColor().mode(dashboard.FieldColorModeId.THRESHOLDS))
        .merge_values(True)
        .show_value(common.VisibilityMode.AUTO)
        .align_value(common.TimelineValueAlignment.LEFT)
        .row_height(0.85)
        .fill_opacity(85)
        .line_width(0)
        .per_page(25)
        .legend(
            layout.VizLegendOptions()
            .display_mode(common.LegendDisplayMode.LIST)
            .placement(common.LegendPlacement.BOTTOM)
            .show_legend(False)
        )
        .tooltip(layout.VizTooltipOptions().mode(common.TooltipDisplayMode.SINGLE).sort(common.SortOrder.NONE))
        .data_links(list(links))
    )
    for ref, ask in zip(_refs(len(asks)), asks, strict=True):
        panel = panel.with_target(_target(ask, ref, instant=False))
    return panel


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column of a table."""

    of: str
    """The label, or "Value" ("Value #B" where the table has several queries), that it shows."""
    title: str = ""
    """Default: `of`. Labels that links need (job, instance, device) keep their names."""
    unit: str = ""
    decimals: int | None = None
    mappings: Sequence[dashboard.ValueMapping] = ()
    limits: Sequence[tuple[float, str]] = ()
    """Colours from a value on; below all of them the cell has none."""
    missing: str = ""
    """What stands where there is no value."""
    width: int | None = None
    hidden: bool = False
    """There for links alone."""
    links: Sequence[Properties] = ()

    @property
    def name(self) -> str:
        """What stands above it."""
        return self.title or self.of


def hidden(*labels: str) -> list[Column]:
    """Return columns that only links need."""
    return [Column(of=label, hidden=True) for label in labels]


def _column_properties(column: Column) -> list[dashboard.DynamicConfigValue]:
    properties: dict[str, Any] = {}
    if column.hidden:
        properties["custom.hidden"] = True
    if column.unit:
        properties["unit"] = column.unit
    if column.decimals is not None:
        properties["decimals"] = column.decimals
    if column.missing:
        properties["noValue"] = column.missing
    if column.width is not None:
        properties["custom.width"] = column.width
    if column.links:
        properties["links"] = list(column.links)
    if column.mappings:
        properties["mappings"] = list(column.mappings)
    if column.limits:
        properties["thresholds"] = steps("transparent", *column.limits).build()
    if column.mappings or column.limits:
        properties["custom.cellOptions"] = {"type": "color-background", "mode": "basic"}
    return [dashboard.DynamicConfigValue(id_val=name, value=value) for name, value in properties.items()]


def grid(
    title: str,
    about: str,
    *asks: Ask,
    columns: Sequence[Column],
    sort: str = "",
    descending: bool = True,
    missing: str = "nothing to show",
) -> table.Panel:
    """Return a table of what the queries say now; rows that share their labels are one. Other labels are left out."""
    values = ["Value"] if len(asks) == 1 else [f"Value #{ref}" for ref in _refs(len(asks))]
    shown = [column.of for column in columns]
    if unknown := {c.of for c in columns if c.of.startswith("Value")} ^ set(values):
        raise ValueError(f"{title}: columns and queries differ by {unknown}")
    panel = (
        table.Panel()
        .title(title)
        .description(about)
        .datasource(SOURCE)
        .no_value(missing)
        .align(common.FieldTextAlignment.AUTO)
        .cell_height(common.TableCellHeight.SM)
        .show_header(True)
        .unit("none")
        .color_scheme(build.FieldColor().mode(dashboard.FieldColorModeId.THRESHOLDS))
        .thresholds(steps("text"))
    )
    if len(asks) > 1:
        panel = panel.with_transformation(dashboard.DataTransformerConfig(id_val="merge", options={}))
    only = {"include": {"names": shown}}
    panel = panel.with_transformation(dashboard.DataTransformerConfig(id_val="filterFieldsByName", options=only))
    order = {
        "indexByName": {of: number for number, of in enumerate(shown)},
        "renameByName": {c.of: c.name for c in columns if c.name != c.of},
        "excludeByName": {},
    }
    panel = panel.with_transformation(dashboard.DataTransformerConfig(id_val="organize", options=order))
    if sort:
        panel = panel.sort_by([layout.TableSortByFieldState().display_name(sort).desc(descending)])
    for column in columns:
        if properties := _column_properties(column):
            panel = panel.override_by_name(column.name, properties)
    for ref, ask in zip(_refs(len(asks)), asks, strict=True):
        panel = panel.with_target(_target(ask, ref, instant=True, as_table=True))
    return panel


def words(title: str, about: str, content: str) -> text.Panel:
    """Return a panel of Markdown."""
    return text.Panel().title(title).description(about).mode(TextMode.MARKDOWN).content(content).datasource(SOURCE)


Panel: TypeAlias = stat.Panel | timeseries.Panel | statetimeline.Panel | table.Panel | text.Panel


# --- The page ---------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Page:
    """One dashboard while it is put together."""

    uid: str
    title: str
    about: str
    since: str
    refresh: str
    variables: Sequence[build.QueryVariable]
    marks: Sequence[Mark] = ()
    _content: list[build.Row | Panel] = field(default_factory=list)
    _x: int = 0
    _y: int = 0
    _below: int = 0
    _ids: int = 0
    _row: build.Row | None = None
    """The folded row that panels are put into; None on the open page."""
    _row_y: int = 0

    def row(self, title: str, *, folded: bool = False) -> None:
        """Begin a section; `folded` where many machines have no data for it: a reader opens it."""
        if self._row is not None:
            self._below = self._row_y + 1  # what is folded takes no room; Grafana moves the rest down when it is opened
        place = dashboard.GridPos(x=0, y=self._below, w=24, h=1)
        row = build.Row(title).grid_pos(place).id(self._next_id())
        self._content.append(row.collapsed(True) if folded else row)
        self._row, self._row_y = row if folded else None, self._below
        self._x, self._y = 0, self._below + 1
        self._below = self._y

    def add(self, *panels: Panel, width: int, height: int) -> None:
        """Place panels, one upon the other, to the right of the last ones, or below where that line is full.

        `width` in 24ths of the page, `height` of each in units of 38 px.
        """
        if self._x + width > 24:
            self._x, self._y = 0, self._below
        for number_, panel in enumerate(panels):
            place = dashboard.GridPos(x=self._x, y=self._y + number_ * height, w=width, h=height)
            placed = panel.grid_pos(place).id(self._next_id())
            if self._row is None:
                self._content.append(placed)
            else:
                self._row.with_panel(placed)
        self._x += width
        self._below = max(self._below, self._y + len(panels) * height)

    def _next_id(self) -> int:
        self._ids += 1
        return self._ids

    def write(self) -> dashboard.Dashboard:
        """Return it as Grafana's model."""
        links = [
            build.DashboardLink("canaryd")
            .type(dashboard.DashboardLinkType.DASHBOARDS)
            .tags(["canaryd"])
            .icon("external link")
            .tooltip("The other dashboards, with the same time range and choices")
            .include_vars(True)
            .keep_time(True)
        ]
        page = (
            build.Dashboard(self.title)
            .uid(self.uid)
            .description(self.about)
            .tags(["canaryd"])
            .readonly()
            .time(self.since, "now")
            .refresh(self.refresh)
            .timezone("browser")
            .tooltip(dashboard.DashboardCursorSync.CROSSHAIR)
            .links(links)
            .variables([datasource(), *self.variables])
        )
        for content in self._content:
            page = page.with_row(content) if isinstance(content, build.Row) else page.with_panel(content)
        made = page.build()
        made.annotations = dashboard.AnnotationContainer(list_val=[mark.write() for mark in self.marks])
        return made
