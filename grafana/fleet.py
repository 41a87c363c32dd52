"""The dashboard *Fleet*: is anything wrong, where, and since when."""

from __future__ import annotations

from grafana.parts import (
    CAUSE_WORDS,
    FLEET,
    GREEN,
    ORANGE,
    QUIET,
    RANK_STEPS,
    RANKS,
    RED,
    STATES,
    YELLOW,
    Ask,
    Column,
    Page,
    grid,
    hidden,
    instance,
    job,
    lanes,
    lines,
    marks,
    named,
    neglect,
    number,
    ranked,
    row_links,
    series_links,
    spoken_rules,
    standing,
    steps,
    timeline,
    variable,
    yes_no,
)

NODES = 'job=~"$job", instance=~"$instance"'
DEVICES = f'{NODES}, model=~"$model"'
RULES_MISSING = "rules not loaded"
"""Shown where series of deploy/prometheus/canaryd-fleet.rules.yml are missing."""


def page() -> Page:
    """Put the dashboard together."""
    made = Page(
        uid=FLEET,
        title="canaryd / Fleet",
        about="Is anything wrong, where, and since when: every node's verdicts, the vote, stacks and age of evidence.",
        since="now-24h",
        refresh="1m",
        variables=[
            job(),
            instance(many=True),
            variable(
                "model",
                "Model",
                'label_values(canaryd_device_state{job=~"$job", instance=~"$instance"}, model)',
                many=True,
            ),
        ],
        marks=marks(DEVICES, xids=False),
    )
    _now(made)
    _since(made)
    _vote(made)
    _stacks(made)
    _course(made)
    return made


def _now(made: Page) -> None:
    made.row("Is anything wrong?")
    told = {
        "faulty": "wrong results, confirmed: take them out of service and open the device's page",
        "suspect": "wrong results that are not confirmed yet, or a fault that the device reported",
        "unknown": "no valid test result: no evidence, stale evidence, or not reachable",
        "degraded": "results are correct; the part is worn, slow or throttled",
        "healthy": "fresh tests passed and nothing speaks against them",
    }
    for state in reversed(STATES):
        color = GREEN if state == "healthy" else QUIET
        made.add(
            number(
                state.capitalize(),
                f"Devices that are {state}: {told[state]}.",
                Ask(f'sum(canaryd_device_state{{{DEVICES}, state="{state}"}})', state),
                thresholds=steps(color, (1, STATES[state])),
            ),
            width=3,
            height=4,
        )
    made.add(
        number(
            "Silent nodes",
            "Nodes whose canaryd did not answer the last scrape. Their devices are not watched.",
            Ask(f"sum(up{{{NODES}}} == bool 0)", "silent"),
            thresholds=steps(QUIET, (1, RED)),
        ),
        width=3,
        height=4,
    )
    made.add(
        number(
            "Vanished devices",
            "Devices that a node had and no longer finds.",
            Ask(f"sum(canaryd_device_present{{{DEVICES}}} == bool 0)", "vanished"),
            thresholds=steps(QUIET, (1, RED)),
        ),
        width=3,
        height=4,
    )
    made.add(
        number(
            "Oldest result",
            "How long ago the latest probe last passed, in its own periods; suspect and faulty "
            "devices are left out. From three periods on, a device counts as unknown.",
            Ask(f"max({neglect(DEVICES)})", "periods"),
            decimals=1,
            thresholds=steps(GREEN, (2, YELLOW), (3, ORANGE)),
        ),
        width=3,
        height=4,
    )


