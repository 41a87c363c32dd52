"""What canaryd costs a server beside it at the default budget: throughput and 99th percentile of latency.

The server is an imitation: one process for each core that multiplies matrices in one thread (on an accelerator one
process that decodes through a stack of float16 layers), first as fast as it can, then for requests that arrive at
fixed moments whether or not the last one is done; latency counts from the arrival.

Each turn measures it three times, for seconds, in an order that the turn draws: without canaryd; beside a daemon at
rest (defaults: telemetry, the kernel log, a scrape every 15 s); and beside one that runs rounds back to back, each as
the defaults make it: nice, of idle time only, in bursts. A speed that wanders for minutes, as that of a virtual machine
does, is the same for all three. The daemon at rest never stops: where its turn is over it moves to a core of its own,
the last that this program may use, and the server has the others. The one that runs rounds is stopped by SIGSTOP with
all its processes.

An hour is made of rest and of rounds. How much of it is rounds follows from what one of them takes, from how often the
defaults want one, and from `budget.share`, which may allow less. This asks for more than the defaults do: they also
wait while the device is busy.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from benchmarks import common
from benchmarks.footprint import daemon
from canaryd.config import BudgetConfig
from canaryd.worker.tensors import torch

UTILISATION = 0.6
"""Part of its capacity at which the server's latency is measured."""
THROUGHPUT, LATENCY = 0.995, 1 / 1.01
"""Least ratios: throughput with canaryd over without; latency without over with."""
STATES = ("none", "rest", "rounds")
SIZE, LAYERS, BATCH = 4096, 32, 16
"""Of the stack on an accelerator."""
PROBES = ("exact_integer", "exact_matmul", "exact_attention", "canary_prompts", "recorded_kernels")
"""What a round is made of."""
SCRAPE = 15.0
"""Seconds between two scrapes."""
CATCHES_UP = 1.0
"""Seconds in which a daemon that was stopped does what it has missed; they are not measured."""
ROUNDS = 3
"""Rounds from which is learnt what one takes."""
PATIENCE = 600.0
"""Seconds for one round; the first one learns what later ones compare."""


class Model:
    """The work of one request."""

    def __init__(self, device: str, service: float) -> None:
        """`service`: seconds that one request should take an undisturbed server."""
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
        """Compute one request, and wait for it."""
        for _ in range(self.count):
            x = self._input
            for layer in self._layers:
                x = x @ layer
        float(x[0, 0])


