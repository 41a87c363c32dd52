"""What a scrape costs the scraper: 16 devices, all series, 5 scrapers at once, in each format and encoding.

The page is that of the tests' node in trouble (tests/full_node.py): the largest there is. A process of its own serves
it with the daemon's server and makes it anew every 5 s, which is as often as the daemon ever sweeps (every 15 s by
default). What the daemon does besides, judging and storing, is not part of this. The scrapers are another process, each
with a connection that it keeps, as Prometheus does; they ask at random moments, once a second on average. A scrape
takes from the request's first byte to the answer's last; nothing is unpacked or parsed meanwhile. With `--beside DIR`,
a checkout of another version: its page and server, as its own benchmark makes them, are scraped in turn.
"""

from __future__ import annotations

import gc
import http.client
import inspect
import json
import math
import os
import random
import select
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks import common
from canaryd.daemon import daemon, inventory
from canaryd.metrics import families
from canaryd.metrics.exposition import OPENMETRICS
from canaryd.web.server import Server
from tests.full_node import node

TARGET = 20.0
"""Milliseconds, of 99 in 100 scrapes."""
PERIOD = 1.0
"""Seconds between two scrapes of one scraper, on average."""
FORMATS: dict[str, dict[str, str]] = {
    "text": {},
    "OpenMetrics": {"Accept": OPENMETRICS},
    "text, gzip": {"Accept-Encoding": "gzip"},
    "OpenMetrics, gzip": {"Accept": OPENMETRICS, "Accept-Encoding": "gzip"},
}


def serve(devices: int, pipe: Any) -> None:
    """Serve, say where, make the page anew until told to end; then say how long each time took, in seconds."""
    sys.setswitchinterval(daemon.SWITCH)
    snapshot = node(devices)
    pages = [families.render(snapshot)]
    server = Server("127.0.0.1", 0, {"/metrics": lambda headers: families.answer(pages[0], headers)})
    server.start()
    pipe.send(server.port)
    rendering = []
    while not pipe.poll(inventory.SWEEP):
        started = time.perf_counter()
        pages[0] = families.render(snapshot)
        rendering.append(time.perf_counter() - started)
    server.close()
    pipe.send(rendering)


class Pipe:
    """Standard input and output of a process that serves, as `serve` takes them: lines of JSON."""

    @staticmethod
    def send(what: object) -> None:
        """Write a line."""
        print(json.dumps(what), flush=True)

    @staticmethod
    def poll(seconds: float) -> bool:
        """Tell whether a line or the end comes within so many seconds."""
        return bool(select.select([sys.stdin], [], [], seconds)[0])


