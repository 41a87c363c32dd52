"""Measure what canaryd costs a server on the same device at the default budget: throughput, 99th percentile of latency.

The server is an imitation. On a CPU it is one process per core that multiplies matrices in one thread; on an
accelerator one process that decodes through a stack of float16 layers. It first works as fast as it can. Then requests
arrive at fixed moments, whether or not the last one is done; latency counts from the arrival.

Each turn measures the server twice, in alternating order: without canaryd and beside a daemon. Slow changes of the
machine's speed, as on virtual machines, thus affect both sides. There are two daemons. The first is at rest (default
settings: telemetry, kernel log, a scrape every 15 s). It never stops; after its turn it moves to a core that the server
does not use. The second runs rounds of tests, each as by default: at low priority and in bursts. SIGSTOP stops it
between two rounds, and the server is measured for as long as a round lasts.

An hour consists of rest and rounds. The part of the rounds follows from the duration of a round, the default period and
`budget.share`. The benchmark is harder than the default, in which rounds also wait while the device is busy.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks import common
from benchmarks.footprint import daemon
from canaryd.config.settings import BudgetConfig
from canaryd.engine import budget
from canaryd.worker.numeric.tensors import torch

UTILISATION = 0.6
"""Fraction of the server's capacity at which its latency is measured."""
THROUGHPUT, LATENCY = 0.995, 1 / 1.01
"""Targets: smallest ratio of throughput with to without canaryd; smallest ratio of latency without to with canaryd."""
SIZE, LAYERS, BATCH = 4096, 32, 16
"""Sizes of the stack on an accelerator: width of a layer, number of layers, rows of a batch."""
PROBES = ("exact_integer", "exact_matmul", "exact_attention", "exact_canary", "recorded_kernels")
"""Names of the probes in a round."""
SCRAPE = 15.0
"""Seconds between two scrapes."""
NICE = 7
"""Nice level of the daemon. It gives the weight 215 to 1024, nearly as the daemon's unit does (CPUWeight=20 to 100)."""
RESAMPLES = 1000
"""Number of bootstrap resamples of the turns for an interval."""
REST, ROUNDS = 0.5, 2.0
"""Seconds of one measurement beside a daemon at rest, and beside rounds. A daemon at rest costs little: short turns
keep slow changes of the machine's speed equal on both sides."""
FEWER = 80
"""Number of turns beside a daemon at rest for each turn beside a round, which lasts much longer."""
WARM_UP = 0.1
"""Seconds of work before each measurement that are not counted, because the server was idle before."""
CALIBRATION = 10.0
"""Seconds for which the server's capacity is measured."""
PATIENCE = 600.0
"""Maximum seconds to wait for one round. The first round also records the results for later comparisons."""


class Model:
    """The work of one request."""

    def __init__(self, device: str, service: float) -> None:
        """Choose the amount of work of one request: `service` seconds while nothing else uses the machine."""
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.device, self.count = device, 1
        if device == "cpu":
            self._layers = [torch.randn(192, 192) / 192**0.5]
            self._input = torch.randn(192, 192)
        else:
            self._layers = [torch.randn(SIZE, SIZE, device=device, dtype=torch.float16) / SIZE for _ in range(LAYERS)]
            self._input = torch.randn(BATCH, SIZE, device=device, dtype=torch.float16)
        self.answer()
        took = min(common.seconds(self.answer) for _ in range(20))
        self.count = max(1, round(service / took))

    def answer(self) -> None:
        """Compute one request and wait for its result."""
        for _ in range(self.count):
            x = self._input
            for layer in self._layers:
                x = x @ layer
        float(x[0, 0])


def serve(device: str, service: float) -> None:
    """Answer lines on standard input: "seconds rate". Rate: requests per second, 0 for as many as possible."""
    model = Model(device, service)
    print(json.dumps(model.count), flush=True)
    for line in sys.stdin:
        length, rate = map(float, line.split())
        began = time.perf_counter()
        latencies: list[float] = []
        number = 0
        # Whoever arrives in time is served, however late that is.
        while (arrival := number / rate if rate else time.perf_counter() - began) < length:
            if (early := arrival - (time.perf_counter() - began)) > 0:
                time.sleep(early)
            model.answer()
            latencies.append(time.perf_counter() - began - arrival)
            number += 1
        spent = time.perf_counter() - began
        print(json.dumps({"rate": number / spent, "latencies": latencies if rate else []}), flush=True)


