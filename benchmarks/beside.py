"""What canaryd costs a server beside it at the default budget: throughput and 99th percentile of latency.

The server is an imitation: one process for each core that multiplies matrices in one thread (on an accelerator one
process that decodes through a stack of float16 layers), first as fast as it can, then for requests that arrive at
fixed moments whether or not the last one is done; latency counts from the arrival.

Each turn measures it three times, in an order that the turn draws: without canaryd, beside a daemon at rest (defaults:
telemetry, the kernel log, a scrape), and beside one that runs rounds back to back, each as the defaults make it: nice,
in bursts. Daemons whose turn it is not are stopped by SIGSTOP with all their processes. The account tells what part of
the device's time the rounds take meanwhile; the default budget allows `budget.share` of it, so an hour is made of that
much of the third measurement and of the second for the rest. This asks for more than the defaults do: they also wait
while the device is busy.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks import common
from benchmarks.footprint import daemon
from canaryd.config import BudgetConfig
from canaryd.worker.tensors import torch

SERVICE = 0.002
"""Seconds that one request should take an undisturbed server."""
UTILISATION = 0.6
"""Part of its capacity at which the server's latency is measured."""
THROUGHPUT, LATENCY = 0.995, 1 / 1.01
"""Least ratios: throughput with canaryd over without; latency without over with."""
STATES = ("none", "rest", "rounds")
SIZE, LAYERS, BATCH = 4096, 32, 16
"""Of the stack on an accelerator."""
PROBES = ("exact_integer", "exact_matmul", "exact_attention", "canary_prompts", "recorded_kernels")
"""What a round is made of."""
CATCHES_UP = 3.0
"""Seconds in which a daemon that was stopped does what it has missed; they are not measured."""
PATIENCE = 600.0
"""Seconds for the first round, which learns what later ones compare."""


class Model:
    """The work of one request."""

    def __init__(self, device: str) -> None:
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
        self.count = max(1, round(SERVICE / took))

    def answer(self) -> None:
        """Compute one request, and wait for it."""
        for _ in range(self.count):
            x = self._input
            for layer in self._layers:
                x = x @ layer
        float(x[0, 0])


def serve(device: str) -> None:
    """Answer commands on standard input: seconds and requests per second, 0 for as fast as it can."""
    model = Model(device)
    print(json.dumps(model.count), flush=True)
    for line in sys.stdin:
        length, rate = map(float, line.split())
        began = time.perf_counter()
        latencies: list[float] = []
        number = 0
        while (now := time.perf_counter() - began) < length:
            arrival = number / rate if rate else now
            if arrival >= length:
                break
            if arrival > now:
                time.sleep(arrival - now)
            model.answer()
            latencies.append(time.perf_counter() - began - arrival)
            number += 1
        spent = time.perf_counter() - began
        print(json.dumps({"rate": number / spent, "latencies": latencies if rate else []}), flush=True)


