"""What a scrape costs the scraper: 16 devices, all series, 5 scrapers at once, in each format and encoding.

The page is that of the tests' node in trouble (tests/full_node.py): the largest there is. A process of its own serves
it with the daemon's server and makes it anew every 5 s, which is as often as the daemon ever sweeps (every 15 s by
default). What the daemon does besides, judging and storing, is not part of this. The scrapers are another process, each
with a connection that it keeps, as Prometheus does; they ask at random moments, once a second on average. A scrape
takes from the request's first byte to the answer's last; nothing is unpacked or parsed meanwhile.
"""

from __future__ import annotations

import gc
import http.client
import math
import multiprocessing as mp
import random
import statistics
import sys
import threading
import time
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


def main() -> None:
    """Serve, scrape in blocks, write; end with 1 where a format misses the target."""
    parser = common.options(__doc__)
    parser.add_argument("--devices", type=int, default=16)
    parser.add_argument("--scrapers", type=int, default=5)
    parser.add_argument("--blocks", type=int, default=10, help="undisturbed blocks per format (default: %(default)d)")
    parser.add_argument("--scrapes", type=int, default=20, help="per scraper and block (default: %(default)d)")
    arguments = parser.parse_args()
    facts = common.machine()
    page = families.render(node(arguments.devices))
    series = sum(1 for line in page.text.body.splitlines() if not line.startswith(b"#"))
    ours, theirs = mp.get_context("spawn").Pipe()
    server = mp.get_context("spawn").Process(target=serve, args=(arguments.devices, theirs))
    server.start()
    port = ours.recv()
    gc.disable()  # the scraper's own pauses are none of the server's
    rows, data, missed = [], {}, False
    for name, headers in FORMATS.items():
        blocks, note = common.undisturbed(
            lambda headers=headers: block(port, headers, arguments.scrapers, arguments.scrapes),  # type: ignore[misc]
            arguments.blocks,
            also=[psutil.Process(server.pid)],
        )
        times = [1e3 * seconds for each in blocks for seconds, _ in each]
        low, high = common.interval(times, lambda sample: percentile(list(sample), 0.99))
        p99 = percentile(times, 0.99)
        missed |= p99 > TARGET
        verdict = note or ("reached" if high <= TARGET else "missed" if low > TARGET else "not resolved")
        size = statistics.median(count for each in blocks for _, count in each)
        rows.append(
            [
                name,
                f"{size:,.0f}",
                f"{statistics.median(times):.1f} ms",
                f"{p99:.1f} ms ({low:.1f} to {high:.1f})",
                f"{max(times):.1f} ms",
                f"{len(times):,}",
                f"{verdict} (≤ {TARGET:g} ms)",
            ]
        )
        data[name] = {"bytes": size, "milliseconds": times, "p99": [p99, low, high], "note": note}
    ours.send("end")
    rendering = [1e3 * seconds for seconds in ours.recv()]
    server.join()
    body = common.table(["format", "bytes", "median", "p99 (95 % interval)", "longest", "scrapes", "target"], rows)
    body += (
        f"\n{arguments.devices} devices with {series:,} series, {series / arguments.devices:.0f} each; "
        f"{arguments.scrapers} scrapers, each once a second on average. Making both formats anew took\n"
        f"{statistics.median(rendering):.0f} ms (median, in the same process, every {inventory.SWEEP:g} s): a scrape "
        "that comes meanwhile shares the interpreter with it, and\nthe first one that takes gzip afterwards packs it.\n"
    )
    facts["series per device"] = f"{series / arguments.devices:.0f}"
    common.write(
        arguments.out, "scrape", "Scrapes of a full node", facts, body, {"formats": data, "rendering_ms": rendering}
    )
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
