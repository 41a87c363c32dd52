"""How long a person waits for `canaryd check --level quick`: wall time from the command to its exit, start included."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import common

TARGET = 15.0
"""Seconds that the verdict of a quick check may take on a machine without accelerators."""


def check(level: str, config: Path | None) -> tuple[float, dict[str, Any]]:
    """Run one check on an empty state directory; return seconds and its answer. Ends the program where there is none.

    The exit status alone would not do: a crash of the interpreter also ends with 1.
    """
    with tempfile.TemporaryDirectory(prefix="canaryd-") as state:
        words = ["--json", "--level", level, "--state-dir", state, *(["--config", str(config)] if config else [])]
        started = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "canaryd", "check", *words],
            cwd=common.ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        seconds = time.perf_counter() - started
    try:
        answer: dict[str, Any] = json.loads(done.stdout)
        if any(device["runs"] for device in answer["devices"]):
            return seconds, answer
    except (ValueError, LookupError, TypeError):
        pass
    sys.exit(f"canaryd check ended with {done.returncode} and no run:\n{(done.stdout + done.stderr)[-2000:]}")


def main() -> None:
    """Run the checks and write; end with 1 where a check ran nothing."""
    parser = common.options(__doc__)
    parser.add_argument("--level", choices=("quick", "standard", "deep"), default="quick")
    parser.add_argument("--config", type=Path, help="configuration of the check (default: none)")
    parser.add_argument("--runs", type=int, default=7)
    arguments = parser.parse_args()
    facts = common.machine()
    times: list[float] = []
    states: list[str] = []
    for _ in range(arguments.runs):
        seconds, answer = check(arguments.level, arguments.config)
        times.append(seconds)
        states.append(answer["state"])
        print(f"{seconds:.1f} s, {answer['state']}", flush=True)
    judged = "no target"
    if arguments.level == "quick":
        judged = f"{'reached' if max(times) <= TARGET else 'missed'} (every run ≤ {TARGET:g} s)"
    body = common.table(
        ["level", "runs", "shortest", "median", "longest", "verdicts", "target"],
        [
            [
                arguments.level,
                len(times),
                *(f"{t:.1f} s" for t in (min(times), statistics.median(times), max(times))),
                ", ".join(sorted(set(states))),
                judged,
            ]
        ],
    )
    data = {"seconds": times, "verdicts": states, "judged": judged}
    common.write(arguments.out, f"check_time-{arguments.level}", "Time of a check", facts, body, data)


if __name__ == "__main__":
    main()
