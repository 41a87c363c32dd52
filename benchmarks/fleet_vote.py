"""Measure what the fleet vote costs a Prometheus, for 100 to 10,000 nodes with 8 devices each.

A real Prometheus scrapes synthetic nodes and evaluates the shipped rules, `deploy/prometheus/canaryd-fleet.rules.yml`.
Only their interval is changed: it is shorter, so that there are more rounds to measure. Each size has a new Prometheus.
A few devices, one node, one pair and one stack differ from the rest, and the result is checked, because a fast but
wrong vote is no result. At the end 40 % of the largest fleet changes its results at once: the largest possible load.
"""

from __future__ import annotations

import http.server
import json
import multiprocessing
import os
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from benchmarks.common import ROOT, Bystanders, machine, options, seconds, table, write

RULES = ROOT / "deploy/prometheus/canaryd-fleet.rules.yml"
PER_TARGET = 100
"""Number of nodes on the page of one synthetic target; each node has its own `instance` label."""
DEVICES = 8
PROBES = ("exact_matmul", "exact_attention", "exact_integer", "recorded_kernels")
MODELS = ("NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA B200", "AMD Instinct MI300X")
STACKS = 12
"""Number of software stacks per model: half of its nodes have the first one, a quarter the second, and so on."""
RIGHT, WRONG = 2**53 - 1, 2**53 - 2
SCRAPE = 30
"""Seconds between two scrapes, twice the usual time: the benchmark measures rules and queries, not scrapes."""
INTERVAL = 15
"""Seconds between two rounds of the rules; the shipped file says 60."""
STATES = ("healthy", "degraded", "unknown", "suspect", "faulty")
PLAIN = (
    "canaryd_golden_fingerprint != on (model, probe, stack) group_left () "
    "quantile by (model, probe, stack) (0.5, canaryd_golden_fingerprint)"
)
"""The vote as one expression without any guard, with which the cost of the rules is compared."""


class Size(NamedTuple):
    """The measurements at one size of the fleet."""

    nodes: int
    series: int
    """Number of scraped series, without those that the rules make."""
    rounds: list[float]
    """Seconds of each round; a round evaluates all rules."""
    rules: dict[str, float]
    """Rule → median of its seconds."""
    cpu: float
    """Processor seconds of Prometheus per round, including scrapes."""
    resident: int
    """Resident memory of Prometheus at the end, in bytes."""
    queries: dict[str, float]
    """Query → median of its seconds."""
    others: float
    """Fraction of the processor time that other processes used."""


def page(first: int, nodes: int, storm: bool) -> bytes:
    """Return the metrics page of the `nodes` nodes from number `first` on; with `storm`, 40 % of them differ."""
    lines: dict[str, list[str]] = {}

    def add(name: str, labels: str, value: float) -> None:
        lines.setdefault(name, []).append(f"{name}{{{labels}}} {float(value)!r}\n")

    for node in range(first, first + nodes):
        model = MODELS[node % len(MODELS)]
        place = node // len(MODELS)
        stack = min(STACKS - 1, (place + 1 & -(place + 1)).bit_length() - 1)  # half of all numbers are odd, and so on
        where = f'instance="node{node:05d}:19469"'
        add("canaryd_build_info", f'{where},version="0.1.0"', 1)
        for index in range(DEVICES):
            uuid = f"GPU-{node:08x}-{index:04x}-4000-8000-{node * DEVICES + index:012x}"
            of = f'{where},device="{uuid}",index="{index}",model="{model}"'
            known = (node, index) == (9, 3)
            odd = (node, index) in ((5, 2), (9, 3)) or node == 17 or (storm and node % 5 < 2)
            add("canaryd_device_present", of, 1)
            add("canaryd_stack_info", f'{of},stack="stack{stack:02d}",torch="2.9.0",driver="580.{stack}"', 1)
            for state in STATES:
                add("canaryd_device_state", f'{of},state="{state}"', state == ("suspect" if known else "healthy"))
            if known:
                add("canaryd_finding", f'{of},rule="exact-mismatch",state="suspect",cause="hardware"', 1)
            for probe in PROBES:
                marked = f'{of},probe="{probe}"'
                right = RIGHT - 1000 * stack if probe == "recorded_kernels" else RIGHT
                value = right - 1 - (17 * index if node == 17 else 0) if odd else right
                add("canaryd_golden_fingerprint", f'{marked},stack="stack{stack:02d}"', value)
                add("canaryd_probe_last_success_timestamp_seconds", marked, time.time() - 60 * index)
                add("canaryd_probe_period_seconds", marked, 3600)
    return "".join(f"# TYPE {name} gauge\n{''.join(found)}" for name, found in lines.items()).encode()


