"""The dashboard *Device*: everything that a decision about one part needs."""

from __future__ import annotations

from grafana.parts import (
    CAUSE_WORDS,
    DEVICE,
    GREEN,
    GREY,
    HELD,
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
    age_in_periods,
    device,
    grid,
    hidden,
    instance,
    job,
    lines,
    marks,
    named,
    number,
    ranked,
    spoken_rules,
    steps,
    timeline,
    words,
    yes_no,
)

NODES = 'job=~"$job", instance=~"$instance"'
THIS = f'{NODES}, device=~"$device"'
IDENTITY = "job, instance, device"
LIKE_THIS = f"and on (job, instance, model) canaryd_device_present{{{THIS}}}"
"""Keeps of a node's devices those of the same model."""

WHAT_TO_DO = """
**On the node**, before the part is drained, reset or moved:

    canaryd status
    canaryd report $device -o .
    canaryd history $device

`report` writes the dossier: what was wrong, how often, with which data, and a script that repeats it. Only
**faulty, hardware** with a strong identity is a case for the vendor; docs/dossier.md says what to send.

Cause: `software` is for those who build the software, `environment` for cooling and power, `undetermined` needs another
device of the same model with the same software. Known already? `canaryd ack $device --reason TEXT`. Part exchanged?
`canaryd ack $device --replaced`.
"""
EACH = {"width": 8, "height": 8}
HALF = {"width": 12, "height": 8}


def page() -> Page:
    """Put the dashboard together."""
    made = Page(
        uid=DEVICE,
        title="canaryd / Device",
        about="One device, for the decision whether it goes back: verdict, evidence, siblings, wear, surroundings.",
        since="now-7d",
        refresh="1m",
        variables=[job(), instance(many=False), device(many=False)],
        marks=marks(THIS, xids=True),
    )
    _verdict(made)
    _evidence(made)
    _siblings(made)
    _wear(made)
    _driver(made)
    _surroundings(made)
    _drills(made)
    return made


def _verdict(made: Page) -> None:
    made.row("Verdict")
    made.add(
        number(
            "State",
            "Can you trust this device's results?",
            Ask(ranked(THIS), "state"),
            mappings=RANKS,
            thresholds=steps(STATES["healthy"], *RANK_STEPS),
        ),
        number(
            "Cause",
            "The cause. Only hardware is a case for the vendor.",
            Ask(f"canaryd_device_cause{{{THIS}}} == 1", "{{cause}}"),
            names=True,
        ),
        width=4,
        height=4,
    )
    made.add(
        number(
            "Identity",
            "Strong: the uuid or serial number names the physical part. Weak: it names an installation, as of a "
            "virtual "
            "machine's processor, and nothing here is evidence about a part.",
            Ask(f"canaryd_device_info{{{THIS}}}", "{{identity}}"),
            names=True,
        ),
        number(
            "Acknowledged",
            "Whether an operator has acknowledged the fault. It changes no verdict.",
            Ask(f"canaryd_device_acknowledged{{{THIS}}}", "acknowledged"),
            mappings=yes_no(STATES["unknown"], QUIET),
        ),
        width=4,
        height=4,
    )
    made.add(
        number(
            "Found",
            "Whether the device is there. A vanished device keeps its verdict; its other series end.",
            Ask(f"canaryd_device_present{{{THIS}}}", "found"),
            mappings=yes_no(GREEN, RED, ("found", "vanished")),
        ),
        number(
            "Driver asks for",
            "What the driver advises to recover the device, if it does.",
            Ask(f"canaryd_recovery_action{{{THIS}}}", "{{action}}"),
            names=True,
            missing="not told",
        ),
        width=4,
        height=4,
    )
    made.add(words("What to do", "Commands for this device. Run them on its node.", WHAT_TO_DO), width=12, height=8)
    made.add(
        grid(
            "Identity of the part",
            "What the vendor asks for: serial number, bus address, name.",
            Ask(f"canaryd_device_info{{{THIS}}}"),
            columns=[
                Column(of="name", width=80),
                Column(of="model", width=140),
                Column(of="serial", width=140),
                Column(of="bus_id", title="bus address", width=140),
                Column(of="device", title="uuid"),
                Column(of="parent"),
                *hidden("Value"),
            ],
            missing="no such device",
        ),
        width=12,
        height=4,
    )
    made.add(
        grid(
            "Its software",
            "The software of the newest runs; only results with equal software are comparable.",
            Ask(f"canaryd_stack_info{{{THIS}}}"),
            columns=[
                Column(of="stack", width=120),
                Column(of="torch", width=75),
                Column(of="cuda", width=70),
                Column(of="cudnn", width=75),
                Column(of="driver", width=110),
                Column(of="blas", width=75),
                Column(of="kernel"),
                *hidden("Value"),
            ],
            missing="no probe has run yet",
        ),
        width=12,
        height=4,
    )
    made.add(
        grid(
            "Findings",
            "The findings in force, and the severity of each; healthy is a note.",
            Ask(spoken_rules(THIS)),
            columns=[
                Column(of="Value", title="weight", mappings=RANKS, width=110),
                Column(of="cause", mappings=CAUSE_WORDS, width=130),
                Column(of="rule"),
            ],
            sort="weight",
            missing="no rule speaks",
        ),
        width=8,
        height=8,
    )
    made.add(
        timeline(
            "Verdict and findings over time",
            "The verdict, and below it each finding while it was in force.",
            Ask(ranked(THIS), "verdict"),
            Ask(f"max by (rule) ({spoken_rules(THIS)})", "{{rule}}"),
            mappings=RANKS,
            thresholds=steps(STATES["healthy"], *RANK_STEPS),
        ),
        width=16,
        height=8,
    )


