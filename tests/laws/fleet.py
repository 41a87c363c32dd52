"""A healthy fleet whose operators, jobs, power and logs are as restless as real ones."""

from __future__ import annotations

import random
from collections.abc import Iterator

from canaryd.model import State
from tests.laws.further import ANYTHING
from tests.laws.properties import said
from tests.story.catalogue import CANARY, DAY, EXACT, HOST, NVIDIA, RECORDED
from tests.story.format import Fault, Happening, Machine, Noise, Part, Story
from tests.story.playing import Played

A_DAY = 4
"""Rounds of a day."""
NODE = tuple(f"gpu{n}" for n in range(4))
PAIR = ("card0", "card1")
SERVER = "endpoint:main@0"
DIPS = (48, 62, 79, 94, 95, 119, 145, 149)
"""Xids that a dip of the power, or of what the devices share, leaves on all of them in one second."""
OF_JOBS = (13, 31, 43, 45)
"""Xids that programs cause."""
ERRORS = "ecc_errors_total{kind=corrected,location=dram}"
HOT = "throttle_seconds_total{reason=hw_thermal}"
AER = "pcie_aer_errors_total{severity=correctable}"


def innocent(days: int, seed: int) -> Story:
    """Return a story of two healthy machines, to which everything happens but a defect."""
    rng = random.Random(seed)
    rounds = days * A_DAY
    events: list[Happening] = []
    faults: list[Fault] = []
    driver = 580

    def every(mean: float) -> Iterator[int]:
        at = 8 + int(rng.expovariate(1 / (mean * A_DAY)))
        while at < rounds - 4:
            yield at
            at += 3 + int(rng.expovariate(1 / (mean * A_DAY)))

    for at in every(60):  # an upgrade of the driver, with a reboot
        driver += 5
        events += [Happening(at=at, do="stack", device=(*NODE, *PAIR), stack={"driver": f"{driver}.10"})]
        events += [Happening(at=at, do="reboot"), Happening(at=at, do="serve", device=SERVER)]
    for number, at in enumerate(every(90)):  # another container on one device, and on the others days later
        blas, first = {"blas": f"13.{number}"}, rng.choice(NODE)
        events += [Happening(at=at, do="stack", device=first, stack=blas)]
        events += [Happening(at=min(at + 12, rounds - 1), do="stack", device=NODE, stack=blas)]
    events += [Happening(at=at, do="reboot") for at in every(20)]
    events += [Happening(at=at, do="restart_daemon") for at in every(12)]
    events += [Happening(at=at, do="release") for at in every(30)]
    events += [Happening(at=at, do="serve", device=SERVER) for at in every(6)]
    for at in every(5):
        events += [Happening(at=at, do="clients", device=SERVER, clients=rng.choice((0, 4, 12)))]
    for at in every(25):  # a dip, and the reboot that it asks for
        xid, where = rng.choice(DIPS), rng.choice((NODE, PAIR, (*NODE, *PAIR)))
        events += [Happening(at=at, do="xid", device=where, xid=xid), Happening(at=at + 1, do="reboot")]
    for at in every(3):  # jobs that crash, on one device or on all
        where = rng.choice((*((name,) for name in NODE), NODE))
        events += [Happening(at=at, do="xid", device=where, xid=rng.choice(OF_JOBS))]
    for at in every(2):
        events += [Happening(at=at, do="counters", device=rng.choice(NODE), counters={ERRORS: rng.randint(1, 3)})]
    for at in every(8):
        events += [Happening(at=at, do="counters", device=rng.choice(NODE), counters={AER: rng.randint(1, 5)})]
    for at in every(15):  # a hot afternoon
        events += [Happening(at=at, do="counters", device=NODE, counters={HOT: 600})]
    for at in every(50):  # a device is taken out at a reboot and comes back at the next
        name = rng.choice((*NODE, *PAIR))
        events += [Happening(at=at, do="reboot"), Happening(at=at, do="vanish", device=name)]
        events += [Happening(at=at + 1, do="reboot"), Happening(at=at + 1, do="return", device=name)]
    held: dict[str, int] = {}
    for at in every(30):  # a job takes all of a device's memory, or of its time
        name, days_long = rng.choice(NODE), rng.randint(1, 2 * A_DAY)
        kind = rng.choice(("skipped", "timed_out"))
        if at <= held.get(name, 0):
            continue  # the device is busy until the other job ends
        held[name] = at + days_long
        faults += [Fault(kind=kind, device=name, probe=EXACT, after=at, until=at + days_long)]
        busy = "utilization_ratio{engine=gpu}"
        events += [Happening(at=at, do="readings", device=name, readings={busy: 0.99})]
        events += [Happening(at=min(at + days_long, rounds - 1), do="readings", device=name, readings={busy: 0.0})]
    return Story(
        name=f"innocent-{days}",
        text="Everything happens to a healthy fleet but a defect.",
        hosts=(
            Machine(
                devices=(Part(name="gpu", count=4), Part(name="cpu", backend="cpu", model="EPYC 9654")),
                endpoint=("gpu0", "gpu1"),
                questions=3,
                tunes=True,
                batches=True,
            ),
            Machine(devices=(Part(name="card", count=2, model="NVIDIA L40S"),)),
        ),
        rounds=rounds,
        period="6h",
        probes=(EXACT, RECORDED, NVIDIA, HOST, CANARY),
        noise=(Noise(case="softmax/rows", nondeterministic=True), Noise(case="gemm/decode", modes=(0.9, 0.1))),
        faults=tuple(faults),
        events=tuple(sorted(events, key=lambda happening: happening.at)),
        expect=ANYTHING,
        apart=True,
    )


def accused(played: Played) -> Iterator[str]:
    """Yield when a device of a healthy fleet is first called hardware, or is suspect or faulty without a dip, by rule.

    What several devices report in one second may make all of them suspect until a reboot and a clean test.
    """
    story = played.story
    dips = {r for e in story.events if e.do == "xid" and e.xid in DIPS for r in range(e.at, e.at + 1 + A_DAY)}
    for name, verdicts in played.verdicts.items():
        seen = set()
        for number, verdict in enumerate(verdicts):
            state, cause = said(verdict)
            if verdict is None or verdict.state in (State.HEALTHY, State.UNKNOWN):
                continue
            doubted = state == "faulty" or (state == "suspect" and number not in dips)
            if cause == "hardware" or doubted:
                rules = ", ".join(dict.fromkeys(f.rule for f in verdict.findings if f.state is verdict.state))
                if rules not in seen:
                    yield f"{name} on day {number * story.seconds / DAY:.1f}: {state} {cause} ({rules})"
                seen.add(rules)