class Server:
    """The imitation of a server: one or more processes that run `serve`."""

    def __init__(self, device: str, processes: int, service: float) -> None:
        argv = [sys.executable, "-m", "benchmarks.beside", "--serve", "--device", device, "--request", str(service)]
        self._processes = [
            subprocess.Popen(argv, cwd=common.ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            for _ in range(processes)
        ]
        self.products = [self._heard(p) for p in self._processes]
        self.pids = [p.pid for p in self._processes]

    def _heard(self, process: subprocess.Popen[str]) -> Any:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise SystemExit("the imitation of a server ended; its complaint stands above")
        return json.loads(line)

    def ask(self, length: float, rate: float) -> tuple[float, list[float]]:
        """Return (requests per second of all processes, latencies in seconds); `rate`: requests per second of each."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(f"{length} {rate}\n")
            process.stdin.flush()
        found = [self._heard(p) for p in self._processes]
        return sum(f["rate"] for f in found), [each for f in found for each in f["latencies"]]

    def close(self) -> None:
        """Kill all processes of the server."""
        for process in self._processes:
            process.kill()
            process.wait()


@dataclass
class Beside:
    """A daemon that always runs, on the server's cores during a turn, else on a core of its own."""

    process: psutil.Process
    metrics: str
    cores: Sequence[int]
    """The server's cores."""
    aside: int
    """The core that the server does not use."""
    measured: float = 0.0
    """Seconds that the daemon's turns have lasted in all."""
    worked: float = 0.0
    """Processor seconds that the daemon and its workers used in these turns."""

    def begin(self) -> None:
        """Move the daemon to the server's cores."""
        self._move(self.cores)

    def end(self) -> None:
        """Move the daemon to its own core."""
        self._move([self.aside])

    def _move(self, cores: Sequence[int]) -> None:
        _pin(self.process, cores)  # first, for the sake of children that are born meanwhile
        for child in self.process.children(recursive=True):
            _pin(child, cores)

    def goes_on(self) -> bool:
        """Return whether a round of this turn is still running; always False for a daemon at rest."""
        return False

    def processor_seconds(self) -> float:
        """Return the processor seconds that the daemon and its workers have used so far."""
        seconds = sum(self.process.cpu_times()[:4])
        for child in self.process.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                seconds += sum(child.cpu_times()[:4])
        return float(seconds)

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Keep the daemon on the server's cores within this context, and add up its time."""
        self.begin()
        try:
            begun, before = time.monotonic(), self.processor_seconds()
            yield
            self.measured += time.monotonic() - begun
            self.worked += self.processor_seconds() - before
        finally:
            self.end()

    def page(self) -> str:
        """Return the daemon's metrics page as text."""
        with urllib.request.urlopen(self.metrics, timeout=30) as answer:  # noqa: S310  an address of our own making
            return str(answer.read(), "utf-8")

    def values(self, name: str, *words: str) -> list[float]:
        """Return the values of all series of a metric whose line contains all of `words`."""
        lines = (line for line in self.page().splitlines() if line.startswith(f"{name}{{"))
        return [float(line.rpartition(" ")[2]) for line in lines if all(word in line for word in words)]

    def wait_for_a_round(self) -> None:
        """Wait until the daemon's budget has counted one more round."""
        before, until = self.spent(), time.monotonic() + PATIENCE
        while self.spent() == before:
            if time.monotonic() > until:
                raise SystemExit(f"canaryd ended no round within {PATIENCE:g} s:\n{self.page()}")
            time.sleep(1.0)

    def spent(self) -> float:
        """Return the seconds of device time that rounds have used so far."""
        return sum(self.values("canaryd_budget_spent_seconds_total"))

    def be_scraped(self) -> None:
        """Scrape the daemon forever from its own core, every `SCRAPE` seconds."""
        os.sched_setaffinity(0, [self.aside])
        while True:
            with contextlib.suppress(OSError):
                self.page()
            time.sleep(SCRAPE)


@dataclass
class Stopped(Beside):
    """A daemon that runs rounds only during its turns. It is stopped between two rounds, never within one."""

    def begin(self) -> None:
        """Resume the daemon and wait until a round has begun."""
        self.process.resume()
        until = time.monotonic() + PATIENCE
        while not self.goes_on():
            if time.monotonic() > until:
                raise SystemExit(f"canaryd began no round within {PATIENCE:g} s")
            time.sleep(0.05)

    def end(self) -> None:
        """Wait until the round has ended and stop the daemon."""
        while self.goes_on():
            time.sleep(0.05)
        self.process.suspend()

    def goes_on(self) -> bool:
        """Return whether a round is running: only its workers have a nice level above `NICE`."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return any(child.nice() > NICE for child in self.process.children())
        return False


def settings(directory: Path, device: str, probes: Sequence[str], *, rounds: bool) -> Path:
    """Write a daemon's configuration and return its path: the defaults or, with `rounds`, rounds without a pause."""
    each: dict[str, Any] = {name: {"enabled": name in probes} for name in PROBES}
    content: dict[str, Any] = {"devices": {"include": [device]}, "probes": each}
    if rounds:
        content["budget"] = {"share": 1, "busy": 1}
        each |= {name: {"period": "1s"} for name in probes} | {"host_telemetry": {"enabled": False}}
    path = directory / f"{'rounds' if rounds else 'rest'}.yaml"
    path.write_text(json.dumps(content))
    return path


@dataclass(frozen=True)
class Turn:
    """The results of one turn. The keys say whether a daemon was beside the server."""

    rates: dict[bool, float]
    latencies: dict[bool, Any]
    """One-dimensional tensors of latencies in seconds."""


def quantile(parts: Sequence[tuple[float, Sequence[Any]]], q: float = 0.99) -> float:
    """Return the quantile `q` of a mixture; `parts`: (weight, pieces of the samples) of each part."""
    whole = [(weight, torch.cat(list(pieces))) for weight, pieces in parts if weight]
    values, order = torch.cat([values for _, values in whole]).sort()
    weights = torch.cat([torch.full_like(values, weight / len(values)) for weight, values in whole])[order]
    passed = weights.cumsum(0)
    return float(values[min(len(values) - 1, int(torch.searchsorted(passed, q * passed[-1])))])


def measure(server: Server, beside: Beside, rate: float, turns: int, length: float) -> list[Turn]:
    """Return the results of `turns` turns: throughput and then latency, each for `length` seconds, on both sides.

    While a round goes on, the side beside the daemon is measured again, and the other side as often. `rate`: requests
    per second of each process for the latency.
    """
    found = []
    for number in range(turns):
        rates: dict[bool, list[float]] = {False: [], True: []}
        latencies: dict[bool, list[float]] = {False: [], True: []}

        def once(present: bool, rates: Any = rates, latencies: Any = latencies) -> None:
            server.ask(WARM_UP, 0.0)
            rates[present].append(server.ask(length, 0.0)[0])
            latencies[present] += server.ask(length, rate)[1]

        first = bool(number % 2)
        if first:
            once(False)
        with beside.turn():
            once(True)
            while beside.goes_on():
                once(True)
        while len(rates[False]) < len(rates[True]):
            once(False)
        turn = Turn(
            {present: statistics.fmean(rates[present]) for present in rates},
            {present: torch.tensor(latencies[present], dtype=torch.float64) for present in latencies},
        )
        found.append(turn)
        if not (number + 1) % max(1, turns // 20):
            print(f"turn {number + 1}: {turn.rates[False]:.1f} and {turn.rates[True]:.1f}/s", flush=True)
    return found


def throughput(part: float, rest: Sequence[Turn], rounds: Sequence[Turn]) -> float:
    """Return the ratio of throughput with canaryd to that without, if rounds take the fraction `part` of the time."""
    ratios = [sum(t.rates[True] for t in turns) / sum(t.rates[False] for t in turns) for turns in (rest, rounds)]
    return (1 - part) * ratios[0] + part * ratios[1]


def latency(part: float, rest: Sequence[Turn], rounds: Sequence[Turn]) -> float:
    """Return the ratio of p99 latency without to that with canaryd, if rounds take the fraction `part` of the time."""
    without = [(1 - part, [t.latencies[False] for t in rest]), (part, [t.latencies[False] for t in rounds])]
    beside = [(1 - part, [t.latencies[True] for t in rest]), (part, [t.latencies[True] for t in rounds])]
    return quantile(without) / quantile(beside)


def mixed(
    of: Callable[[float, Sequence[Turn], Sequence[Turn]], float],
    part: float,
    rest: Sequence[Turn],
    rounds: Sequence[Turn],
) -> common.Ratio:
    """Return the ratio `of` (throughput or latency) for all turns, with a bootstrap interval over turns."""
    rng = random.Random(0)
    found = sorted(
        of(part, rng.choices(rest, k=len(rest)), rng.choices(rounds, k=len(rounds))) for _ in range(RESAMPLES)
    )
    tail = RESAMPLES * 25 // 1000
    return common.Ratio(of(part, rest, rounds), found[tail], found[-1 - tail], len(rest) + len(rounds))


@dataclass(frozen=True, kw_only=True)
class Account:
    """The device time that rounds need, and the time that the budget allows."""

    one: float
    """Seconds of device time that one round takes."""
    wanted: float
    """Rounds per hour at the default periods."""
    taken: float
    """Fraction of the device's time that a round uses while it lasts."""

    @property
    def share(self) -> float:
        """Fraction of the device's time that rounds use at the default periods and the default budget."""
        return min(BudgetConfig().share, self.wanted * self.one / 3600)

    def part(self, share: float) -> float:
        """Return the fraction of an hour in which rounds run, if they use the fraction `share` of the device's time."""
        return min(1.0, share / self.taken)


def report(
    rest: Sequence[Turn], rounds: Sequence[Turn], account: Account, others: float, worked: float
) -> tuple[str, dict[str, str]]:
    """Return (tables, judgement of each target). `worked`: fraction of the server's cores that a daemon at rest used.

    `others`: fraction of the processor time that other processes used.
    """
    disturbed = others >= common.DISTURBED
    part, most = account.part(account.share), account.part(BudgetConfig().share)
    rows: list[list[object]] = []
    judged: dict[str, str] = {}
    for name, weight in (
        ("defaults", part),
        ("defaults, the whole share", most),
        ("daemon at rest", 0.0),
        ("rounds back to back", 1.0),
    ):
        rates, waits = (mixed(of, weight, rest, rounds) for of in (throughput, latency))
        if not judged:
            judged = {"throughput": rates.against(THROUGHPUT), "p99": waits.against(LATENCY)}
            judged = dict.fromkeys(judged, "not resolved, disturbed") if disturbed else judged
            rows.append([name, rates, judged["throughput"], waits, judged["p99"]])
        else:
            rows.append([name, rates, "", waits, ""])
    ratios = common.table(
        ["", "throughput with / without (95 %)", f"≥ {THROUGHPUT}", "p99 without / with (95 %)", f"≥ {LATENCY:.4f}"],
        rows,
    )
    columns = [[t.latencies[present] for t in turns] for turns in (rest, rounds) for present in (False, True)]
    percentiles = common.table(
        ["latency, ms", "without", "daemon at rest", "without", "rounds back to back"],
        [
            [name, *(f"{1000 * quantile([(1, column)], q):.1f}" for column in columns)]
            for name, q in (("median", 0.5), ("90 %", 0.9), ("99 %", 0.99), ("99.9 %", 0.999))
        ],
    )
    told = (
        f"\n{len(rest)} turns beside a daemon at rest, {len(rounds)} beside rounds. A round takes {account.one:.2f} s "
        f"of the device's time, and the default\nperiods want {account.wanted:g} an hour: "
        f"{100 * account.wanted * account.one / 3600:.2f} % (the default budget allows "
        f"{100 * BudgetConfig().share:g} %). Beside the server a round takes\n"
        f"{100 * account.taken:.2f} % while it lasts; so rounds are {100 * part:.2f} % of an hour, and "
        f"{100 * most:.2f} % where the whole share is used.\n"
        f"The daemon and its workers took {100 * worked:.2f} % of these cores' time at rest.\n"
        f"Others used {100 * others:.1f} % of the processor time meanwhile"
        f"{f': more than {100 * common.DISTURBED:g} %, so nothing is judged' if disturbed else ''}.\n\n"
    )
    return f"{ratios}\n{percentiles}{told}", judged


def main() -> None:
    """Start the server and both daemons, measure in turns, and write the report."""
    parser = common.options(__doc__)
    parser.add_argument("--turns", type=int, default=500, help="beside a daemon at rest (default: %(default)d)")
    # As long as a step of decoding takes.
    parser.add_argument("--request", type=float, default=0.02, help="seconds of a request (default: %(default)g)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="what serves and is tested")
    parser.add_argument("--probes", nargs="+", choices=PROBES, default=PROBES, help="what a round is made of")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.device, arguments.request)
        return
    *cores, aside = sorted(psutil.Process().cpu_affinity())
    if not cores:
        raise SystemExit("one core for the server and one for the daemon whose turn it is not are wanted; there is one")
    os.sched_setaffinity(0, cores)
    facts = common.machine()
    processes = len(cores) if arguments.device == "cpu" else 1
    with tempfile.TemporaryDirectory(prefix="canaryd-") as directory, contextlib.ExitStack() as stack:
        running: list[Beside] = []
        for kind in (Beside, Stopped):
            config = settings(Path(directory), arguments.device, arguments.probes, rounds=kind is Stopped)
            process, metrics = stack.enter_context(daemon(config))
            process.nice(NICE)
            running.append(kind(process, metrics, cores, aside))
        rest, rounds = running
        assert isinstance(rounds, Stopped)
        while not all(_up(beside) for beside in running):
            time.sleep(0.5)
        for beside in running:
            beside.wait_for_a_round()  # it learns what later ones compare
        period = min(rest.values("canaryd_probe_period_seconds", f'probe="{arguments.probes[0]}"'))
        rest.end()
        rounds.end()
        stack.callback(rounds.process.resume)  # a stopped daemon does not hear that it should end
        server = Server(arguments.device, processes, arguments.request)
        stack.callback(server.close)
        rate = UTILISATION * server.ask(CALIBRATION, 0.0)[0] / processes
        threading.Thread(target=rest.be_scraped, daemon=True).start()
        ours = [beside.process for beside in running] + [psutil.Process(pid) for pid in server.pids]
        os.sched_setaffinity(0, [aside])  # what is done between two measurements warms and cools none of the others
        with common.Bystanders(also=ours, cores=cores) as bystanders:
            beside_rest = measure(server, rest, rate, arguments.turns, REST)
            beside_rounds = measure(server, rounds, rate, math.ceil(arguments.turns / FEWER), ROUNDS)
        server.close()
        os.sched_setaffinity(0, [*cores, aside])
    # As `budget.device_seconds` counts it; a worker that pauses has an accelerator only while it works.
    spent = rounds.worked / (os.cpu_count() or 1) if arguments.device == "cpu" else budget.worked(rounds.measured)
    account = Account(one=spent / len(beside_rounds), wanted=3600 / period, taken=spent / rounds.measured)
    worked = rest.worked / rest.measured / len(cores)
    body, judged = report(beside_rest, beside_rounds, account, bystanders.share, worked)
    if arguments.device == "cuda":
        name, title = "beside-cuda", "Decoding on an accelerator beside canaryd"
    else:
        name, title = "beside", "A server on the same cores beside canaryd"
    server_is = f"{processes} processes, requests of {arguments.request:g} s, {UTILISATION:g} of capacity"
    common.write(
        arguments.out,
        name,
        title,
        {**facts, "server": server_is},
        body,
        {
            "judged": judged,
            "account": vars(account),
            "worked": worked,
            "others": bystanders.share,
            "turns": {
                name: [
                    {
                        "rates": [t.rates[present] for present in (False, True)],
                        "p99": [quantile([(1, [t.latencies[present]])]) for present in (False, True)],
                        "requests": [len(t.latencies[present]) for present in (False, True)],
                    }
                    for t in turns
                ]
                for name, turns in (("rest", beside_rest), ("rounds", beside_rounds))
            },
        },
    )


def _pin(process: psutil.Process, cores: Sequence[int]) -> None:
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{process.pid}/task").iterdir():
            with contextlib.suppress(OSError):  # it has just ended
                os.sched_setaffinity(int(task.name), cores)


def _up(beside: Beside) -> bool:
    with contextlib.suppress(OSError):
        return bool(beside.page())
    return False


if __name__ == "__main__":
    main()