def _evidence(made: Page) -> None:
    made.row("Evidence")
    by = "by (probe)"
    made.add(
        grid(
            "Probes",
            "What each probe has found on this device, ever (the counters survive restarts), and how fresh it is. "
            "Ruled "
            "out: a rate of wrong results above this one would have shown.",
            Ask(f"sum {by} (canaryd_probe_runs_total{{{THIS}}})"),
            Ask(f'sum {by} (canaryd_probe_runs_total{{{THIS}, outcome!="completed"}})'),
            Ask(f"sum {by} (canaryd_probe_trials_total{{{THIS}}})"),
            Ask(f"sum {by} (canaryd_probe_mismatches_total{{{THIS}}})"),
            Ask(f"max {by} (canaryd_fault_rate_upper_bound{{{THIS}}})"),
            Ask(f"1000 * max {by} (canaryd_probe_last_success_timestamp_seconds{{{THIS}}})"),
            Ask(f"max {by} ({age_in_periods(THIS)})"),
            Ask(f"max {by} (canaryd_probe_duration_seconds{{{THIS}}})"),
            columns=[
                Column(of="probe"),
                Column(of="Value #A", title="runs", unit="none", width=80),
                Column(of="Value #B", title="not completed", unit="none", limits=((1, YELLOW),), width=110),
                Column(of="Value #C", title="results compared", unit="none", width=130),
                Column(of="Value #D", title="mismatches", unit="none", limits=((1, RED),), width=100),
                Column(of="Value #E", title="ruled out above", unit="percentunit", width=120),
                Column(of="Value #F", title="last success", unit="dateTimeFromNow", width=140),
                Column(
                    of="Value #G",
                    title="age in periods",
                    unit="none",
                    decimals=1,
                    limits=((2, YELLOW), (3, ORANGE)),
                    width=115,
                ),
                Column(of="Value #H", title="duration", unit="s", decimals=2, width=90),
            ],
            sort="mismatches",
            missing="no probe is planned",
        ),
        width=14,
        height=8,
    )
    made.add(
        grid(
            "Comparison with the fleet",
            "The fingerprint of each probe's results, and whether the fleet outvotes it. Equal devices on equal "
            "stacks must "
            "share it. Needs canaryd-fleet.rules.yml for all but the first columns.",
            Ask(f"canaryd_golden_fingerprint{{{THIS}}}"),
            Ask(f"max by (probe, stack) (canaryd:fleet_outlier{{{THIS}}})"),
            Ask(
                "max by (probe, stack) (canaryd:fleet_voters "
                f"and on (model, probe, stack) canaryd_golden_fingerprint{{{THIS}}})"
            ),
            columns=[
                Column(of="probe"),
                Column(of="stack", width=120),
                Column(of="Value #A", title="fingerprint", unit="none", decimals=0, width=150),
                Column(of="Value #B", title="outvoted", mappings=yes_no(RED), missing="no", width=85),
                Column(of="Value #C", title="voters", unit="none", width=70),
            ],
            missing="no exact probe has run yet",
        ),
        width=10,
        height=8,
    )
    made.add(
        lines(
            "Wrong results over time",
            "Comparisons that found a wrong bit, by probe.",
            Ask(f"increase(canaryd_probe_mismatches_total{{{THIS}}}[$__rate_interval])", "{{probe}}"),
            bars=True,
            least=0,
            decimals=0,
        ),
        **EACH,
    )