def serve(device: str, service: float) -> None:
    """Answer commands on standard input: seconds and requests per second, 0 for as fast as it can."""
    model = Model(device, service)
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

    def __init__(self, device: str, processes: int, service: float) -> None:
        argv = [sys.executable, "-m", "benchmarks.beside", "--serve", "--device", device, "--request", str(service)]
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
    """A daemon that runs all the time, beside the server or on a core of its own."""

    process: psutil.Process
    metrics: str
    cores: Sequence[int]
    """Those of the server."""
    aside: int
    """The core that is not the server's."""
    measured: float = 0.0
    """Seconds of its turns."""
    worked: float = 0.0
    """Processor seconds that it and its workers took in them."""

    def begin(self) -> None:
        """Let it be beside the server."""
        self._move(self.cores)

    def end(self) -> None:
        """Let it be aside."""
        self._move([self.aside])

    def _move(self, cores: Sequence[int]) -> None:
        for process in (self.process, *self.process.children(recursive=True)):
            with contextlib.suppress(OSError):
                for task in Path(f"/proc/{process.pid}/task").iterdir():
                    with contextlib.suppress(OSError):  # it has just ended
                        os.sched_setaffinity(int(task.name), cores)

    def processor_seconds(self) -> float:
        """Return what it and its workers took so far."""
        seconds = sum(self.process.cpu_times()[:4])
        for child in self.process.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                seconds += sum(child.cpu_times()[:4])
        return float(seconds)

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Let it be beside the server for a while."""
        self.begin()
        try:
            begun, before = time.monotonic(), self.processor_seconds()
            yield
            self.measured += time.monotonic() - begun
            self.worked += self.processor_seconds() - before
        finally:
            self.end()

    def page(self) -> str:
        """Scrape it."""
        with urllib.request.urlopen(self.metrics, timeout=30) as answer:  # noqa: S310  an address of our own making
            return str(answer.read(), "utf-8")

    def values(self, name: str, *words: str) -> list[float]:
        """Return all samples of a metric whose line holds all of `words`."""
        lines = (line for line in self.page().splitlines() if line.startswith(f"{name}{{"))
        return [float(line.rpartition(" ")[2]) for line in lines if all(word in line for word in words)]

    def wait_for(self, rounds: int) -> list[float]:
        """Wait until so many more rounds have been booked; return what each took of the device, in seconds."""
        took: list[float] = []
        before, until = self.spent(), time.monotonic() + PATIENCE
        while len(took) < rounds:
            time.sleep(1.0)
            if (now := self.spent()) > before:
                took.append(now - before)
                before, until = now, time.monotonic() + PATIENCE
            if time.monotonic() > until:
                raise SystemExit(f"canaryd ended no round within {PATIENCE:g} s:\n{self.page()}")
        return took

    def spent(self) -> float:
        """Return the device time that rounds took so far."""
        return sum(self.values("canaryd_budget_spent_seconds_total"))

    def be_scraped(self) -> None:
        """Be scraped for ever, by a client on the core aside."""
        os.sched_setaffinity(0, [self.aside])
        while True:
            with contextlib.suppress(OSError):
                self.page()
            time.sleep(SCRAPE)


@dataclass
class Stopped(Beside):
    """A daemon that runs beside the server only, and is stopped with all its workers else."""

    since: float = field(default_factory=time.monotonic)
    ran: float = 0.0

    def begin(self) -> None:
        """Let it go on, and do what it has missed."""
        for child in self.process.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.resume()
        self.process.resume()
        self.since = time.monotonic()
        time.sleep(CATCHES_UP)

    def end(self) -> None:
        """Stop it: first the daemon, so that it starts no worker meanwhile."""
        self.ran += time.monotonic() - self.since
        self.process.suspend()
        for child in self.process.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.suspend()


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
    """One turn: requests per second and latencies in seconds by state."""

    rates: dict[str, float]
    latencies: dict[str, Any]
    """Tensors of one axis."""


def quantile(parts: Sequence[tuple[float, Sequence[Any]]], q: float = 0.99) -> float:
    """Return a quantile of a mixture of samples, each part with its weight; samples come in pieces."""
    whole = [(weight, torch.cat(list(pieces))) for weight, pieces in parts if weight]
    values, order = torch.cat([values for _, values in whole]).sort()
    weights = torch.cat([torch.full_like(values, weight / len(values)) for weight, values in whole])[order]
    passed = weights.cumsum(0)
    return float(values[min(len(values) - 1, int(torch.searchsorted(passed, q * passed[-1])))])


def measure(server: Server, running: dict[str, Beside], turns: int, length: float) -> list[Turn]:
    """Measure turn by turn: a third of `length` seconds for throughput and the rest for latency, in each state."""
    rate = 0.0
    found = []
    for number in range(turns):
        order = random.Random(number).sample(STATES, len(STATES))
        turn = Turn({}, {})
        for state in order:
            with running[state].turn() if state in running else contextlib.nullcontext():
                turn.rates[state], _ = server.ask(length / 3, 0.0)
                rate = rate or UTILISATION * turn.rates[state] / len(server.products)
                _, latencies = server.ask(2 * length / 3, rate)
            turn.latencies[state] = torch.tensor(latencies, dtype=torch.float64)
        found.append(turn)
        print(f"turn {number + 1}: {', '.join(f'{s} {turn.rates[s]:.1f}/s' for s in STATES)}", flush=True)
    return found


def throughput(part: float, turns: Sequence[Turn]) -> float:
    """Return throughput with canaryd over without, where `part` of the time goes to rounds."""
    rest, rounds, none = (statistics.fmean(t.rates[state] for t in turns) for state in ("rest", "rounds", "none"))
    return ((1 - part) * rest + part * rounds) / none


def latency(part: float, turns: Sequence[Turn]) -> float:
    """Return the 99th percentile of latency without canaryd over that with it, likewise."""
    rest, rounds, none = ([t.latencies[state] for t in turns] for state in ("rest", "rounds", "none"))
    return quantile([(1, none)]) / quantile([(1 - part, rest), (part, rounds)])


def mixed(turns: Sequence[Turn], part: float) -> tuple[common.Ratio, common.Ratio]:
    """Return both ratios of all turns together, with intervals from turns that are drawn anew."""
    return tuple(  # type: ignore[return-value]
        common.Ratio(of(turns), *common.interval(turns, of), len(turns))
        for of in (partial(throughput, part), partial(latency, part))
    )


@dataclass(frozen=True, kw_only=True)
class Account:
    """What rounds take, and what they may take."""

    one: float
    """Seconds of device time of one round."""
    wanted: float
    """Rounds an hour at the default periods."""
    taken: float
    """Part of the device's time that rounds take back to back beside the server."""

    @property
    def share(self) -> float:
        """Part of the device's time that the default periods and the default budget let rounds take."""
        return min(BudgetConfig().share, self.wanted * self.one / 3600)

    def part(self, share: float) -> float:
        """Return which part of an hour rounds are that take so much of the device's time."""
        return min(1.0, share / self.taken)


