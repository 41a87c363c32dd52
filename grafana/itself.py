"""The dashboard *Itself*: whether canaryd works on every node, and what it costs."""

from __future__ import annotations

from grafana.parts import (
    GREEN,
    GREY,
    ITSELF,
    ORANGE,
    QUIET,
    RED,
    YELLOW,
    Ask,
    Column,
    Page,
    grid,
    hidden,
    instance,
    job,
    lines,
    named,
    neglect,
    number,
    row_links,
    series_links,
    steps,
    timeline,
    yes_no,
)

NODES = 'job=~"$job", instance=~"$instance"'
BY = "job, instance"
EACH = {"width": 8, "height": 8}


def page() -> Page:
    """Put the dashboard together."""
    made = Page(
        uid=ITSELF,
        title="canaryd / Itself",
        about="canaryd's own health on every node: is it scraped, does it store, do workers end, what does it cost.",
        since="now-6h",
        refresh="1m",
        variables=[job(), instance(many=True)],
    )
    _health(made)
    _work(made)
    _cost(made)
    return made


def _health(made: Page) -> None:
    made.row("Does canaryd work?")
    counts = (
        ("Silent", "Nodes whose canaryd did not answer the last scrape.", "sum(up{%s} == bool 0)", RED),
        (
            "Cannot store",
            "Nodes that cannot store runs: a full disk, or no permission. Nothing is lost yet.",
            "sum(canaryd_store_problem{%s})",
            RED,
        ),
        (
            "Configuration refused",
            "Nodes that rejected a new configuration; the previous one stays in force. Their log names the mistakes.",
            "sum(canaryd_config_last_reload_successful{%s} == bool 0)",
            ORANGE,
        ),
        (
            "Kernel log not readable",
            "Nodes that cannot read the kernel log, so that they miss Xids and machine checks.",
            "sum(canaryd_kernel_log_readable{%s} == bool 0)",
            ORANGE,
        ),
        (
            "Processes that cannot be killed",
            "Test processes that SIGKILL did not end, since canaryd started: a driver hangs.",
            "sum(canaryd_workers_abandoned_total{%s})",
            RED,
        ),
        (
            "Released",
            "Nodes where canaryd release is in force, so that nothing is tested.",
            "sum(canaryd_released{%s})",
            YELLOW,
        ),
    )
    for title, about, query, color in counts:
        made.add(
            number(title, about, Ask(query % NODES, "nodes"), thresholds=steps(QUIET, (1, color)), missing="no node"),
            width=4,
            height=4,
        )
    made.add(
        grid(
            "Nodes",
            "Each canaryd: version, when it started, what it uses, and what is wrong with it.",
            Ask(f"canaryd_build_info{{{NODES}}}"),
            Ask(f"1000 * max by ({BY}) (process_start_time_seconds{{{NODES}}})"),
            Ask(f"max by ({BY}) (process_resident_memory_bytes{{{NODES}}})"),
            Ask(f"sum by ({BY}) (rate(process_cpu_seconds_total{{{NODES}}}[$__rate_interval]))"),
            Ask(f"max by ({BY}) (scrape_samples_scraped{{{NODES}}})"),
            Ask(f"max by ({BY}) (scrape_duration_seconds{{{NODES}}})"),
            Ask(f"max by ({BY}) (canaryd_store_problem{{{NODES}}})"),
            Ask(f"max by ({BY}) (canaryd_config_last_reload_successful{{{NODES}}})"),
            Ask(f"max by ({BY}) (canaryd_kernel_log_readable{{{NODES}}})"),
            Ask(f"max by ({BY}) (canaryd_released{{{NODES}}})"),
            Ask(f"max by ({BY}) ({neglect(NODES)})"),
            columns=[
                Column(of="instance", links=row_links(device=False), width=180),
                Column(of="version", width=90),
                Column(of="Value #B", title="started", unit="dateTimeFromNow", width=130),
                Column(of="Value #C", title="memory", unit="bytes", width=95),
                Column(of="Value #D", title="CPU, cores", unit="none", decimals=3, width=95),
                Column(of="Value #E", title="series", unit="none", width=80),
                Column(of="Value #F", title="scrape", unit="s", decimals=1, width=85),
                Column(of="Value #G", title="store", mappings=yes_no(RED, GREEN, ("problem", "fine")), width=85),
                Column(
                    of="Value #H", title="configuration", mappings=yes_no(GREEN, ORANGE, ("read", "refused")), width=110
                ),
                Column(
                    of="Value #I", title="kernel log", mappings=yes_no(GREEN, ORANGE, ("read", "not read")), width=95
                ),
                Column(of="Value #J", title="released", mappings=yes_no(YELLOW, QUIET), width=85),
                Column(
                    of="Value #K", title="oldest, periods", unit="none", decimals=1, limits=((2, YELLOW), (3, ORANGE))
                ),
                *hidden("job", "Value #A"),
            ],
            sort="instance",
            descending=False,
            missing="no canaryd answers",
        ),
        width=24,
        height=8,
    )
    made.add(
        timeline(
            "Nodes that do not answer, over time",
            "Whether canaryd answered each scrape, node by node: those that missed at least one.",
            Ask(f"up{{{NODES}}} and on ({BY}) (min_over_time(up{{{NODES}}}[$__range] @ end()) == 0)", "{{instance}}"),
            mappings=yes_no(GREEN, RED, ("answers", "silent")),
            thresholds=steps(RED, (1, GREEN)),
            links=series_links(device=False),
        ),
        width=12,
        height=7,
    )
    made.add(
        timeline(
            "Problems over time",
            "What keeps canaryd from its work: the store, the configuration, the kernel log, a release, held drivers.",
            Ask(f"canaryd_store_problem{{{NODES}}} > 0", "{{instance}} cannot store"),
            Ask(
                f"canaryd_config_last_reload_successful{{{NODES}}} == bool 0 > 0", "{{instance}} configuration refused"
            ),
            Ask(f"canaryd_kernel_log_readable{{{NODES}}} == bool 0 > 0", "{{instance}} kernel log not readable"),
            Ask(f"canaryd_released{{{NODES}}} > 0", "{{instance}} released"),
            Ask(f"canaryd_device_handles_held{{{NODES}}} > 0", "{{instance}} holds a driver"),
            mappings=yes_no(ORANGE, GREEN),
            thresholds=steps(GREEN, (1, ORANGE)),
            links=series_links(device=False),
        ),
        width=12,
        height=7,
    )