def _siblings(made: Page) -> None:
    made.row("Compared with its siblings: devices of the same model on this node", folded=True)
    made.add(
        lines(
            "Wrong results of all siblings",
            "Mismatches so far. One line that rises alone points to the part; all together point to software, or to "
            "the "
            "host.",
            Ask(
                named(
                    f"sum by (job, instance, device, model) (canaryd_probe_mismatches_total{{{NODES}}}) {LIKE_THIS}",
                    NODES,
                ),
                "{{name}}",
            ),
            least=0,
            decimals=0,
        ),
        **EACH,
    )
    made.add(
        lines(
            "Time of kernels, over the siblings' median",
            "Time of one call on this device over the median of its siblings (itself included). 1 is like the others.",
            Ask(
                f"canaryd_kernel_seconds{{{THIS}}} / on (job, instance, model, kind) group_left () "
                f"quantile by (job, instance, model, kind) (0.5, canaryd_kernel_seconds{{{NODES}}})",
                "{{kind}}",
            ),
            limits=((1.25, YELLOW),),
            least=0,
        ),
        **EACH,
    )
    made.add(
        lines(
            "Change of recorded results, over tolerance",
            "Distance of recordings from the nearest known ones, over the tolerance, of this device and of its "
            "farthest "
            "sibling. A bit-stable case that gives other bits has no finite ratio; then recorded cases show unknown "
            "bits.",
            Ask(f"canaryd_drift_ratio{{{THIS}}}", "{{probe}} {{reading}}"),
            Ask(f'max(canaryd_drift_ratio{{{NODES}, device!~"$device"}})', "farthest sibling"),
            limits=((1, ORANGE),),
            least=0,
        ),
        **EACH,
    )
    made.add(
        lines(
            "Error of kernels, over its bound",
            "Largest error of a recorded kernel's float32 result over its bound. Above 1 it is wrong.",
            Ask(f"canaryd_recorded_error_ratio{{{THIS}}}", "{{kind}}"),
            least=0,
            limits=((1, RED),),
        ),
        **EACH,
    )


