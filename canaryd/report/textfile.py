"""The result of one `canaryd check` as a file for node_exporter's textfile collector (docs/metrics.md).

The metrics are named canaryd_check_*, unlike those of the daemon, so that alerts do not count a node twice.
"""

from __future__ import annotations

from collections.abc import Mapping

from canaryd import __version__
from canaryd.engine.check import Result
from canaryd.judge.tally import counted
from canaryd.metrics.exposition import OF_DEVICE, OF_PROBE, Family, Page
from canaryd.model import Cause, State

MODE = 0o644
"""Mode of the file: node_exporter usually runs as another user."""


FAMILIES: Mapping[str, Family] = {
    "canaryd_check_info": Family("gauge", ("version", "level"), "Always 1; version of canaryd and level of the check."),
    "canaryd_check_start_time_seconds": Family("gauge", (), "When the check began, since the epoch."),
    "canaryd_check_duration_seconds": Family("gauge", (), "How long the check took."),
    "canaryd_check_exit_code": Family(
        "gauge", (), "Exit status of the check: 0 healthy, 1 degraded, 2 suspect or faulty, 3 unknown."
    ),
    "canaryd_check_device_state": Family(
        "gauge", (*OF_DEVICE, "state"), "1 for the state that the check found the device in, 0 for every other state."
    ),
    "canaryd_check_device_cause": Family(
        "gauge", (*OF_DEVICE, "cause"), "1 for the cause of that state, 0 for every other cause."
    ),
    "canaryd_check_finding": Family(
        "gauge", (*OF_DEVICE, "rule", "state", "cause"), "Always 1; one series for each rule with a finding."
    ),
    "canaryd_check_trials": Family("gauge", OF_PROBE, "Results that the check compared with a known right answer."),
    "canaryd_check_mismatches": Family("gauge", OF_PROBE, "Wrong results among canaryd_check_trials."),
    "canaryd_check_fault_rate_upper_bound": Family(
        "gauge",
        OF_PROBE,
        "Highest rate of wrong results that the check may have missed (95 %); absent after a mismatch.",
    ),
}
"""Every metric that `render` can write, in this order; docs/metrics.md lists them too, and a test compares both."""


def render(result: Result, exit_code: int) -> bytes:
    """Return a check's result in the text format of Prometheus."""
    page = Page(FAMILIES)
    page.add("canaryd_check_info", 1, __version__, result.level)
    page.add("canaryd_check_start_time_seconds", result.started)
    page.add("canaryd_check_duration_seconds", result.seconds)
    page.add("canaryd_check_exit_code", exit_code)
    for device in result.devices:
        labels = (device.uuid, str(device.index), device.model)
        verdict = result.verdicts.get(device.uuid)
        page.add_set("canaryd_check_device_state", verdict.state if verdict else State.UNKNOWN, *labels)
        page.add_set("canaryd_check_device_cause", verdict.cause if verdict else Cause.UNDETERMINED, *labels)
        for found in sorted({(f.rule, f.state.value, f.cause.value) for f in verdict.findings} if verdict else ()):
            page.add("canaryd_check_finding", 1, *labels, *found)
        runs = result.runs.get(device.uuid, ())
        for probe in sorted({run.probe for run in runs}):
            results = counted(run for run in runs if run.probe == probe)
            page.add("canaryd_check_trials", results.of, *labels, probe)
            page.add("canaryd_check_mismatches", results.wrong, *labels, probe)
        for probe, rate in sorted(result.rules_out.get(device.uuid, {}).items()):
            page.add("canaryd_check_fault_rate_upper_bound", rate, *labels, probe)
    return page.text()