class Served:
    """A tree's server in a process of its own."""

    def __init__(self, tree: Path, devices: int) -> None:
        """Start it; end the program where it does not come up."""
        # The other tree's `benchmarks.scrape` has the function alone: `Pipe` is this one's, handed over as source.
        code = f"import json, select, sys\n{inspect.getsource(Pipe)}\nfrom benchmarks.scrape import serve\n"
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"{code}serve({devices}, Pipe())"],
            cwd=tree,
            env=os.environ | {"PYTHONPATH": str(tree)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.process, self.port = psutil.Process(self._process.pid), self._said()

    def _said(self) -> Any:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise SystemExit("a server ended; its complaint stands above")
        return json.loads(line)

    def end(self) -> list[float]:
        """End it; return how long each making of the page took, in seconds."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        return list(self._said())


def scrape(port: int, headers: dict[str, str], count: int, seed: int, into: list[tuple[float, int]]) -> None:
    """Scrape `count` times at random moments; append seconds and bytes of each."""
    moments = random.Random(seed)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.connect()
    for _ in range(count):
        time.sleep(moments.expovariate(1.0 / PERIOD))
        started = time.perf_counter()
        connection.request("GET", "/metrics", headers={"Accept-Encoding": "identity", **headers})
        answer = connection.getresponse()
        body = answer.read()
        into.append((time.perf_counter() - started, len(body)))
        assert answer.status == 200
    connection.close()


def block(port: int, headers: dict[str, str], scrapers: int, count: int) -> list[tuple[float, int]]:
    """Return seconds and bytes of `count` scrapes by each of so many scrapers at once."""
    found: list[tuple[float, int]] = []
    seeds = [random.randrange(2**32) for _ in range(scrapers)]
    threads = [threading.Thread(target=scrape, args=(port, headers, count, seed, found)) for seed in seeds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def percentile(values: list[float], share: float) -> float:
    """Return the smallest value that at least this share of all does not exceed."""
    return sorted(values)[math.ceil(share * len(values)) - 1]


def row(name: str, version: str, blocks: list[list[tuple[float, int]]], note: str) -> tuple[list[Any], dict[str, Any]]:
    """Return the line of a table for a format of a version, and what it rests on."""
    times = [1e3 * seconds for each in blocks for seconds, _ in each]
    low, high = common.interval(times, lambda sample: percentile(list(sample), 0.99))
    p99 = percentile(times, 0.99)
    verdict = note or ("reached" if high <= TARGET else "missed" if low > TARGET else "not resolved")
    size = statistics.median(count for each in blocks for _, count in each)
    told = [
        *(name, version, f"{size:,.0f}", f"{statistics.median(times):.1f} ms"),
        f"{p99:.1f} ms ({low:.1f} to {high:.1f})",
        *(f"{max(times):.1f} ms", f"{len(times):,}", f"{verdict} (≤ {TARGET:g} ms)"),
    ]
    return told, {"bytes": size, "milliseconds": times, "p99": [p99, low, high], "note": note}


def main() -> None:
    """Serve, scrape in blocks, write; end with 1 where a format misses the target."""
    parser = common.options(__doc__)
    parser.add_argument("--devices", type=int, default=16)
    parser.add_argument("--scrapers", type=int, default=5)
    parser.add_argument("--blocks", type=int, default=10, help="undisturbed blocks per format (default: %(default)d)")
    parser.add_argument("--scrapes", type=int, default=20, help="per scraper and block (default: %(default)d)")
    parser.add_argument("--beside", type=Path, help="checkout of another version, scraped in turn")
    arguments = parser.parse_args()
    facts = common.machine()
    trees = {"this one": common.ROOT} | ({arguments.beside.name: arguments.beside} if arguments.beside else {})
    page = families.render(node(arguments.devices))
    series = sum(1 for line in page.text.body.splitlines() if not line.startswith(b"#"))
    gc.disable()  # the scraper's own pauses are none of the server's
    rows, data, missed = [], {}, False
    rendering: dict[str, list[float]] = {name: [] for name in trees}
    for name, headers in FORMATS.items():
        for version, tree in trees.items():
            server = Served(tree.resolve(), arguments.devices)
            blocks, note = common.undisturbed(
                lambda headers=headers, port=server.port: block(  # type: ignore[misc]
                    port, headers, arguments.scrapers, arguments.scrapes
                ),
                arguments.blocks,
                also=[server.process],
            )
            rendering[version] += [1e3 * seconds for seconds in server.end()]
            told, data[f"{name}, {version}"] = row(name, version, blocks, note)
            missed |= version == "this one" and data[f"{name}, {version}"]["p99"][0] > TARGET
            rows.append(told)
    heads = ["format", "version", "bytes", "median", "p99 (95 % interval)", "longest", "scrapes", "target"]
    making = ", ".join(f"{version} {statistics.median(times):.0f} ms" for version, times in rendering.items() if times)
    body = common.table(heads, rows)
    body += (
        f"\n{arguments.devices} devices with {series:,} series, {series / arguments.devices:.0f} each; "
        f"{arguments.scrapers} scrapers, each once a second on average. Making both formats\nanew took {making} "
        f"(median, in the same process, every {inventory.SWEEP:g} s): a scrape that comes meanwhile\nshares the "
        "interpreter with it, and the first one that takes gzip afterwards packs it.\n"
    )
    facts["series per device"] = f"{series / arguments.devices:.0f}"
    title = "scrape-beside" if arguments.beside else "scrape"
    common.write(
        arguments.out, title, "Scrapes of a full node", facts, body, {"formats": data, "rendering_ms": rendering}
    )
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