def _wear(made: Page) -> None:
    made.row("Memory errors that the device counts itself", folded=True)
    made.add(
        number(
            "SRAM over limit",
            "Whether the device reports that its SRAM errors exceed the vendor's threshold for replacement.",
            Ask(f"canaryd_ecc_sram_threshold_exceeded{{{THIS}}}", "exceeded"),
            mappings=yes_no(RED),
            missing="not told",
        ),
        number(
            "Bad row, no spare",
            "Whether a bad memory row could not be replaced by a spare one. This alone is a reason for an RMA.",
            Ask(f"canaryd_row_remap_failed{{{THIS}}}", "failed"),
            mappings=yes_no(RED),
            missing="not told",
        ),
        width=4,
        height=4,
    )
    made.add(
        number(
            "Reset needed",
            "Whether the next reset will replace a bad memory row.",
            Ask(f"canaryd_row_remap_pending{{{THIS}}}", "pending"),
            mappings=yes_no(YELLOW),
            missing="not told",
        ),
        number(
            "Error correction",
            "Whether the memory's error correction is on.",
            Ask(f'canaryd_ecc_enabled{{{THIS}, when="current"}}', "ECC"),
            mappings=yes_no(GREEN, RED, ("on", "off")),
            missing="not told",
        ),
        width=4,
        height=4,
    )
    made.add(
        grid(
            "Memory errors",
            "Since the driver was loaded, and over the device's life.",
            Ask(f"sum by (kind, location) (canaryd_ecc_errors_total{{{THIS}}})"),
            Ask(f"sum by (kind, location) (canaryd_ecc_aggregate_errors_total{{{THIS}}})"),
            columns=[
                Column(of="kind"),
                Column(of="location"),
                Column(of="Value #A", title="since loading", unit="none", limits=((1, YELLOW),)),
                Column(of="Value #B", title="over its life", unit="none"),
            ],
            missing="not told",
        ),
        width=8,
        height=8,
    )
    made.add(
        lines(
            "Errors over time",
            "Memory errors over the device's life, by kind, place and unit.",
            Ask(f"sum by (kind, location) (canaryd_ecc_aggregate_errors_total{{{THIS}}})", "{{kind}} {{location}}"),
            Ask(f"canaryd_ecc_sram_units_total{{{THIS}}}", "SRAM of {{unit}}"),
            least=0,
            decimals=0,
        ),
        **EACH,
    )
    made.add(
        lines(
            "Memory taken out of use",
            "Rows that were replaced by spare ones, banks with few or no spare rows left, and retired pages.",
            Ask(f"canaryd_row_remap_rows{{{THIS}}}", "rows replaced, {{cause}}"),
            Ask(f'canaryd_row_remap_banks{{{THIS}, available=~"low|none"}}', "banks with {{available}} spares"),
            Ask(f"canaryd_retired_pages{{{THIS}}}", "pages retired, {{cause}}"),
            Ask(f"canaryd_memory_bad_pages{{{THIS}}}", "bad pages, {{status}}"),
            least=0,
            decimals=0,
        ),
        **EACH,
    )


def _driver(made: Page) -> None:
    made.row("Driver, kernel log, links")
    made.add(
        grid(
            "Driver errors (NVIDIA's Xids)",
            "Messages of the NVIDIA driver in the kernel log: in all, and within the time range. docs/readings.md "
            "says "
            "what each code means.",
            Ask(f"sum by (xid) (canaryd_xid_errors_total{{{THIS}}}) > 0"),
            Ask(
                f"round(sum by (xid) (increase(canaryd_xid_errors_total{{{THIS}}}[$__range]))) "
                f"and on (xid) sum by (xid) (canaryd_xid_errors_total{{{THIS}}}) > 0"
            ),
            columns=[
                Column(of="xid"),
                Column(of="Value #A", title="ever", unit="none"),
                Column(of="Value #B", title="in this range", unit="none", limits=((1, ORANGE),)),
            ],
            sort="ever",
            missing="no Xid was ever seen",
        ),
        **EACH,
    )
    made.add(
        grid(
            "Kernel log",
            "Other lines of the kernel log about this device, by kind and name, as far back as the store remembers.",
            Ask(f"sum by (kind, name) (canaryd_kernel_log_events_total{{{THIS}}})"),
            columns=[Column(of="kind"), Column(of="name"), Column(of="Value", title="lines", unit="none")],
            missing="nothing was seen",
        ),
        grid(
            "Changes of the stack",
            "Changes of driver, firmware, place or software that canaryd saw. When: the blue marks in every panel.",
            Ask(f"sum by (component) (canaryd_stack_changes_total{{{THIS}}}) > 0"),
            columns=[Column(of="component"), Column(of="Value", title="changes", unit="none")],
            missing="nothing has changed",
        ),
        width=8,
        height=4,
    )
    made.add(
        lines(
            "Links: errors",
            "PCI Express packets sent again, PCI Express errors, and errors of device-to-device links.",
            Ask(f"increase(canaryd_pcie_replays_total{{{THIS}}}[$__rate_interval])", "PCIe replays"),
            Ask(f"increase(canaryd_pcie_aer_errors_total{{{THIS}}}[$__rate_interval])", "PCIe {{severity}}"),
            Ask(
                f"sum by (kind) (increase(canaryd_nvlink_errors_total{{{THIS}}}[$__rate_interval])) > 0",
                "NVLink {{kind}}",
            ),
            least=0,
        ),
        **EACH,
    )
    made.add(
        lines(
            "Links: width and number",
            "PCI Express lanes in use over those that device and slot support, and device-to-device links that are up "
            "over "
            "all of them. Below 1 something is missing.",
            Ask(f"canaryd_pcie_width{{{THIS}}} / canaryd_pcie_width_max{{{THIS}}}", "PCIe lanes"),
            Ask(f"avg(canaryd_nvlink_up{{{THIS}}})", "NVLinks"),
            unit="percentunit",
            least=0,
            most=1,
        ),
        **EACH,
    )


