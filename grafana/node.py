"""The dashboard *Node*: the devices of one machine side by side."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard as build

from grafana.parts import (
    BLUE,
    CAUSE_WORDS,
    GREEN,
    GREY,
    HELD,
    NODE,
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
    Panel,
    device,
    grid,
    hidden,
    instance,
    job,
    lines,
    marks,
    named,
    neglect,
    number,
    ranked,
    row_links,
    series_links,
    steps,
    timeline,
    yes_no,
)

NODES = 'job=~"$job", instance=~"$instance"'
DEVICES = f'{NODES}, device=~"$device"'
BY = "job, instance, device"
SHOWN = yes_no(STATES["unknown"], "transparent")


def page() -> Page:
    """Put the dashboard together."""
    made = Page(
        uid=NODE,
        title="canaryd / Node",
        about="One machine: its devices side by side: results, temperature, speed and wear.",
        since="now-6h",
        refresh="1m",
        variables=[job(), instance(many=False), device(many=True)],
        marks=marks(DEVICES, xids=True),
    )
    _devices(made)
    _numbers(made)
    _canaries(made)
    _heat(made)
    _memory(made)
    _host(made)
    return made


def _links() -> list[build.DashboardLink]:
    return series_links(device=True)[:1]


def _first_look() -> list[Panel]:
    return [
        number(
            "Worst state",
            "The state of the worst device.",
            Ask(f"max({ranked(DEVICES)})", "worst"),
            mappings=RANKS,
            thresholds=steps(STATES["healthy"], *RANK_STEPS),
        ),
        number(
            "Devices found",
            "Whole accelerators that are found now, of those that the configuration expects (where it says so). The "
            "host's processor and instances of a divided accelerator are not counted.",
            Ask(
                f"count(canaryd_device_present{{{NODES}}} == 1 and on ({BY}) "
                f'canaryd_device_info{{{NODES}, backend!~"cpu|endpoint", parent=""}})',
                "found",
            ),
            Ask(f"sum(canaryd_devices_expected{{{NODES}}})", "expected"),
            missing="none",
        ),
        number(
            "Wrong results",
            "Comparisons that found a wrong bit within the time range.",
            Ask(f"round(sum(increase(canaryd_probe_mismatches_total{{{DEVICES}}}[$__range])))", "mismatches"),
            thresholds=steps(QUIET, (1, RED)),
            decimals=0,
        ),
    ]


def _devices(made: Page) -> None:
    made.row("Devices")
    for panel in _first_look():
        made.add(panel, width=8, height=4)
    made.add(
        grid(
            "Side by side",
            "Every device with its verdict and its evidence. Mismatches, Xids and corrected errors "
            "are "
            "those of the time range. Click a name for the device's page.",
            Ask(
                f"{ranked(DEVICES)} * on ({BY}) group_left (name) canaryd_device_info{{{DEVICES}}} "
                f"* on ({BY}) group_left (cause) (canaryd_device_cause{{{DEVICES}}} == 1)"
            ),
            Ask(f"max by ({BY}) (canaryd_device_acknowledged{{{DEVICES}}})"),
            Ask(f"round(sum by ({BY}) (increase(canaryd_probe_mismatches_total{{{DEVICES}}}[$__range])))"),
            Ask(f"max by ({BY}) (canaryd_drift_ratio{{{DEVICES}}})"),
            Ask(f"round(sum by ({BY}) (increase(canaryd_xid_errors_total{{{DEVICES}}}[$__range])))"),
            Ask(f'sum by ({BY}) (canaryd_ecc_errors_total{{{DEVICES}, kind="uncorrected"}})'),
            Ask(f'round(sum by ({BY}) (increase(canaryd_ecc_errors_total{{{DEVICES}, kind="corrected"}}[$__range])))'),
            Ask(f"max by ({BY}) (canaryd_temperature_celsius{{{DEVICES}}})"),
            Ask(f"max by ({BY}) (canaryd_throttle_active{{{DEVICES}, {HELD}}})"),
            Ask(f"max by ({BY}) ({neglect(DEVICES)})"),
            columns=[
                Column(of="name", title="device name", links=row_links(device=True)[:1], width=105),
                Column(of="model"),
                Column(of="Value #A", title="state", mappings=RANKS, width=90),
                Column(of="cause", mappings=CAUSE_WORDS, width=115),
                Column(of="Value #B", title="acknowledged", mappings=SHOWN, width=110),
                Column(of="Value #C", title="mismatches", unit="none", limits=((1, RED),), width=95),
                Column(
                    of="Value #D", title="drift / tolerance", unit="none", limits=((1, ORANGE),), decimals=2, width=115
                ),
                Column(of="Value #E", title="Xids", unit="none", limits=((1, ORANGE),), width=60),
                Column(of="Value #F", title="uncorrected", unit="none", limits=((1, RED),), width=100),
                Column(of="Value #G", title="corrected", unit="none", limits=((1000, YELLOW),), width=85),
                Column(of="Value #H", title="hottest", unit="celsius", decimals=0, width=75),
                Column(of="Value #I", title="held back", mappings=yes_no(YELLOW, "transparent"), width=85),
                Column(
                    of="Value #J",
                    title="oldest, periods",
                    unit="none",
                    decimals=1,
                    limits=((2, YELLOW), (3, ORANGE)),
                    width=110,
                ),
                *hidden("job", "instance", "device"),
            ],
            sort="device name",
            descending=False,
            missing="no device",
        ),
        width=24,
        height=10,
    )
    made.add(
        timeline(
            "State",
            "The verdict on each device. A gap is a time in which canaryd did not answer.",
            Ask(named(ranked(DEVICES), DEVICES), "{{name}}"),
            mappings=RANKS,
            thresholds=steps(STATES["healthy"], *RANK_STEPS),
            links=_links(),
        ),
        width=24,
        height=8,
    )


def _numbers(made: Page) -> None:
    made.row("Wrong and changed results")
    each = {"width": 8, "height": 8}
    made.add(
        lines(
            "Wrong results over time",
            "Comparisons that found a wrong bit, by device and probe. Look at every one.",
            Ask(
                named(f"increase(canaryd_probe_mismatches_total{{{DEVICES}}}[$__rate_interval]) > 0", DEVICES),
                "{{name}} {{probe}}",
            ),
            bars=True,
            least=0,
            decimals=0,
            links=_links(),
        ),
        **each,
    )
    made.add(
        lines(
            "Change of recorded results, over tolerance",
            "Largest distance of a recording from the nearest known one, over its tolerance: 0 while the bits are "
            "known; "
            "healthy devices stay below 1. A bit-stable case that gives other bits has no finite ratio "
            "and shows as a gap here, and as unknown bits to the right.",
            Ask(named(f"canaryd_drift_ratio{{{DEVICES}}}", DEVICES), "{{name}} {{probe}} {{reading}}"),
            least=0,
            limits=((1, ORANGE),),
            links=_links(),
        ),
        **each,
    )
    made.add(
        lines(
            "Recorded cases with new bits",
            "Recorded cases whose newest result is not among the known ones. 0 is what a healthy device on an "
            "unchanged "
            "stack gives.",
            Ask(named(f'canaryd_recordings{{{DEVICES}, status="unknown"}}', DEVICES), "{{name}} {{probe}} {{reading}}"),
            least=0,
            decimals=0,
            links=_links(),
        ),
        **each,
    )


def _canaries(made: Page) -> None:
    made.row("Language models and servers", folded=True)
    each = {"width": 8, "height": 8}
    made.add(
        lines(
            "Share of right tokens",
            "Share of tokens that are the right ones (canary), and that are those of the nearest known recording "
            "(recorded). 1 is all of them.",
            Ask(
                named(f"min by ({BY}) (canaryd_canary_token_agreement{{{DEVICES}}})", DEVICES),
                "{{name}} canary",
            ),
            Ask(
                named(f"min by ({BY}) (canaryd_recording_token_agreement{{{DEVICES}}})", DEVICES),
                "{{name}} recorded",
            ),
            unit="percentunit",
            most=1,
            usually=0.9,
            links=_links(),
        ),
        **each,
    )
    made.add(
        lines(
            "Error of the model's numbers, over tolerance",
            "Largest distance of a canary's logit from its golden, over its tolerance. Above 1 it is wrong.",
            Ask(
                named(f"max by ({BY}, dtype) (canaryd_canary_logit_distance{{{DEVICES}}})", DEVICES),
                "{{name}} {{dtype}}",
            ),
            least=0,
            limits=((1, RED),),
            links=_links(),
        ),
        **each,
    )
    made.add(
        lines(
            "Kernel time",
            "Time of one call, by kind of kernel. Identical devices should be alike; a slower one is throttled, or "
            "serves more than the others.",
            Ask(named(f"canaryd_kernel_seconds{{{DEVICES}}}", DEVICES), "{{name}} {{kind}}"),
            unit="s",
            least=0,
            links=_links(),
        ),
        **each,
    )
    made.add(
        lines(
            "Model server: time to its answer",
            "From a request to the first token, and from one token to the next on average.",
            Ask(named(f"canaryd_endpoint_first_token_seconds{{{DEVICES}}}", DEVICES), "{{name}} {{api}} first token"),
            Ask(named(f"canaryd_endpoint_token_seconds{{{DEVICES}}}", DEVICES), "{{name}} {{api}} each token"),
            unit="s",
            least=0,
            links=_links(),
        ),
        **each,
    )


def _heat(made: Page) -> None:
    made.row("Heat, power, clocks")
    each = {"width": 8, "height": 8}
    made.add(
        lines(
            "Temperature",
            "The hottest sensor of each device.",
            Ask(named(f"max by ({BY}) (canaryd_temperature_celsius{{{DEVICES}}})", DEVICES), "{{name}}"),
            unit="celsius",
            links=_links(),
        ),
        **each,
    )
    made.add(
        lines(
            "Thermal margin",
            "Degrees left until the device throttles; below 0 it does.",
            Ask(named(f"canaryd_temperature_margin_celsius{{{DEVICES}}}", DEVICES), "{{name}}"),
            unit="celsius",
            limits=((0, GREY),),
            links=_links(),
        ),
        **each,
    )
    made.add(
        timeline(
            "Slowed down by",
            "Reasons why a device is throttled, while it is. Idling does not count.",
            Ask(
                named(
                    f"canaryd_throttle_active{{{DEVICES}, {HELD}}} and on ({BY}, reason) "
                    f"(max_over_time(canaryd_throttle_active{{{DEVICES}}}[$__range] @ end()) > 0)",
                    DEVICES,
                ),
                "{{name}} {{reason}}",
            ),
            mappings=yes_no(YELLOW, QUIET, ("held back", "free")),
            thresholds=steps(QUIET, (1, YELLOW)),
            links=_links(),
        ),
        **each,
    )
    made.add(
        lines(
            "Power",
            "Power drawn. Devices that do the same work draw about the same.",
            Ask(named(f"canaryd_power_watts{{{DEVICES}}}", DEVICES), "{{name}}"),
            unit="watt",
            least=0,
            links=_links(),
        ),
        **each,
    )
    made.add(
        lines(
            "Clock of the compute units",
            "Clock divided by the highest that the device supports; memory and video are left out.",
            Ask(
                named(
                    f'max by ({BY}) (canaryd_clock_hertz{{{DEVICES}, domain!~"memory|video"}} / on ({BY}, domain) '
                    f"canaryd_clock_max_hertz{{{DEVICES}}})",
                    DEVICES,
                ),
                "{{name}}",
            ),
            unit="percentunit",
            least=0,
            links=_links(),
        ),
        **each,
    )
    made.add(
        lines(
            "Utilization",
            "Share of time in use, by engine. A device that is slower than its siblings may just be busier.",
            Ask(named(f'canaryd_utilization_ratio{{{DEVICES}, engine!="memory"}}', DEVICES), "{{name}} {{engine}}"),
            unit="percentunit",
            least=0,
            most=1,
            links=_links(),
        ),
        **each,
    )


def _memory(made: Page) -> None:
    made.row("Memory, links and driver messages of accelerators", folded=True)
    each = {"width": 8, "height": 8}
    made.add(
        lines(
            "Corrected memory errors",
            "Bits that error correction repaired. Many in a day mean wear; results stay correct.",
            Ask(
                named(
                    f"sum by ({BY}) (increase("
                    f'canaryd_ecc_errors_total{{{DEVICES}, kind="corrected"}}[$__rate_interval]))',
                    DEVICES,
                ),
                "{{name}}",
            ),
            least=0,
            links=_links(),
        ),
        **each,
    )
    made.add(
        lines(
            "Uncorrected memory errors",
            "Errors that could not be corrected, since the driver was loaded.",
            Ask(
                named(f'sum by ({BY}) (canaryd_ecc_errors_total{{{DEVICES}, kind="uncorrected"}})', DEVICES),
                "{{name}}",
            ),
            least=0,
            decimals=0,
            links=_links(),
        ),
        **each,
    )
    made.add(
        lines(
            "Driver errors by code (NVIDIA's Xids)",
            "Xid messages of the driver. docs/readings.md says what each code means. A code outside the usual list "
            "appears with its first message, which cannot be counted as an increase.",
            Ask(
                named(f"increase(canaryd_xid_errors_total{{{DEVICES}}}[$__rate_interval]) > 0", DEVICES),
                "{{name}} Xid {{xid}}",
            ),
            bars=True,
            least=0,
            decimals=0,
            links=_links(),
        ),
        **each,
    )
    made.add(
        lines(
            "PCI Express: packets sent again",
            "Replays: a link that repeats packets has a bad contact or a bad slot.",
            Ask(named(f"increase(canaryd_pcie_replays_total{{{DEVICES}}}[$__rate_interval])", DEVICES), "{{name}}"),
            least=0,
            links=_links(),
        ),
        **each,
    )
    made.add(
        lines(
            "NVLink errors",
            "Errors of device-to-device links, all links and kinds together.",
            Ask(
                named(f"sum by ({BY}) (increase(canaryd_nvlink_errors_total{{{DEVICES}}}[$__rate_interval]))", DEVICES),
                "{{name}}",
            ),
            least=0,
            links=_links(),
        ),
        **each,
    )


def _host(made: Page) -> None:
    made.row("Host: memory errors and waiting", folded=True)
    each = {"width": 8, "height": 8}
    made.add(
        lines(
            "Memory errors of the host",
            "Errors that EDAC counted, by kind and module. Goldens pass through this memory: uncorrected ones put "
            "every "
            "device's verdict in doubt.",
            Ask(f"increase(canaryd_edac_errors_total{{{NODES}}}[$__rate_interval])", "{{dimm}} {{kind}}"),
            Ask(f"increase(canaryd_machine_check_exceptions_total{{{NODES}}}[$__rate_interval])", "machine checks"),
            least=0,
        ),
        **each,
    )
    made.add(
        lines(
            "Tasks that wait",
            "Share of the last minute in which some tasks waited for the resource.",
            Ask(f'canaryd_pressure_ratio{{{NODES}, kind="some"}}', "{{resource}}"),
            unit="percentunit",
            least=0,
            colors={"cpu": BLUE, "memory": RED, "io": GREEN},
        ),
        **each,
    )