def report(turns: Sequence[Turn], account: Account, others: float, worked: float) -> tuple[str, dict[str, str]]:
    """Return the tables, and what is judged."""
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
        rates, waits = mixed(turns, weight)
        if not judged:
            judged = {"throughput": rates.against(THROUGHPUT), "p99": waits.against(LATENCY)}
            judged = dict.fromkeys(judged, "not resolved, disturbed") if disturbed else judged
            rows.append([name, rates, judged["throughput"], waits, judged["p99"]])
        else:
            rows.append([name, rates, "", waits, ""])
    table = common.table(
        ["", "throughput with / without (95 %)", f"≥ {THROUGHPUT}", "p99 without / with (95 %)", f"≥ {LATENCY:.4f}"],
        rows,
    )
    percentiles = common.table(
        ["latency, ms", *STATES],
        [
            [name, *(f"{1000 * quantile([(1, [t.latencies[state] for t in turns])], q):.1f}" for state in STATES)]
            for name, q in (("median", 0.5), ("90 %", 0.9), ("99 %", 0.99), ("99.9 %", 0.999))
        ],
    )
    told = (
        f"\n{len(turns)} turns. A round takes {account.one:.2f} s of the device's time, and the default periods want "
        f"{account.wanted:g} an hour: {100 * account.share:.2f} %\n"
        f"(the default budget allows {100 * BudgetConfig().share:g} %). Back to back beside the server, rounds took "
        f"{100 * account.taken:.2f} %; so they are {100 * part:.2f} % of an hour,\nand {100 * most:.2f} % where the "
        "whole share is used.\n"
        f"The daemon and its workers took {100 * worked:.2f} % of these cores' time at rest.\n"
        f"Others used {100 * others:.1f} % of the processor time meanwhile"
        f"{f': more than {100 * common.DISTURBED:g} %, so nothing is judged' if disturbed else ''}.\n\n"
    )
    return f"{table}\n{percentiles}{told}", judged


def main() -> None:
    """Start server and daemons, measure in turns, write."""
    parser = common.options(__doc__)
    parser.add_argument("--turns", type=int, default=120)
    parser.add_argument("--seconds", type=float, default=6.0, help="of one measurement (default: %(default)g)")
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
        running: dict[str, Beside] = {}
        for state, kind in zip(STATES[1:], (Beside, Stopped), strict=True):
            config = settings(Path(directory), arguments.device, arguments.probes, rounds=state == "rounds")
            process, metrics = stack.enter_context(daemon(config))
            running[state] = kind(process, metrics, cores, aside)
        rest, rounds = running["rest"], running["rounds"]
        assert isinstance(rounds, Stopped)
        while not all(_up(beside) for beside in running.values()):
            time.sleep(0.5)
        begun = rounds.since = time.monotonic()
        for beside in running.values():
            beside.wait_for(1)
        one = statistics.fmean(rounds.wait_for(ROUNDS))
        period = min(rest.values("canaryd_probe_period_seconds", f'probe="{arguments.probes[0]}"'))
        for beside in running.values():
            beside.end()
        stack.callback(rounds.begin)  # a stopped daemon does not hear that it should end
        threading.Thread(target=rest.be_scraped, daemon=True).start()
        server = Server(arguments.device, processes, arguments.request)
        stack.callback(server.close)
        server.ask(1.0, 0.0)
        ours = [psutil.Process(p.pid) for p in psutil.Process().children(recursive=True)]
        with common.Bystanders(also=ours) as bystanders:
            turns = measure(server, running, arguments.turns, arguments.seconds)
        server.close()
        rounds.begin()
        rounds.wait_for(1)
        # A worker's time on an accelerator goes on while it is stopped, its processor time does not.
        given = rounds.ran + time.monotonic() - rounds.since
        taken = rounds.spent() / (given if arguments.device == "cpu" else time.monotonic() - begun)
        done = sum(rounds.values("canaryd_probe_runs_total", f'probe="{arguments.probes[0]}"', 'outcome="completed"'))
        rounds.end()
    account = Account(one=one, wanted=3600 / period, taken=taken)
    worked = rest.worked / rest.measured / len(cores)
    body, judged = report(turns, account, bystanders.share, worked)
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
            "rounds": done,
            "others": bystanders.share,
            "turns": [
                {
                    "rates": t.rates,
                    "p99": {s: quantile([(1, [t.latencies[s]])]) for s in STATES},
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
