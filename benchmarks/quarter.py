"""Play a quarter of a fleet of 10,000 nodes, and compare policies that take nodes out of service.

The real engine, store, judge and gate decide (`report.gate.decide`, as configured when nothing is configured); devices
are simulated (`tests/story`). A node has eight GPUs and a processor. Each history (`KINDS`) is played with a few seeds
and multiplied until it is as frequent as its source says. Nobody repairs anything before the node is drained.

Frequencies are those of Llama 3 405B (arXiv 2407.21783, table 5: 419 interruptions of 16,384 H100 in 54 days) and, for
wrong results, of two fleets: 13 defective GPUs in 3.5e7 GPU hours, and the 6 of those 419. A device with wrong results
fails in a share of its results that is uniform in its logarithm from 1e-8 to 1. Ours, because nobody publishes them:
that half of the failures come back after a reset, how often programs crash, how often an upgrade brings a bug.

The policies beside canaryd's gate are simple, and flattered: "any Xid" drains a node at its first Xid; "two failed
diagnostics" runs the vendor's diagnostic every night and after each Xid, drains at the second failure, never fails on
a sound device, and finds each GPU in four that computes wrongly (AEGIS, OSDI 2026: two of eight) on its first night.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from typing import NamedTuple

from benchmarks import common
from canaryd.model import Cause, State, Verdict
from canaryd.report import gate, status
from tests.story.catalogue import EXACT, HOST, NVIDIA, RECORDED
from tests.story.format import Expectation, Fault, Happening, Machine, Noise, Part, Story
from tests.story.host import Host
from tests.story.playing import play

NODES, GPUS, DAYS = 10_000, 8, 91
A_DAY = 2
"""Rounds of a day, each with as many results as the daemon's share of the time allows in it."""
ROUNDS = DAYS * A_DAY
FAST, SHORT = 48, 7
"""Rounds of a day, as the daemon's default period of half an hour gives, and the days played, of a GPU that is often
wrong: the first half hour finds it."""
OFTEN = 1e-5
"""Fraction of wrong results from which this is so."""
TURN = 190e-6
"""Seconds of one turn on an H200: 8 compared products of 1024 in bfloat16 (results/case_list.md)."""
COMPARISONS = 6
"""Comparisons of a simulated run of exact_matmul: three cases, each with a fixed and a fresh seed."""
SHARES = (0.005, 0.05)
"""Fractions of a device's time that tests may use: the default of `budget.share`, and ten times as much."""
GPU_YEARS = NODES * GPUS * DAYS / 365
LLAMA_YEARS = 16_384 * 54 / 365
WRONG_PER_YEAR = 13 / (3.5e7 / 8760)
RECURS = 0.5
"""Fraction of a GPU's failures that come back after a reset (ours)."""
FOUND_BY_VENDOR = 2 / 8
REPAIR = 3.0
"""Days for which a drained node is out of service (ours)."""
SICK = "gpu3"
CRASH = 10.0
"""Mean number of days between two programs that crash on a node (ours)."""
PROGRAMS = (13, 31, 43, 45)
"""Xids that programs cause."""
GSP = "Timeout after 6s of waiting for RPC response from GPU3 GSP!"
NEVER, ANY_XID, TWICE, CANARYD = "never", "any Xid", "two failed diagnostics", "canaryd"


class Life(NamedTuple):
    """What happens to a node besides the everyday."""

    faults: tuple[Fault, ...] = ()
    events: tuple[Happening, ...] = ()
    onset: int = 0
    """Round in which it begins."""
    defect: str = ""
    """Name of the device that must be replaced, "" if there is none."""
    rate: float = 0.0
    """Fraction of this device's results that are wrong."""
    diagnosed: int | None = None
    """Round of the second failed diagnostic; None: there is none."""
    a_day: int = A_DAY
    """Rounds of a day."""


class Kind(NamedTuple):
    """One kind of history."""

    name: str
    nodes: float
    """Number of nodes of the fleet that have it in a quarter."""
    source: str
    make: Callable[[random.Random], Life]


