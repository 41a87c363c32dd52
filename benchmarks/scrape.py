"""Measure the time of a scrape: 16 devices, all series, 5 scrapers at once, plain and with gzip.

The page is the largest one: that of the tests' node in trouble (tests/full_node.py). A separate process serves it with
the daemon's server and renders it again every 5 s, as often as the daemon can sweep at most (default: every 15 s). The
daemon's other work, judging and storing, is not included. The scrapers are another process; each keeps its connection,
as Prometheus does, and asks at random moments, once a second on average. The time of a scrape is that from the first
byte of the request to the last byte of the answer; nothing is unpacked or parsed in it. `--beside DIR` names a checkout
of another version: its page and server, as its own benchmark makes them, are scraped in turn.
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
from canaryd.web.server import Server
from tests.full_node import node

TARGET = 20.0
"""Largest 99th percentile of the times of scrapes, in milliseconds."""
PERIOD = 1.0
"""Seconds between two scrapes of one scraper, on average."""
FORMATS: dict[str, dict[str, str]] = {
    "text": {},
    "text, gzip": {"Accept-Encoding": "gzip"},
}


def serve(devices: int, pipe: Any) -> None:
    """Serve the page and send its port; render the page every `SWEEP` seconds until told to end; send the times.

    `pipe`: a `Pipe` or a multiprocessing pipe. The times are seconds of each rendering.
    """
    sys.setswitchinterval(daemon.SWITCH)
    snapshot = node(devices)
    pages = [families.page_of(snapshot)]
    route = lambda request: pages[0].answer(request.headers)  # noqa: E731  the page is replaced
    server = Server("127.0.0.1", 0, {"/metrics": route})
    server.start()
    pipe.send(server.port)
    rendering = []
    while not pipe.poll(inventory.SWEEP):
        started = time.perf_counter()
        pages[0] = families.page_of(snapshot)
        rendering.append(time.perf_counter() - started)
    server.close()
    pipe.send(rendering)


class Pipe:
    """Standard input and output of a serving process, with the methods that `serve` needs; it sends lines of JSON."""

    @staticmethod
    def send(what: object) -> None:
        """Write an object as a line of JSON."""
        print(json.dumps(what), flush=True)

    @staticmethod
    def poll(seconds: float) -> bool:
        """Return whether a line or the end of input comes within `seconds`."""
        return bool(select.select([sys.stdin], [], [], seconds)[0])


class Served:
    """The server of a checkout in its own process."""

    def __init__(self, tree: Path, devices: int) -> None:
        """Start the server; exit the program if it does not start."""
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
        """Stop the server; return the seconds of each rendering of the page."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        return list(self._said())


def scrape(port: int, headers: dict[str, str], count: int, seed: int, into: list[tuple[float, int]]) -> None:
    """Scrape `count` times at random moments; append (seconds, bytes) of each scrape to `into`."""
    moments = random.Random(seed)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
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
    """Return (seconds, bytes) of each scrape, for `count` scrapes by each of `scrapers` threads at once."""
    found: list[tuple[float, int]] = []
    seeds = [random.randrange(2**32) for _ in range(scrapers)]
    threads = [threading.Thread(target=scrape, args=(port, headers, count, seed, found)) for seed in seeds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def percentile(values: list[float], share: float) -> float:
    """Return the smallest value such that at least the fraction `share` of all values is not larger."""
    return sorted(values)[math.ceil(share * len(values)) - 1]


def row(name: str, version: str, blocks: list[list[tuple[float, int]]], note: str) -> tuple[list[Any], dict[str, Any]]:
    """Return (row of the table, its data) for one format and version. `note`: a warning that replaces the judgement."""
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
    """Serve, scrape in blocks and write the report; exit with 1 if a format misses the target."""
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
    series = sum(1 for line in page.splitlines() if not line.startswith(b"#"))
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
        f"{arguments.scrapers} scrapers, each once a second on average. Making the page\nanew took {making} "
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