class Server:
    """The imitation: as many processes as it takes."""

    def __init__(self, device: str, processes: int) -> None:
        argv = [sys.executable, "-m", "benchmarks.beside", "--serve", "--device", device]
        self._processes = [
            subprocess.Popen(argv, cwd=common.ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            for _ in range(processes)
        ]
        self.products = [self._heard(p) for p in self._processes]

    def _heard(self, process: subprocess.Popen[str]) -> Any:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise SystemExit("the imitation of a server ended; its complaint stands above")
        return json.loads(line)

    def ask(self, length: float, rate: float) -> tuple[float, list[float]]:
        """Return requests per second of all processes, and the latencies in seconds; `rate` is of each process."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(f"{length} {rate}\n")
            process.stdin.flush()
        found = [self._heard(p) for p in self._processes]
        return sum(f["rate"] for f in found), [each for f in found for each in f["latencies"]]

    def close(self) -> None:
        """End it."""
        for process in self._processes:
            process.kill()
            process.wait()


@dataclass
class Beside:
    """A daemon that can be stopped with all its workers, and for how long it ran."""

    process: psutil.Process
    metrics: str
    since: float
    ran: float = 0.0
    measured: float = 0.0
    """Seconds of its turns, of those that are measured."""
    worked: float = 0.0
    """Processor seconds that it and its workers took in them."""

    def processor_seconds(self) -> float:
        """Return what it and its workers took so far, of workers that run once they have ended."""
        return float(sum(self.process.cpu_times()[:4]))

    def stop(self) -> None:
        """Stop it: first the daemon, so that it starts no worker meanwhile."""
        self.ran += time.monotonic() - self.since
        self.process.suspend()
        for child in self.process.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.suspend()

    def go_on(self) -> None:
        """Let it go on."""
        for child in self.process.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.resume()
        self.process.resume()
        self.since = time.monotonic()

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Let it run for a while, and be scraped once."""
        self.go_on()
        try:
            time.sleep(CATCHES_UP)
            begun, before = time.monotonic(), self.processor_seconds()
            self.page()
            yield
            self.measured += time.monotonic() - begun
            self.worked += self.processor_seconds() - before
        finally:
            self.stop()

    def page(self) -> str:
        """Scrape it."""
        with urllib.request.urlopen(self.metrics, timeout=30) as answer:  # noqa: S310  an address of our own making
            return str(answer.read(), "utf-8")

    def total(self, name: str, *words: str) -> float:
        """Return the sum of all samples of a metric whose line holds all of `words`."""
        lines = (line for line in self.page().splitlines() if line.startswith(f"{name}{{"))
        return sum(float(line.rpartition(" ")[2]) for line in lines if all(word in line for word in words))

    def wait_for(self, rounds: float) -> None:
        """Wait until so many more rounds have been booked."""
        spent = [self.spent()]
        until = time.monotonic() + PATIENCE
        while len(spent) <= rounds:
            time.sleep(1.0)
            if (now := self.spent()) > spent[-1]:
                spent.append(now)
            if time.monotonic() > until:
                raise SystemExit(f"canaryd ended no round within {PATIENCE:g} s:\n{self.page()}")

    def spent(self) -> float:
        """Return the device time that rounds took so far."""
        return self.total("canaryd_budget_spent_seconds_total")


def settings(directory: Path, device: str, probes: Sequence[str], *, rounds: bool) -> Path:
    """Write the configuration of a daemon: defaults; or rounds back to back, each as the defaults make it."""
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
    """One turn: requests per second and latencies by state."""

    rates: dict[str, float]
    latencies: dict[str, list[float]]


def quantile(parts: Sequence[tuple[float, Sequence[float]]], q: float = 0.99) -> float:
    """Return a quantile of a mixture of samples, each part with its weight."""
    weighed = sorted((value, weight / len(values)) for weight, values in parts if values for value in values)
    wanted, passed = q * sum(weight for _, weight in weighed), 0.0
    for value, weight in weighed:
        passed += weight
        if passed >= wanted:
            return value
    return weighed[-1][0]


def measure(server: Server, running: dict[str, Beside], turns: int, length: float) -> list[Turn]:
    """Measure turn by turn; halves of `length` seconds for throughput and latency in each state."""
    rate = 0.0
    found = []
    for number in range(turns):
        order = random.Random(number).sample(STATES, len(STATES))
        turn = Turn({}, {})
        for state in order:
            with running[state].turn() if state in running else contextlib.nullcontext():
                turn.rates[state], _ = server.ask(length / 2, 0.0)
                rate = rate or UTILISATION * turn.rates[state] / len(server.products)
                _, turn.latencies[state] = server.ask(length / 2, rate)
        found.append(turn)
        print(f"turn {number + 1}: {', '.join(f'{s} {turn.rates[s]:.1f}/s' for s in STATES)}", flush=True)
    return found


def ratio(values: Sequence[float]) -> common.Ratio:
    """Return the median of ratios with its interval."""
    return common.Ratio(statistics.median(values), *common.interval(values), len(values))


def mixed(turns: Sequence[Turn], part: float) -> tuple[common.Ratio, common.Ratio]:
    """Return throughput with over without, and p99 without over with, where `part` of the time goes to rounds."""
    throughput = [((1 - part) * t.rates["rest"] + part * t.rates["rounds"]) / t.rates["none"] for t in turns]
    latency = [
        quantile([(1, t.latencies["none"])])
        / quantile([(1 - part, t.latencies["rest"]), (part, t.latencies["rounds"])])
        for t in turns
    ]
    return ratio(throughput), ratio(latency)


def report(
    turns: Sequence[Turn], taken: float, part: float, others: float, worked: dict[str, float]
) -> tuple[str, dict[str, str]]:
    """Return the tables, and what is judged."""
    disturbed = others >= common.DISTURBED
    throughput, latency = mixed(turns, part)
    judged = {
        "throughput": "not resolved, disturbed" if disturbed else throughput.against(THROUGHPUT),
        "p99": "not resolved, disturbed" if disturbed else latency.against(LATENCY),
    }
    rows = [["default budget", throughput, judged["throughput"], latency, judged["p99"]]]
    for name, weight in (("daemon at rest", 0.0), ("rounds back to back", 1.0)):
        one, other = mixed(turns, weight)
        rows.append([name, one, "", other, ""])
    table = common.table(
        ["", "throughput with / without (95 %)", f"≥ {THROUGHPUT}", "p99 without / with (95 %)", f"≥ {LATENCY:.4f}"],
        rows,
    )
    account = (
        f"\n{len(turns)} turns. Back to back, rounds took {100 * taken:.2f} % of the device's time; the default budget "
        f"allows {100 * BudgetConfig().share:g} %, so they stand for {100 * part:.2f} % of an hour.\n"
        f"The daemon and its workers took {100 * worked['rest']:.2f} % of these cores' time at rest, and "
        f"{100 * worked['rounds']:.1f} % while rounds ran\nback to back beside the server.\n"
        f"Others used {100 * others:.1f} % of the processor time meanwhile"
        f"{f': more than {100 * common.DISTURBED:g} %, so nothing is judged' if disturbed else ''}.\n\n"
    )
    return table + account, judged


def main() -> None:
    """Start server and daemons, measure in turns, write."""
    parser = common.options(__doc__)
    parser.add_argument("--turns", type=int, default=16)
    # Each half holds one sweep of telemetry, as every 15 s of a node do.
    parser.add_argument("--seconds", type=float, default=30.0, help="of one measurement (default: %(default)g)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="what serves and is tested")
    parser.add_argument("--probes", nargs="+", choices=PROBES, default=PROBES, help="what a round is made of")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.device)
        return
    facts = common.machine()
    cores = len(psutil.Process().cpu_affinity())
    processes = cores if arguments.device == "cpu" else 1
    with tempfile.TemporaryDirectory(prefix="canaryd-") as directory, contextlib.ExitStack() as stack:
        running = {}
        for state in STATES[1:]:
            config = settings(Path(directory), arguments.device, arguments.probes, rounds=state == "rounds")
            process, metrics = stack.enter_context(daemon(config))
            running[state] = Beside(process, metrics, time.monotonic())
            stack.callback(running[state].go_on)  # a stopped daemon does not hear that it should end
        while not all(_up(beside) for beside in running.values()):
            time.sleep(0.5)
        begun = time.monotonic()
        for beside in running.values():
            beside.wait_for(1)
        for beside in running.values():
            beside.stop()
        server = Server(arguments.device, processes)
        stack.callback(server.close)
        server.ask(1.0, 0.0)
        ours = [psutil.Process(p.pid) for p in psutil.Process().children(recursive=True)]
        with common.Bystanders(also=ours) as bystanders:
            turns = measure(server, running, arguments.turns, arguments.seconds)
        server.close()
        rounds = running["rounds"]
        rounds.go_on()
        rounds.wait_for(1)
        # A worker's time on an accelerator goes on while it is stopped, its processor time does not.
        time_given = rounds.ran + time.monotonic() - rounds.since
        taken = rounds.spent() / (time_given if arguments.device == "cpu" else time.monotonic() - begun)
        done = rounds.total("canaryd_probe_runs_total", f'probe="{arguments.probes[0]}"', 'outcome="completed"')
        rounds.stop()
    part = min(1.0, BudgetConfig().share / taken)
    worked = {state: beside.worked / beside.measured / cores for state, beside in running.items()}
    body, judged = report(turns, taken, part, bystanders.share, worked)
    if arguments.device == "cuda":
        name, title = "beside-cuda", "Decoding on an accelerator beside canaryd"
    else:
        name, title = "beside", "A server on the same cores beside canaryd"
    common.write(
        arguments.out,
        name,
        title,
        {**facts, "server": f"{processes} processes, requests of {SERVICE:g} s, {UTILISATION:g} of capacity"},
        body,
        {
            "judged": judged,
            "taken": taken,
            "worked": worked,
            "part": part,
            "rounds": done,
            "others": bystanders.share,
            "turns": [
                {
                    "rates": t.rates,
                    "p99": {s: quantile([(1, t.latencies[s])]) for s in STATES},
                    "requests": {s: len(t.latencies[s]) for s in STATES},
                }
                for t in turns
            ],
        },
    )


def _up(beside: Beside) -> bool:
    with contextlib.suppress(OSError):
        return bool(beside.page())
    return False


if __name__ == "__main__":
    main()