def _of_llama(interruptions: float) -> float:
    return interruptions / LLAMA_YEARS * GPU_YEARS


def _onset(rng: random.Random) -> int:
    return rng.randrange(4 * A_DAY, ROUNDS - 7 * A_DAY)


def _xids(rng: random.Random, codes: Sequence[int], *, again: bool, text: str = "") -> Life:
    """Return failures of one GPU, each with a reboot in the next round; every five days, or once."""
    first, events, seen = _onset(rng), [], []
    for at in range(first, ROUNDS - 1, 5 * A_DAY) if again else (first,):
        seen.append(at)
        events.append(Happening(at=at, do="xid", device=SICK, xid=rng.choice(codes), text=text))
        events.append(Happening(at=at + 1, do="reboot"))
    return Life((), tuple(events), first, SICK if again else "", diagnosed=seen[1] if len(seen) > 1 else None)


def _wrong(rng: random.Random) -> Life:
    rate = 10 ** rng.uniform(-8.0, 0.0)
    a_day = FAST if rate >= OFTEN else A_DAY
    onset = FAST + rng.randrange(FAST) if rate >= OFTEN else _onset(rng)
    bits = (rng.randrange(16),) if rng.random() < 0.5 else ()
    fault = Fault(kind="exact", device=SICK, probability=rate, after=onset, bits=bits)
    found = onset + 2 * a_day if rng.random() < FOUND_BY_VENDOR else None
    return Life((fault,), (), onset, SICK, rate, diagnosed=found, a_day=a_day)


def _together(rng: random.Random, codes: Sequence[int]) -> Life:
    at = _onset(rng)
    gpus = tuple(f"gpu{n}" for n in range(GPUS))
    events = (Happening(at=at, do="xid", device=gpus, xid=rng.choice(codes)), Happening(at=at + 1, do="reboot"))
    return Life((), events, at)


def _bad_upgrade(rng: random.Random) -> Life:
    """Return a library that computes the same wrong bits on all GPUs until it is replaced a week later."""
    at = _onset(rng)
    gpus = tuple(f"gpu{n}" for n in range(GPUS))
    bug = Fault(kind="exact", device=gpus, probability=1e-4, stack={"blas": "13.0-bug"}, bits=(9,), same="bug")
    events = (
        Happening(at=at, do="stack", device=gpus, stack={"blas": "13.0-bug"}),
        Happening(at=at + 7 * A_DAY - 1, do="stack", device=gpus, stack={"blas": "13.1"}),
    )
    return Life((bug,), events, at)


def _hot(rng: random.Random) -> Life:
    at = _onset(rng)
    seconds = {"throttle_seconds_total{reason=hw_thermal}": 900.0}
    return Life((), (Happening(at=at, do="counters", device=SICK, counters=seconds, rounds=4 * A_DAY),), at)


def _core(rng: random.Random) -> Life:
    onset = _onset(rng)
    fault = Fault(kind="exact", device="cpu", probability=10 ** rng.uniform(-6.0, -1.0), after=onset, place="core 1")
    return Life((fault,), (), onset, "cpu")


