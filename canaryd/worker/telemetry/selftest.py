"""Run the vendor's own self-test of a device and read its results. docs/vendors.md lists tools, versions and formats.

A tool's result neither proves nor disproves a defect: it is a reading, and the judge decides. A test that did not end,
or printed nothing readable, has no result.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from canaryd.facts import SELF_TEST
from canaryd.model import Device
from canaryd.probe import Context, Fact, Reading, Skip
from canaryd.worker.telemetry.command import command_setting, not_started
from canaryd.worker.temporary import temporary_directory

STEP = 0.1
"""Seconds between two checks of a running tool."""
GRACE = 30.0
"""Seconds between asking a tool to stop and killing it."""
SAID = 200
"""Largest number of characters of a tool's message that are kept."""
_LEFT: list[subprocess.Popen[bytes]] = []
"""Processes of tools that still run after the probe; they are kept so that Python does not warn about them."""
CONFIGURATION = 5
"""DCGM_ERROR_CONFIG: "This error can be configured" (DCGM, dcgm_errors.h); for example, persistence mode is off."""


@dataclass(frozen=True)
class Result:
    """A tool's result for one of its tests."""

    test: str
    status: str
    """"pass", "fail", "warn", "skip", "unknown", or "configuration": failed because of a setting."""
    message: str = ""


@dataclass(frozen=True)
class Tool:
    """A vendor's self-test: its command, and how to read its results."""

    command: str
    suite: str
    """Suite of tests that runs if the setting `suite` gives no other one."""
    arguments: Callable[[str, Device, Path], list[str]]
    """Function that takes suite, device and the file for results, and returns the command-line arguments."""
    read: Callable[[str, str, Device], list[Result]]
    """Function that takes standard output, the text of the results file (or ""), and the device; it returns the
    results. It raises the errors of `json` and of indexing."""
    abortable: bool = True
    """False if stopping a run leaves the device in another state than before the run."""


def _dcgmi(text: str, _: str, device: Device) -> list[Result]:
    """Return the results in `dcgmi diag -j` of DCGM 3 ("DCGM GPU Diagnostic") and 4 ("DCGM Diagnostic")."""
    document = json.loads(text[text.index("{") :])
    diagnostic = document.get("DCGM Diagnostic") or document["DCGM GPU Diagnostic"]
    found = []
    for category in diagnostic["test_categories"]:
        for test in category["tests"]:
            for result in test["results"]:
                group = result.get("entity_group", "GPU")
                number = result.get("entity_id", result.get("gpu_id", device.index))
                if group != "GPU" or str(number) != str(device.index):
                    continue
                warnings = result.get("warnings") or []
                warnings = warnings if isinstance(warnings, list) else [warnings]
                given = [w if isinstance(w, dict) else {"warning": str(w)} for w in warnings]
                status = str(result["status"]).lower()
                if status == "fail" and given and all(w.get("error_severity") == CONFIGURATION for w in given):
                    status = "configuration"
                found.append(Result(test["name"], _status(status), "; ".join(str(w.get("warning", "")) for w in given)))
    return found


def _rvs(_: str, results: str, device: Device) -> list[Result]:
    """Return the results in RVS's JSON file: module → action → results per GPU (ROCmValidationSuite, docs/schemas)."""
    found = []
    for module, actions in json.loads(results).items():
        for action, each in actions.items() if isinstance(actions, dict) else ():
            for result in each if isinstance(each, list) else ():
                if "pass" in result and str(result.get("gpu_index", device.index)) == str(device.index):
                    rest = ", ".join(f"{k} {v}" for k, v in result.items() if k not in ("pass", "gpu_id", "gpu_index"))
                    status = {"true": "pass", "false": "fail"}.get(str(result["pass"]).lower(), "unknown")
                    found.append(Result(f"{module}/{action}", status, rest))
    return found


def _ascend(text: str, _: str, __: Device) -> list[Result]:
    """Return the results in ascend-dmi's plain output: name of an item, then its status (MindCluster ToolBox)."""
    lines = text[text.index("Hardware:") :].splitlines()[1:]
    named = re.compile(r"\s+(\w+):\s*$")
    return [
        Result(name[1], _status(following.strip().lower()))
        for line, following in itertools.pairwise(lines)
        if (name := named.match(line)) and following.strip() and not named.match(following)
    ]