def export(listener: socket.socket, nodes: int) -> None:
    """Serve the page of block N (100 nodes) at `/N`. After a request of `/storm`, 40 % of the fleet differ."""
    starts = range(0, nodes, PER_TARGET)
    pages = [page(start, min(PER_TARGET, nodes - start), storm=False) for start in starts]

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = b""
            if self.path == "/storm":
                pages[:] = [page(start, min(PER_TARGET, nodes - start), storm=True) for start in starts]
            else:
                body = pages[int(self.path[1:])]
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler, bind_and_activate=False)
    server.socket.close()
    server.socket = listener
    server.serve_forever()


class Run:
    """One Prometheus that scrapes one synthetic fleet."""

    def __init__(self, directory: Path, nodes: int, interval: int) -> None:
        self.nodes, self.interval = nodes, interval
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.exporter = multiprocessing.get_context("fork").Process(
            target=export, args=(self.listener, nodes), daemon=True
        )
        self.exporter.start()
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        text = RULES.read_text()
        (directory / "rules.yml").write_text(text.replace("interval: 1m", f"interval: {interval}s"))
        targets = [
            {"targets": [self.address], "labels": {"__metrics_path__": f"/{n}", "instance": f"block{n}"}}
            for n in range(-(-nodes // PER_TARGET))
        ]
        job = {"job_name": "canaryd", "honor_labels": True, "scrape_timeout": f"{SCRAPE}s", "static_configs": targets}
        settings = {
            "global": {"scrape_interval": f"{SCRAPE}s", "evaluation_interval": f"{interval}s"},
            "rule_files": ["rules.yml"],
            "scrape_configs": [job],
        }
        (directory / "prometheus.yml").write_text(json.dumps(settings))
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        program = shutil.which("prometheus") or sys.exit("prometheus is not installed")
        self.process = psutil.Popen(
            [
                program,
                f"--config.file={directory}/prometheus.yml",
                f"--storage.tsdb.path={directory}/data",
                f"--web.listen-address=127.0.0.1:{port}",
                "--log.level=error",
            ]
        )

    def stop(self) -> None:
        """Stop Prometheus and the exporter."""
        self.process.terminate()
        self.process.wait(120)
        self.exporter.terminate()
        self.exporter.join()
        self.listener.close()

    def api(self, path: str, **arguments: str) -> Any:
        """Return the "data" of an answer of Prometheus's API."""
        asked = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(arguments)}"
        with urllib.request.urlopen(asked, timeout=300) as answer:  # noqa: S310  this program's own Prometheus
            return json.load(answer)["data"]

    def value(self, query: str) -> float:
        """Return the first value of a query's result, or 0.0 if the result is empty."""
        found = self.api("query", query=query)["result"]
        return float(found[0]["value"][1]) if found else 0.0

    def group(self) -> dict[str, Any]:
        """Return the group of rules as Prometheus's API describes it."""
        found: dict[str, Any] = self.api("rules")["groups"][0]
        return found

    def until(self, what: Callable[[], bool], seconds: float = 300.0) -> None:
        """Wait until `what()` is true; exit the program after `seconds`."""
        end = time.monotonic() + seconds
        while True:
            try:
                if what():
                    return
            except OSError:
                pass
            if time.monotonic() > end:
                sys.exit(f"{self.nodes} nodes: not ready within {seconds:.0f} s")
            time.sleep(0.5)

    def rounds(self, count: int) -> tuple[list[float], dict[str, list[float]]]:
        """Wait for `count` rounds; return (seconds of each round, rule → its seconds in each round)."""
        totals: list[float] = []
        each: dict[str, list[float]] = {}
        seen = self.group()["lastEvaluation"]
        while len(totals) < count:
            time.sleep(0.5)
            group = self.group()
            # What is shown is not of one round before every rule of it has been evaluated.
            if group["lastEvaluation"] == seen or any(
                r["lastEvaluation"] < group["lastEvaluation"] for r in group["rules"]
            ):
                continue
            seen = group["lastEvaluation"]
            totals.append(group["evaluationTime"])
            names: set[str] = set()
            for rule in group["rules"]:
                name = next(n for k in range(1, 9) if (n := rule["name"] + f" ({k})" * (k > 1)) not in names)
                names.add(name)
                each.setdefault(name, []).append(rule["evaluationTime"])
                if rule["health"] != "ok":
                    sys.exit(f"{name}: {rule.get('lastError')}")
        return totals, each


def expected(run: Run) -> None:
    """Exit the program if the vote does not accuse exactly the devices and the node that differ."""
    alerts = run.api("query", query='ALERTS{alertname=~"CanarydFleet.*"}')["result"]
    found = {(a["metric"]["alertname"], a["metric"].get("instance"), a["metric"].get("scope")) for a in alerts}
    wanted = {
        ("CanarydFleetMinority", "node00005:19469", "device"),
        ("CanarydFleetMinority", "node00017:19469", "device"),
        ("CanarydFleetMinority", "node00017:19469", "node"),
    }
    if found != wanted:
        sys.exit(f"{run.nodes} nodes: the vote is wrong: {found}")


def measure(run: Run, rounds: int) -> Size:
    """Wait until Prometheus has scraped the whole fleet, and return the measurements over `rounds` rounds."""
    devices = run.nodes * DEVICES
    run.until(lambda: run.value("count(canaryd_golden_fingerprint)") == devices * len(PROBES))
    run.until(lambda: run.value("sum(canaryd:fleet_voters)") == (devices - 1) * len(PROBES))
    run.rounds(1)
    before = sum(run.process.cpu_times()[:2])
    exporter = psutil.Process(run.exporter.pid)
    with Bystanders(also=[run.process, exporter]) as others:
        totals, each = run.rounds(rounds)
    cpu = (sum(run.process.cpu_times()[:2]) - before) / rounds
    expected(run)
    now = time.time()
    window = {"start": str(now - 60), "end": str(now), "step": "15"}
    questions: Mapping[str, Callable[[], Any]] = {
        "the vote in one line, unguarded": lambda: run.api("query", query=PLAIN),
        "a minute of outliers, 5 steps": lambda: run.api("query_range", query="canaryd:fleet_outlier", **window),
        "a minute of voters, 5 steps": lambda: run.api("query_range", query="canaryd:fleet_voters", **window),
        "a minute of fingerprints counted, 5 steps": lambda: run.api(
            "query_range", query="count by (model, probe, stack) (canaryd_golden_fingerprint)", **window
        ),
    }
    return Size(
        nodes=run.nodes,
        series=int(run.value('sum(scrape_samples_scraped{job="canaryd"})')),
        rounds=totals,
        rules={name: statistics.median(seconds) for name, seconds in each.items()},
        cpu=cpu,
        resident=run.process.memory_info().rss,
        queries={name: statistics.median(seconds(ask) for _ in range(3)) for name, ask in questions.items()},
        others=others.share,
    )


def storm(run: Run) -> list[float]:
    """Change 40 % of the fleet at once; return the seconds of the next three rounds."""
    with urllib.request.urlopen(f"http://{run.address}/storm", timeout=300):
        pass
    odd = run.nodes * 2 // 5 * DEVICES * len(PROBES)
    run.until(lambda: run.value("count(canaryd:fleet_outlier)") >= odd * 0.8, 900.0)  # rare stacks lose their majority
    return run.rounds(3)[0]


def plot(sizes: Sequence[Size]) -> str:
    """Return an SVG image: seconds of the slowest round over the number of nodes."""
    wide, high, left, bottom, top = 640, 300, 60, 40, 30
    points = [(s.nodes, max(s.rounds)) for s in sizes]
    most_x = max(s.nodes for s in sizes)
    most_y = max(y for _, y in points) * 1.1

    def x(value: float) -> float:
        return left + value / most_x * (wide - left - 20)

    def y(value: float) -> float:
        return high - bottom - value / most_y * (high - bottom - top)

    step = next(s for s in (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0) if most_y / s <= 8)
    text = 'font-family="sans-serif" font-size="12" fill="#444"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}">']
    parts.append('<rect width="100%" height="100%" fill="#fff"/>')
    for k in range(int(most_y / step) + 1):
        parts.append(f'<path d="M{left} {y(k * step):.1f}H{wide - 20}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 8}" y="{y(k * step) + 4:.1f}" text-anchor="end" {text}>{k * step:g} s</text>')
    for size in sizes:
        label = (
            f'<text x="{x(size.nodes):.1f}" y="{high - bottom + 18}" text-anchor="middle" {text}>{size.nodes:,}</text>'
        )
        parts.append(label if size.nodes * 20 >= most_x else "")
    parts.append(f'<text x="{(wide + left) / 2}" y="{high - 6}" text-anchor="middle" {text}>nodes of 8 devices</text>')
    path = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in points)
    parts.append(f'<polyline points="{path}" fill="none" stroke="#2563c9" stroke-width="2"/>')
    parts += [f'<circle cx="{x(a):.1f}" cy="{y(b):.1f}" r="3" fill="#2563c9"/>' for a, b in points]
    parts.append(f'<text x="{left + 12}" y="{top}" {text}>a round of all rules (slowest)</text>')
    return "".join(parts) + "</svg>\n"