KINDS = (
    Kind("computes wrongly", GPU_YEARS * WRONG_PER_YEAR, "AEGIS, OSDI 2026", _wrong),
    Kind(
        "falls off the bus, again and again",
        RECURS * _of_llama(148),
        "Llama 3: faulty GPU",
        lambda rng: _xids(rng, (79,), again=True),
    ),
    Kind("falls off the bus once", RECURS * _of_llama(148), "the same", lambda rng: _xids(rng, (79,), again=False)),
    Kind(
        "uncorrectable memory, again and again",
        RECURS * _of_llama(72 + 19),
        "Llama 3: HBM3, SRAM",
        lambda rng: _xids(rng, (48, 94, 95), again=True),
    ),
    Kind(
        "uncorrectable memory once",
        RECURS * _of_llama(72 + 19),
        "the same",
        lambda rng: _xids(rng, (48, 94), again=False),
    ),
    Kind(
        "system processor hangs, again and again",
        RECURS * _of_llama(17),
        "Llama 3: system processor",
        lambda rng: _xids(rng, (119,), again=True, text=GSP),
    ),
    Kind(
        "system processor hangs once",
        RECURS * _of_llama(17),
        "the same",
        lambda rng: _xids(rng, (119,), again=False, text=GSP),
    ),
    Kind("a core of the CPU computes wrongly", _of_llama(2), "Llama 3: CPU", _core),
    Kind("power dips", _of_llama(3), "Llama 3: power supply", lambda rng: _together(rng, (79, 95, 119))),
    Kind("fabric fails", _of_llama(35), "Llama 3: switch, cable", lambda rng: _together(rng, (74, 94, 145, 149))),
    Kind("too hot", _of_llama(6), "Llama 3: thermal", _hot),
    Kind("an upgrade brings a bug", 0.01 * NODES, "ours: 1 %", _bad_upgrade),
)
SOUND = Kind("nothing but the everyday", NODES - sum(kind.nodes for kind in KINDS), "", lambda _: Life())
BY_NAME = {kind.name: kind for kind in (*KINDS, SOUND)}


def everyday(rng: random.Random, rounds: int, a_day: int) -> Iterator[Happening]:
    """Yield what happens to every node: a new driver, new software, restarts, reboots, and programs that crash."""

    def every(days: float) -> Iterator[int]:
        at = 0.0
        while (at := at + rng.expovariate(1 / (days * a_day))) < rounds - 1:
            yield int(at)

    for at in every(DAYS):
        yield Happening(at=at, do="stack", stack={"driver": f"585.{at}"})
        yield Happening(at=at, do="reboot")
    yield from (Happening(at=at, do="stack", stack={"torch": f"2.14.{at}"}) for at in every(DAYS))
    for kind, days in (("reboot", 30), ("restart_daemon", 10)):
        yield from (Happening(at=at, do=kind) for at in every(days))
    for at in every(CRASH):
        yield Happening(at=at, do="xid", device=f"gpu{rng.randrange(GPUS)}", xid=rng.choice(PROGRAMS))


def story(kind: Kind, seed: int, share: float) -> tuple[Story, Life]:
    """Return a node's story, and what is behind it."""
    rng = random.Random(f"quarter {kind.name} {seed}")
    life = kind.make(rng)
    rounds = SHORT * FAST if life.a_day == FAST else ROUNDS
    trials = max(1, round(share * 86_400 / life.a_day / TURN / COMPARISONS))
    cpu = Part(name="cpu", backend="cpu", model="EPYC 9654", cores=2)
    return Story(
        name="quarter",
        text=kind.name,
        hosts=(
            Machine(devices=(Part(name="gpu", count=GPUS, model="NVIDIA H100", trials=trials), cpu), expected=GPUS),
        ),
        rounds=rounds,
        period=f"{24 * 60 // life.a_day}m",
        seed=rng.getrandbits(32),
        probes=(EXACT, RECORDED, NVIDIA, HOST),
        faults=(*life.faults, Fault(kind="timed_out", probability=1e-3)),
        noise=(Noise(case="softmax/rows", nondeterministic=True),),
        events=tuple(sorted((*life.events, *everyday(rng, rounds, life.a_day)), key=lambda happening: happening.at)),
        expect=(Expectation(device="*", never="software" if kind is SOUND else "harness"),),
    ), life