def _surroundings(made: Page) -> None:
    made.add(
        lines(
            "Temperature",
            "Every sensor of the device, and the mean of its siblings' hottest ones.",
            Ask(f"canaryd_temperature_celsius{{{THIS}}}", "{{sensor}}"),
            Ask(
                f"avg(max by (device, model, job, instance) (canaryd_temperature_celsius{{{NODES}}}) {LIKE_THIS})",
                "mean of siblings",
            ),
            unit="celsius",
        ),
        **EACH,
    )
    made.add(
        timeline(
            "Slowed down by",
            "Reasons why the device is throttled, while it is. Wrong results only when throttled point to the "
            "surroundings.",
            Ask(f"canaryd_throttle_active{{{THIS}, {HELD}}}", "{{reason}}"),
            mappings=yes_no(YELLOW, QUIET, ("held back", "free")),
            thresholds=steps(QUIET, (1, YELLOW)),
        ),
        **EACH,
    )
    made.add(
        lines(
            "Power",
            "Power drawn, and the limit that is enforced.",
            Ask(f"canaryd_power_watts{{{THIS}}}", "drawn"),
            Ask(f'canaryd_power_limit_watts{{{THIS}, limit="enforced"}}', "limit"),
            unit="watt",
            least=0,
            colors={"limit": GREY},
        ),
        **EACH,
    )
    made.add(
        lines(
            "Clocks",
            "Clock by domain. A clock that falls under load is throttled by heat or power.",
            Ask(f"canaryd_clock_hertz{{{THIS}}}", "{{domain}}"),
            unit="hertz",
            least=0,
        ),
        **EACH,
    )


def _drills(made: Page) -> None:
    made.row("Drills: faults injected on purpose, counted nowhere else", folded=True)
    state = ranked(THIS).replace("canaryd_device_state", "canaryd_drill_device_state")
    made.add(
        timeline(
            "State by drills alone",
            "What the verdict would be if the injected faults were real. It never pages.",
            Ask(state, "drill"),
            mappings=RANKS,
            thresholds=steps(STATES["healthy"], *RANK_STEPS),
        ),
        width=12,
        height=5,
    )
    made.add(
        grid(
            "Drills so far",
            "Runs with an injected fault, and how many of their comparisons found it.",
            Ask(f"sum by (probe) (canaryd_drill_runs_total{{{THIS}}}) > 0"),
            Ask(
                f"sum by (probe) (canaryd_drill_mismatches_total{{{THIS}}}) "
                f"and on (probe) sum by (probe) (canaryd_drill_runs_total{{{THIS}}}) > 0"
            ),
            columns=[
                Column(of="probe"),
                Column(of="Value #A", title="runs", unit="none"),
                Column(of="Value #B", title="found wrong bits", unit="none"),
            ],
            missing="never drilled",
        ),
        width=12,
        height=5,
    )