def report(sizes: Sequence[Size], stormy: Sequence[float], limit: float) -> str:
    """Return the body of the report. `stormy`: seconds of the rounds after the change; `limit`: allowed seconds."""
    rows = [
        (
            f"{s.nodes:,}",
            f"{s.nodes * DEVICES * len(PROBES):,}",
            f"{s.series:,}",
            f"{statistics.median(s.rounds):.2f} s ({max(s.rounds):.2f} s)",
            f"{1e6 * statistics.median(s.rounds) / (s.nodes * DEVICES * len(PROBES)):.1f} µs",
            f"{s.cpu:.1f} s",
            f"{s.resident / 2**30:.2f} GiB",
            f"{100 * s.others:.0f} %",
        )
        for s in sizes
    ]
    header = (
        "nodes", "fingerprints", "series scraped", "a round: median (slowest)", "per fingerprint",
        "CPU per round, scrapes included", "Prometheus resident", "others used",
    )  # fmt: skip
    largest = sizes[-1]
    worst = max([*largest.rounds, *stormy])
    names = list(largest.queries)
    slow = sorted(largest.rules.items(), key=lambda item: -item[1])[:8]
    said = "reached" if worst < limit else "missed"
    return "\n".join(
        [
            f"At {largest.nodes:,} nodes x {DEVICES} devices the slowest round took {worst:.1f} s of the {limit:.0f} s",
            f"that the shipped interval gives it, with 40 % of the fleet odd at once included: {said}.",
            "Where others used the machine as well, times are rather too long than too short.",
            "",
            "![growth](fleet_vote.svg)",
            "",
            table(header, rows),
            f"With 40 % of {largest.nodes:,} nodes odd at once: {', '.join(f'{s:.1f} s' for s in stormy)}.",
            "",
            f"The slowest rules at {largest.nodes:,} nodes, medians:",
            "",
            table(("rule", "seconds"), [(f"`{name}`", f"{seconds:.2f}") for name, seconds in slow]),
            "Questions, medians of 3:",
            "",
            table(
                ("nodes", *names), [(f"{s.nodes:,}", *(f"{s.queries[name]:.2f} s" for name in names)) for s in sizes]
            ),
            "",
        ]
    )