@dataclass(frozen=True, kw_only=True)
class Lived:
    """How one node fared."""

    kind: str
    share: float
    seed: int
    onset: int
    defect: str
    rate: float
    drained: dict[str, int | None]
    """Policy → round in which the node is drained."""
    a_day: int
    """Rounds of a day."""
    device: str = ""
    """Name of the device for which canaryd drained it."""
    cause: str = ""

    def days(self, policy: str) -> float:
        """Return the days from the onset until the policy drains the node, or until the quarter ends."""
        at = self.drained[policy]
        end = DAYS if at is None else at / self.a_day
        return max(0.0, end - self.onset / self.a_day)

    def served(self, policy: str) -> float:
        """Return the expected number of wrong results served until then, with half a round before the first test."""
        return self.rate * (1 - self.share) * 86_400 / TURN * (self.days(policy) + 0.5 / self.a_day)


def live(name: str, seed: int, share: float) -> Lived:
    """Play one node of the kind with this name until canaryd's gate fails it."""
    kind = BY_NAME[name]  # by name, since no process can be sent a lambda
    told, life = story(kind, seed, share)
    hosts: list[Host] = []
    found: dict[str, tuple[int, str, str]] = {}

    def watch(number: int, verdicts: Mapping[str, Verdict]) -> bool:
        if all(v.state is not State.FAULTY for v in verdicts.values()):
            return False
        host, now = hosts[0], max(v.decided for v in verdicts.values())
        seen = status.gather(host.engine.store, host.config, now, daemon=True, evidence={}, itself=True)
        answer = gate.decide(seen, gate.Question(), {})
        if answer.decision == gate.FAIL:
            item = answer.devices[0]
            found[CANARYD] = number, host.names[item.device], item.cause.value
        return CANARYD in found

    play(told, watch=watch, begin=hosts.extend)
    at, device, cause = found.get(CANARYD, (None, "", ""))
    xid = min((e.at for e in told.events if e.do == "xid"), default=None)
    if xid is None and life.a_day == FAST:  # the quarter goes on after the days that are played
        xid = told.rounds + int(random.Random(f"later {seed}").expovariate(1 / (CRASH * FAST)))
    drained = {NEVER: None, ANY_XID: xid, TWICE: life.diagnosed, CANARYD: at}
    return Lived(
        kind=kind.name,
        share=share,
        seed=seed,
        onset=life.onset,
        defect=life.defect,
        rate=life.rate,
        drained=drained,
        a_day=life.a_day,
        device=device,
        cause=cause,
    )


def play_all(jobs: Sequence[tuple[str, int, float]], processes: int) -> list[Lived]:
    """Return how each node fared, and print progress."""
    begun, found = time.monotonic(), []
    with ProcessPoolExecutor(processes) as pool:
        for done, job in enumerate(as_completed([pool.submit(live, *job) for job in jobs]), start=1):
            found.append(job.result())
            left = (time.monotonic() - begun) / done * (len(jobs) - done) / 60
            print(f"{done} of {len(jobs)} nodes, about {left:.0f} min left", flush=True)
    return sorted(found, key=lambda each: (each.kind, each.share, each.seed))


@dataclass
class Row:
    """What a policy does to the whole fleet."""

    policy: str
    found: float = 0.0
    """Nodes with a defective device that are drained after it broke."""
    sound: float = 0.0
    """Nodes without one, or before it broke, that are drained."""
    accused: float = 0.0
    """Of these, the ones drained for hardware; a policy without causes drains for hardware."""
    days: float = 0.0
    """Node-days out of service."""


def weigh(lives: Sequence[Lived], weights: Mapping[str, float], policy: str) -> Row:
    """Return what a policy does to the fleet; each played node stands for as many as its kind has."""
    row, played = Row(policy), {kind: sum(each.kind == kind for each in lives) for kind in weights}
    for each in lives:
        weight, at = weights[each.kind] / played[each.kind], each.drained[policy]
        if at is None:
            continue
        right = bool(each.defect) and at >= each.onset and (policy != CANARYD or each.device == each.defect)
        row.found += weight * right
        row.sound += weight * (not right)
        row.accused += weight * (not right and (policy != CANARYD or each.cause == Cause.HARDWARE.value))
        row.days += weight * min(REPAIR, DAYS - at / each.a_day)
    return row