def _xpu_smi(text: str, _: str, __: Device) -> list[Result]:
    """Return the results in `xpu-smi diag -j` of version 1; 2 has no `diag` (intel/xpumanager, lib_core_stub.cpp)."""
    return [
        Result(str(each["component_type"]), _status(str(each["result"]).lower()), str(each.get("message", "")))
        for each in json.loads(text[text.index("{") :])["component_list"]
    ]


def _status(word: str) -> str:
    known = {"health": "pass", "emergency_warn": "fail", "critical": "fail", "warning": "warn"}
    word = known.get(word, word)
    return word if word in ("pass", "fail", "warn", "skip", "configuration") else "unknown"


TOOLS: Mapping[str, Tool] = {
    "cuda": Tool("dcgmi", "3", lambda s, d, _: ["diag", "-r", s, "-i", str(d.index), "-j"], _dcgmi),
    "rocm": Tool("rvs", "gst", lambda s, d, file: ["-m", s, "-i", str(d.index), "-j", str(file)], _rvs),
    "xpu": Tool("xpu-smi", "2", lambda s, d, _: ["diag", "-d", str(d.index), "-l", s, "-j"], _xpu_smi),
    # Its stress tests move the voltage; `ascend-dmi -r` resets the NPU and restores it.
    "npu": Tool(
        "ascend-dmi", "aicore", lambda s, d, _: ["-dg", "-i", s, "-d", str(d.index), "-q"], _ascend, abortable=False
    ),
}
"""Backend → the self-test tool of the vendor."""


def read(ctx: Context) -> Iterator[Fact]:
    """Run the tool and yield a reading for each of its tests. Raises `Skip` with the reason if there is no result."""
    tool = TOOLS[ctx.device.backend]
    command = command_setting(ctx.settings, "command", tool.command)
    suite = ctx.settings.get("suite", tool.suite)
    if not re.fullmatch(r"[\w,]+", str(suite)):
        raise ValueError(f"suite: got {suite!r}, wanted letters, digits, _ and commas such as {tool.suite!r}")
    with temporary_directory("canaryd-selftest-") as directory:
        file = Path(directory, "results.json")
        argv = [command, *tool.arguments(str(suite), ctx.device, file)]
        code, text = _run(ctx, tool, argv)
        results = file.read_text(errors="replace") if file.exists() else ""
    try:
        found = tool.read(text, results, ctx.device)
    except (ValueError, KeyError, TypeError, AttributeError):
        found = []
    if not found:
        last = (text.strip().splitlines() or ["nothing"])[-1][:SAID]
        raise Skip(f"{' '.join(argv)} gave no result of this device (exit status {code}); it said: {last}")
    for result in found:
        labels = {"tool": tool.command, "suite": str(suite), "test": result.test}
        yield Reading(name=SELF_TEST, value=result.status, labels=labels)
        if result.message:
            yield Reading(name="vendor_selftest_message", value=result.message[:SAID], labels=labels)


def _run(ctx: Context, tool: Tool, argv: list[str]) -> tuple[int, str]:
    """Return (exit status, output) of a tool; raise `Skip` if the tool does not start or does not end.

    The tool is in the worker's process group and ends with it; a tool that must not be aborted has its own session.
    """
    with tempfile.TemporaryFile() as out:
        try:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=not tool.abortable,
                env={**os.environ, "LC_ALL": "C"},
            )
        except OSError as error:
            raise Skip(str(not_started(argv[0], error))) from None
        while True:
            try:
                code = process.wait(STEP)
                break
            except subprocess.TimeoutExpired:
                ctx.progress(min(0.99, 1.0 - ctx.left / ctx.budget), argv[0])
                if ctx.left <= 0.0:
                    raise Skip(_overran(tool, process, argv, ctx.budget)) from None
        out.seek(0)
        return code, out.read().decode(errors="replace")


def _overran(tool: Tool, process: subprocess.Popen[bytes], argv: list[str], budget: float) -> str:
    """Stop a tool that took too long, unless it must not be aborted; return a sentence about what was done."""
    if not tool.abortable:
        _LEFT.append(process)
        return (
            f"{argv[0]} did not end within {budget:g} s. It still runs (process {process.pid}): canaryd does not stop"
            " it, because a stopped test leaves the voltage changed. Do not kill it; wait for its end"
        )
    _stop(process)
    return f"{argv[0]} did not end within {budget:g} s and was stopped"


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End a tool, by force if needed; what it has started ends with the worker's process group, soon after the run."""
    for end in (process.terminate, process.kill):
        end()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
            return