def _since(made: Page) -> None:
    device = "job, instance, device"
    healthy = f'canaryd_device_state{{{DEVICES}, state="healthy"}}'
    wrong = (
        f"topk(500, {ranked(DEVICES)} > 0) "
        f"* on ({device}) group_left (name) canaryd_device_info{{{DEVICES}}} "
        f"* on ({device}) group_left (cause) (canaryd_device_cause{{{DEVICES}}} == 1)"
    )
    since = f"1000 * max by ({device}) (canaryd_device_state_since_timestamp_seconds{{{DEVICES}}})"
    made.add(
        grid(
            "What is wrong now",
            "Devices that are not healthy, worst first, with the cause and since when they have been in that "
            "state. "
            "Click a node or a device for its page.",
            Ask(wrong),
            Ask(f"{since} and on ({device}) ({healthy} == 0)"),
            Ask(f"max by ({device}) (canaryd_device_acknowledged{{{DEVICES}}}) and on ({device}) ({healthy} == 0)"),
            columns=[
                Column(of="Value #A", title="state", mappings=RANKS, width=100),
                Column(of="cause", mappings=CAUSE_WORDS, width=120),
                Column(of="instance", links=row_links(device=False), width=170),
                Column(of="name", title="device name", links=row_links(device=True), width=110),
                Column(of="model"),
                Column(of="Value #B", title="since", unit="dateTimeFromNow", width=130),
                Column(
                    of="Value #C", title="acknowledged", mappings=yes_no(STATES["unknown"], "transparent"), width=115
                ),
                *hidden("job", "device"),
            ],
            sort="state",
            missing="no device that answers is unhealthy",
        ),
        width=15,
        height=9,
    )
    made.add(
        grid(
            "What speaks against devices",
            "Findings by rule, and on how many devices and nodes. The rules are "
            "explained in docs/judgement.md and docs/telemetry.md.",
            Ask(f"max by (rule, state, cause) ({spoken_rules(DEVICES)}) > 0"),
            Ask(f'count by (rule, state, cause) (canaryd_finding{{{DEVICES}, state!="healthy"}})'),
            Ask(
                "count by (rule, state, cause) "
                f'(count by (rule, state, cause, job, instance) (canaryd_finding{{{DEVICES}, state!="healthy"}}))'
            ),
            columns=[
                Column(of="Value #A", title="weight", mappings=RANKS, width=100),
                Column(of="cause", mappings=CAUSE_WORDS, width=120),
                Column(of="rule"),
                Column(of="Value #B", title="devices", unit="none", width=75),
                Column(of="Value #C", title="nodes", unit="none", width=65),
                *hidden("state"),
            ],
            sort="weight",
            missing="no rule speaks",
        ),
        width=9,
        height=9,
    )
    made.add(
        timeline(
            "Devices that were not healthy in this time range",
            "When, and in which state. A gap is a time in which the device was healthy; the lane of a node that "
            "fell silent continues. From the recorded series of canaryd.rules.yml.",
            Ask(lanes(standing(DEVICES), DEVICES), "{{instance}} {{name}}"),
            mappings=RANKS,
            thresholds=steps(STATES["healthy"], *RANK_STEPS),
            links=series_links(device=True),
        ),
        width=24,
        height=9,
    )


def _vote(made: Page) -> None:
    made.row("Identical devices with identical software must compute identical bits")
    group = "model, probe, stack"
    made.add(
        number(
            "Devices that differ",
            "Devices whose results differ from most identical devices with the same software. Probably "
            "hardware: open the device's page. From the recorded series of canaryd-fleet.rules.yml.",
            Ask(
                f"count(group by (job, instance, device) (canaryd:fleet_outlier{{{DEVICES}}})) "
                "or 0 * count(canaryd:fleet_voters)",
                "outvoted",
            ),
            missing=RULES_MISSING,
            thresholds=steps(QUIET, (1, RED)),
        ),
        width=4,
        height=8,
    )
    made.add(
        grid(
            "Which device differs from identical ones",
            "Which device differs, in which probe, on which stack. The vote needs at least three voters, more than "
            "half "
            "of them, on more than half of the nodes: two devices, or two nodes, never outvote each other.",
            Ask(named(f"canaryd:fleet_outlier{{{DEVICES}}}", DEVICES)),
            columns=[
                Column(of="instance", links=row_links(device=False), width=170),
                Column(of="name", title="device name", links=row_links(device=True), width=110),
                Column(of="model", width=140),
                Column(of="probe", width=160),
                Column(of="stack", width=130),
                Column(of="fingerprint"),
                *hidden("job", "device", "Value"),
            ],
            missing="nobody is outvoted",
        ),
        width=20,
        height=8,
    )
    made.add(
        grid(
            "Groups of identical devices",
            "Every group that votes: how many devices and nodes, how many different values, and how large the largest "
            "share is. Healthy identical devices give one value. Devices that are suspect or faulty do not vote.",
            Ask('canaryd:fleet_voters{model=~"$model"}'),
            Ask('canaryd:fleet_nodes{model=~"$model"}'),
            Ask(f'count by ({group}) (canaryd:fleet_votes{{model=~"$model"}})'),
            Ask(
                f'max by ({group}) (canaryd:fleet_votes{{model=~"$model"}}) '
                f'/ on ({group}) canaryd:fleet_voters{{model=~"$model"}}'
            ),
            columns=[
                Column(of="model"),
                Column(of="probe"),
                Column(of="stack", width=130),
                Column(of="Value #A", title="devices", unit="none", width=80),
                Column(of="Value #B", title="nodes", unit="none", width=80),
                Column(of="Value #C", title="values", unit="none", width=80, limits=((2, ORANGE),)),
                Column(of="Value #D", title="largest share", unit="percentunit", width=110),
            ],
            sort="values",
            missing=RULES_MISSING,
        ),
        width=14,
        height=8,
    )
    made.add(
        grid(
            "Software versions that differ",
            "Probes whose results agree within a software version, but differ between versions: the cause is software, "
            "and no device is accused. For recorded kernels another library may give other bits.",
            Ask('canaryd:fleet_stacks_differ{model=~"$model"}'),
            columns=[
                Column(of="model"),
                Column(of="probe"),
                Column(of="Value", title="different values", unit="none"),
            ],
            missing="no stacks differ",
        ),
        grid(
            "Results shared by a minority of nodes",
            "Broken parts rarely fail alike: one differing value on several nodes is software, or an unequal upgrade, "
            "until "
            "shown otherwise.",
            Ask('canaryd:fleet_split{model=~"$model"}'),
            columns=[
                Column(of="model"),
                Column(of="probe"),
                Column(of="stack", width=120),
                Column(of="fingerprint"),
                Column(of="Value", title="nodes", unit="none", width=70),
            ],
            missing="no nodes share an odd value",
        ),
        width=10,
        height=4,
    )