def quantiles(values: Sequence[float]) -> str:
    """Return the tenth, middle and ninetieth part of some values as text."""
    if not values:
        return "-"
    ordered = sorted(values)
    parts = (ordered[min(len(ordered) - 1, int(q * len(ordered)))] for q in (0.1, 0.5, 0.9))
    return " · ".join(f"{part:.3g}" for part in parts)


def report(lives: Sequence[Lived], weights: Mapping[str, float]) -> str:
    """Return the body of the report."""
    usual = [each for each in lives if each.share == SHARES[0]]
    rows = [weigh(usual, weights, policy) for policy in (NEVER, ANY_XID, TWICE, CANARYD)]
    broken = {each.kind for each in lives if each.defect}
    defective = sum(weights[kind] for kind in broken)
    wrong = {share: [e for e in lives if e.rate and e.share == share] for share in SHARES}
    decades = range(-8, 0)
    by_kind = []
    for kind in weights:
        played = [each for each in usual if each.kind == kind]
        drained = [each for each in played if each.drained[CANARYD] is not None]
        why = ", ".join(sorted({f"{each.device} {each.cause}" for each in drained}))
        days = quantiles([each.days(CANARYD) for each in drained if each.defect])
        by_kind.append((kind, f"{weights[kind]:,.0f}", f"{len(drained)} of {len(played)}", why or "-", days))
    served = []
    for decade in decades:
        line = [f"1e{decade} to 1e{decade + 1}"]
        for share in SHARES:
            here = [e for e in wrong[share] if 10**decade <= e.rate < 10 ** (decade + 1)]
            line += [f"{sum(e.drained[CANARYD] is not None for e in here)} of {len(here)}"]
            line += [quantiles([e.served(CANARYD) for e in here])]
        served.append(line)
    gate_row = rows[-1]
    opening = (
        f"{NODES:,} nodes with {GPUS} GPUs, {DAYS} days, {len(lives)} played. {defective:,.0f} nodes get a defective"
        f" device. canaryd's gate drains {gate_row.found:,.0f} of them, {gate_row.sound:,.0f} nodes without a defect,"
        f" and {gate_row.accused:,.0f} sound devices as hardware."
    )
    policies = [
        (
            r.policy,
            f"{r.found:,.0f} of {defective:,.0f}",
            f"{r.sound:,.0f}",
            f"{r.accused:,.0f}",
            f"{r.days:,.0f}",
            quantiles([e.served(r.policy) for e in wrong[SHARES[0]]]),
        )
        for r in rows
    ]
    spread = "10, 50, 90 %"
    header = ("policy", "defective drained", "sound nodes drained", "as hardware", "node-days lost")
    period = 86_400 / FAST
    bounds = [
        f"A test that sees {share:.1%} of the results sees the first wrong one after {(1 - share) / share:,.0f} served"
        " ones on average, however rare they are: fewer is not possible."
        for share in SHARES
    ]
    bounds.append(
        f"A GPU that is always wrong serves {period / 2 / TURN:,.0f} before the next test half an hour later."
    )
    columns = [text for s in SHARES for text in (f"drained at {s:.1%}", f"served ({spread})")]
    return "\n".join(
        [
            opening,
            "",
            common.table((*header, f"wrong results served by a GPU that computes wrongly ({spread})"), policies),
            f"Tests take {SHARES[0]:.1%} of the time: {SHARES[0] * NODES * GPUS * DAYS:,.0f} GPU-days.",
            "A sound node that any Xid drains is mostly one whose program crashed.",
            "",
            common.table(("history", "nodes", "drained by canaryd", "for", f"days until then ({spread})"), by_kind),
            "Wrong results served until the node is drained, or the quarter ends, by how often the GPU fails.",
            *bounds,
            "",
            common.table(("results that are wrong", *columns), served),
            "![wrong results served](quarter.svg)",
            "",
        ]
    )