def _work(made: Page) -> None:
    made.row("What canaryd does")
    made.add(
        lines(
            "Runs and polls by outcome",
            "Workers that ended, per second, by outcome.",
            Ask(f"sum by (outcome) (rate(canaryd_probe_runs_total{{{NODES}}}[$__rate_interval])) > 0", "{{outcome}}"),
            unit="ops",
            stacked=True,
            least=0,
            colors={"completed": GREEN, "skipped": GREY, "timed_out": ORANGE, "crashed": RED, "errored": YELLOW},
        ),
        **EACH,
    )
    made.add(
        lines(
            "Duration of runs",
            "Wall time of the newest runs and polls of each probe, the slowest device; the worker's start is excluded.",
            Ask(f"max by (probe) (canaryd_probe_duration_seconds{{{NODES}}})", "{{probe}}"),
            unit="s",
            least=0,
        ),
        **EACH,
    )
    made.add(
        lines(
            "Missing readings",
            "By telemetry probe. A rise means that a driver no longer reports something.",
            Ask(f"sum by (probe) (canaryd_readings_absent{{{NODES}}})", "{{probe}}"),
            least=0,
            decimals=0,
        ),
        **EACH,
    )
    made.add(
        lines(
            "Processes that cannot be killed, log records lost",
            "Workers that survived SIGKILL, and kernel log records that were missed. Both should stay at 0.",
            Ask(f"sum(increase(canaryd_workers_abandoned_total{{{NODES}}}[$__rate_interval]))", "workers given up"),
            Ask(f"sum(increase(canaryd_kernel_log_lost_records_total{{{NODES}}}[$__rate_interval]))", "records lost"),
            least=0,
            decimals=0,
            colors={"workers given up": RED, "records lost": ORANGE},
        ),
        **EACH,
    )
    made.add(
        lines(
            "Starts and reloads",
            "How often canaryd started and loaded a configuration, by node.",
            Ask(f"changes(process_start_time_seconds{{{NODES}}}[$__rate_interval]) > 0", "{{instance}} started"),
            Ask(
                f"changes(canaryd_config_last_reload_success_timestamp_seconds{{{NODES}}}[$__rate_interval]) > 0",
                "{{instance}} reloaded",
            ),
            bars=True,
            least=0,
            decimals=0,
            links=series_links(device=False),
        ),
        **EACH,
    )


def _cost(made: Page) -> None:
    made.row("What canaryd costs", folded=True)
    for title, about, query, unit in (
        (
            "Memory",
            "Resident memory of the daemon; its workers come on top while they run.",
            "topk(20, process_resident_memory_bytes{%s})",
            "bytes",
        ),
        (
            "Processor",
            "Processor time of the daemon, in cores, without its workers.",
            "topk(20, rate(process_cpu_seconds_total{%s}[$__rate_interval]))",
            "none",
        ),
        ("Scrape", "How long a scrape took.", "topk(20, scrape_duration_seconds{%s})", "s"),
    ):
        made.add(
            lines(
                title,
                f"{about} The 20 largest.",
                Ask(query % NODES, "{{instance}}"),
                unit=unit,
                least=0,
                links=series_links(device=False),
            ),
            **EACH,
        )
    made.add(
        lines(
            "Device time",
            "Part of a device's time that canaryd's workers take, retests included, and the share "
            "that rounds may take. The 20 largest.",
            Ask(
                named(
                    f"topk(20, sum by ({BY}, device) (rate(canaryd_budget_spent_seconds_total{{{NODES}}}"
                    "[$__rate_interval])))",
                    NODES,
                ),
                "{{instance}} {{name}}",
            ),
            Ask(f"max(canaryd_budget_share_ratio{{{NODES}}})", "share"),
            unit="percentunit",
            least=0,
        ),
        **EACH,
    )
    made.add(
        lines(
            "Postponed tests",
            "Tests that were due and had to wait, by reason; docs/budget.md explains the reasons.",
            Ask(f"sum by (reason) (increase(canaryd_budget_skipped_total{{{NODES}}}[$__rate_interval]))", "{{reason}}"),
            least=0,
        ),
        **EACH,
    )
    made.add(
        grid(
            "Versions",
            "Versions of canaryd, and how many nodes run each.",
            Ask(f"count by (version) (canaryd_build_info{{{NODES}}})"),
            columns=[Column(of="version"), Column(of="Value", title="nodes", unit="none")],
            sort="nodes",
            missing="no canaryd answers",
        ),
        **EACH,
    )