def _stacks(made: Page) -> None:
    made.row("Software and age of results")
    parts = "model, stack, torch, cuda, cudnn, driver, kernel"
    info = f"canaryd_stack_info{{{DEVICES}}}"
    made.add(
        grid(
            "Software versions",
            "Which software runs on how many devices and nodes. A stack that few nodes have was not upgraded, or is "
            "new.",
            Ask(f"count by ({parts}) ({info})"),
            Ask(f"count by ({parts}) (count by ({parts}, job, instance) ({info}))"),
            columns=[
                Column(of="model"),
                Column(of="stack", width=120),
                Column(of="torch", width=75),
                Column(of="cuda", width=70),
                Column(of="cudnn", width=75),
                Column(of="driver", width=100),
                Column(of="kernel"),
                Column(of="Value #A", title="devices", unit="none", width=75),
                Column(of="Value #B", title="nodes", unit="none", width=65),
            ],
            sort="devices",
            missing="no probe has run yet",
        ),
        width=14,
        height=8,
    )
    made.add(
        grid(
            "Oldest test results",
            "The 20 probes that passed longest ago, in their own periods, on devices that are neither "
            "suspect "
            "nor faulty. From three periods on a device is unknown.",
            Ask(
                f"topk(20, {neglect(DEVICES)}) * on (job, instance, device) group_left (name) "
                f"canaryd_device_info{{{DEVICES}}}"
            ),
            columns=[
                Column(of="instance", links=row_links(device=False), width=150),
                Column(of="name", title="device name", links=row_links(device=True), width=110),
                Column(of="probe"),
                Column(
                    of="Value", title="periods", unit="none", decimals=1, limits=((2, YELLOW), (3, ORANGE)), width=80
                ),
                *hidden("job", "device"),
            ],
            sort="periods",
            missing="nothing has succeeded yet",
        ),
        width=10,
        height=8,
    )


def _course(made: Page) -> None:
    made.row("Over time")
    made.add(
        lines(
            "Devices by state",
            "How many devices are in each state. A dip of the total means silent nodes.",
            *(Ask(f'sum(canaryd_device_state{{{DEVICES}, state="{state}"}})', state) for state in STATES),
            stacked=True,
            least=0,
            decimals=0,
            colors=STATES,
        ),
        width=8,
        height=8,
    )
    made.add(
        lines(
            "Wrong results by test",
            "Comparisons that found a wrong bit, in the whole fleet. Look at every one.",
            Ask(
                f"sum by (probe) (increase(canaryd_probe_mismatches_total{{{DEVICES}}}[$__rate_interval])) > 0",
                "{{probe}}",
            ),
            bars=True,
            least=0,
            decimals=0,
        ),
        width=8,
        height=8,
    )
    made.add(
        lines(
            "Runs that did not complete",
            "Runs that did not complete, by outcome. They say nothing about results, except that none were seen.",
            Ask(
                "sum by (outcome) (increase("
                f'canaryd_probe_runs_total{{{DEVICES}, outcome!="completed"}}[$__rate_interval])) > 0',
                "{{outcome}}",
            ),
            bars=True,
            least=0,
            decimals=0,
        ),
        width=8,
        height=8,
    )