def plot(lives: Sequence[Lived]) -> str:
    """Return an SVG image: the share of GPUs that compute wrongly over the wrong results that each serves."""
    wide, high, left, bottom, top = 720, 340, 60, 44, 20
    wrong = {share: [e for e in lives if e.rate and e.share == share] for share in SHARES}
    usual, more = (wrong[share] for share in SHARES)
    lines = [
        ("never drained", "#9a9a9a", [e.served(NEVER) for e in usual]),
        (TWICE, "#c9772b", [e.served(TWICE) for e in usual]),
        (f"canaryd, {SHARES[0]:.1%} of the time", "#2563c9", [e.served(CANARYD) for e in usual]),
        (f"canaryd, {SHARES[1]:.1%} of the time", "#12a07a", [e.served(CANARYD) for e in more]),
    ]
    ends = [math.log10(max(v, 1.0)) for _, _, values in lines for v in values] or [1.0]
    most = math.ceil(max(ends))

    def x(value: float) -> float:
        return left + math.log10(max(value, 1.0)) / most * (wide - left - 20)

    def y(share: float) -> float:
        return high - bottom - share * (high - bottom - top)

    text = 'font-family="sans-serif" font-size="12" fill="#444"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}">']
    parts.append('<rect width="100%" height="100%" fill="#fff"/>')
    for k in range(0, 101, 25):
        parts.append(f'<path d="M{left} {y(k / 100):.1f}H{wide - 20}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 8}" y="{y(k / 100) + 4:.1f}" text-anchor="end" {text}>{k} %</text>')
    below = f'y="{high - bottom + 18}" text-anchor="middle" {text}'
    parts += [f'<text x="{x(10**k):.1f}" {below}>1e{k}</text>' for k in range(0, most + 1, 2)]
    label = "wrong results served by a GPU until it is drained, or until the quarter ends"
    parts.append(f'<text x="{(wide + left) / 2}" y="{high - 8}" text-anchor="middle" {text}>{label}</text>')
    for number, (name, colour, values) in enumerate(lines):
        ordered = sorted(values)
        steps = " ".join(
            f"L{x(v):.1f} {y(k / len(ordered)):.1f}V{y((k + 1) / len(ordered)):.1f}" for k, v in enumerate(ordered)
        )
        parts.append(f'<path d="M{left} {y(0):.1f}{steps}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{left + 12}" y="{top + 14 + 16 * number}" {text.replace("#444", colour)}>{name}</text>')
    return "".join(parts) + "</svg>\n"


def main() -> None:
    """Play the nodes; exit with 1 if the gate drains a sound device as hardware."""
    parser = common.options(__doc__)
    parser.add_argument("--seeds", type=int, default=4, help="nodes played of each history (default: %(default)s)")
    parser.add_argument("--wrong", type=int, default=66, help="of GPUs that compute wrongly (default: %(default)s)")
    parser.add_argument("--sound", type=int, default=20, help="nodes with no trouble (default: %(default)s)")
    parser.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1))
    arguments: argparse.Namespace = parser.parse_args()
    begun = time.monotonic()
    jobs = [(KINDS[0].name, seed, share) for share in SHARES for seed in range(arguments.wrong)]
    jobs += [(kind.name, seed, SHARES[0]) for kind in KINDS[1:] for seed in range(arguments.seeds)]
    jobs += [(SOUND.name, seed, SHARES[0]) for seed in range(arguments.sound)]
    lives = play_all(jobs, arguments.processes)
    weights = {name: kind.nodes for name, kind in BY_NAME.items()}
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "quarter.svg").write_text(plot(lives))
    common.write(
        arguments.out,
        "quarter",
        "A fleet over a quarter",
        {**common.machine(), "seconds": f"{time.monotonic() - begun:.0f}"},
        report(lives, weights),
        {"weights": weights, "sources": {k.name: k.source for k in KINDS}, "lives": [asdict(each) for each in lives]},
    )
    usual = [each for each in lives if each.share == SHARES[0]]
    sys.exit(1 if weigh(usual, weights, CANARYD).accused else 0)


if __name__ == "__main__":
    main()