def main() -> None:
    """Measure every size and write the report."""
    parser = options(__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=[100, 1000, 3000, 10_000])
    parser.add_argument("--rounds", type=int, default=6, help="rounds of the rules at each size (default: %(default)s)")
    chosen = parser.parse_args()
    (minutes,) = re.findall(r"interval: (\d+)m", RULES.read_text())
    facts = machine() | {"prometheus": _version(), "processors": str(os.cpu_count())}
    sizes: list[Size] = []
    stormy: list[float] = []
    for nodes in chosen.nodes:
        with tempfile.TemporaryDirectory() as directory:
            run = Run(Path(directory), nodes, INTERVAL)
            try:
                sizes.append(measure(run, chosen.rounds))
                print(json.dumps(sizes[-1]._asdict()), flush=True)
                if nodes == chosen.nodes[-1]:
                    stormy = storm(run)
            finally:
                run.stop()
    chosen.out.mkdir(parents=True, exist_ok=True)
    (chosen.out / "fleet_vote.svg").write_text(plot(sizes))
    data = {"sizes": [s._asdict() for s in sizes], "storm": stormy, "interval": INTERVAL, "scrape_interval": SCRAPE}
    write(
        chosen.out, "fleet_vote", "What the fleet vote costs", facts, report(sizes, stormy, 60.0 * int(minutes)), data
    )


def _version() -> str:
    done = subprocess.run(["prometheus", "--version"], capture_output=True, text=True, check=False)
    return (done.stdout or done.stderr).partition(" (")[0].removeprefix("prometheus, version ")


if __name__ == "__main__":
    main()
