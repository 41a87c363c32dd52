"""Devices, runs and signs as tests of the judge make them, and what it says of them."""

import itertools
from dataclasses import replace

from hypothesis import strategies as st

from canaryd.config.judge_policy import JudgePolicy
from canaryd.config.settings import TelemetryConfig
from canaryd.facts import Comparison, Evidence, Exactness, Reading, Subject
from canaryd.judge.case import Case
from canaryd.judge.node import node
from canaryd.judge.telemetry.signals import Poll, Signs
from canaryd.judge.verdict import decide
from canaryd.model import Cause, Device, Outcome, Run, State
from tests.places import line, place

NOW = 1_790_000_000.0
MINUTE, HOUR, DAY = 60.0, 3600.0, 86400.0
POLICY = JudgePolicy()
STACK, OTHER_STACK = {"torch": "2.13.0", "driver": "580.95"}, {"torch": "2.13.1", "driver": "580.95"}
WANTED = {"exact_matmul": 900.0}


def device(uuid="GPU-a", backend="cuda", index=0, **changes):
    model = "H100" if backend == "cuda" else "Xeon"
    return Device(**{"uuid": uuid, "backend": backend, "index": index, "model": model, "torch_index": index, **changes})


GPU, TWIN, THIRD = device(), device("GPU-b", index=1), device("GPU-c", index=2)
CPU = device("CPU-a", "cpu")
SERVERS = device("endpoint:a", "endpoint"), device("endpoint:b", "endpoint", 1)
UNREACHED = device("GPU-u", torch_index=None)
FIRST = (((3, 17), "0x3f80", "0x3f00"),)
OTHER_FIRST = (((5, 1), "0x3f80", "0x0000"),)


def evidence(first=FIRST, bits=("7", "3"), lines=None, **changes):
    fields = {"wrong": 12, "total": 4096, "zeroed": 0, "nonfinite": 0, "pattern": "12 elements, row 17"}
    return Evidence(
        **{**fields, "first": first, "bits": dict.fromkeys(bits, 12), "lines": lines or {"row": line(17)}, **changes}
    )


def right(seed=1, trials=1, case="bfloat16/wide", **changes):
    fields = {"case": case, "shape": "M=32", "seed": seed, "exactness": Exactness.UNIVERSAL, "place": place("device")}
    return Comparison(**{**fields, "trials": trials, "uploads": trials, **changes})


def wrong(seed=1, trials=1, wrong_trials=1, first=FIRST, bits=("7", "3"), lines=None, **changes):
    seen = evidence(first, bits, lines)
    return right(seed, trials, **{"wrong_trials": wrong_trials, "evidence": seen, "uploads": 1, **changes})


def host(where="cores 0 and 3", **changes):
    return wrong(subject=Subject.HOST, place=place(where), **changes)


def comparator(**changes):
    return wrong(subject=Subject.COMPARATOR, **changes)


NUMBERS = itertools.count()


def run(ago, *comparisons, of=GPU, **changes):
    """Return a completed run that started `ago` seconds before now."""
    fields = {"probe": "exact_matmul", "probe_version": 1, "seconds": 4.0, "outcome": Outcome.COMPLETED, "stack": STACK}
    fields |= {"comparisons": comparisons, "readings": (Reading(name="trials", value=9),), "repro": "canaryd check …"}
    fields["id"] = f"run-{next(NUMBERS):06d}"
    return Run(device=of.uuid, started=NOW - ago, **{**fields, **changes})


def fresh(of=GPU, **changes):
    """Return a clean run that is a minute old, with seeds nobody else has used."""
    return run(MINUTE, right(seed=99), of=of, **changes)


TODAY = int(NOW // DAY)


def ask(*runs, of=GPU, peers=(), days=range(TODAY - 120, TODAY + 1), **changes):
    """Judge `of` by its runs; `peers` are (device, runs) pairs, `days` the days on which all of them were tested."""
    given = {"wanted": WANTED, "policy": POLICY, "now": NOW, "previous": None} | changes
    devices = {**{d.uuid: d for d, _ in peers}, of.uuid: of}
    evidence = {**{d.uuid: r for d, r in peers}, of.uuid: runs}
    summed = {uuid: {"exact_matmul": days} for uuid in devices}
    among = replace(node(devices, evidence, given["now"]), summed=summed)
    return decide(Case(device=of, node=among, **given))


def rules(verdict):
    return {f.rule for f in verdict.findings}


def signs(*, remap_failed=0, age=5.0, events=()):
    """Return the telemetry of a device that its driver was asked about so many seconds ago."""
    reading = Reading(name="row_remap_failed", value=remap_failed)
    poll = run(age, probe="nvidia_telemetry", readings=(reading,))
    return Signs(
        device=GPU,
        polls={"nvidia_telemetry": Poll(period=15.0, newest=poll, completed=poll)},
        events=tuple(events),
        last_pass=None,
        last_mismatch=None,
        now=NOW,
        policy=TelemetryConfig(),
    )


def vendors(ago, *results, of=GPU):
    """Return a run of the vendor's self-test so long ago, with what each of its tests said."""
    given = {"name": "vendor_selftest", "unit": "1"}
    found = (Reading(value=r, labels={"tool": "dcgmi diag", "test": str(n)}, **given) for n, r in enumerate(results))
    return run(ago, probe="vendor_selftest", readings=tuple(found), of=of)


H, S, E, N, U = Cause.HARDWARE, Cause.SOFTWARE, Cause.ENVIRONMENT, Cause.HARNESS, Cause.UNDETERMINED


def mismatches(*ages, **changes):
    """Return wrong runs of those ages whose seeds, bits and places share nothing."""
    return [run(age, wrong(seed=1000 + i, **changes)) for i, age in enumerate(ages)]


def confirmations(count, *, clean=0, **changes):
    """Return a wrong run and so many confirmations of it, all too close together to count as independent."""
    return [
        run(2 * HOUR, wrong(), id="the-mismatch"),
        *(run(2 * HOUR - 1 - i, wrong(), confirms="the-mismatch", **changes) for i in range(count)),
        *(run(2 * HOUR - 9 - i, right(), confirms="the-mismatch") for i in range(clean)),
    ]


def turned(times):
    """Return a run that was right and so many that are wrong on the same bytes, too close together to confirm."""
    return [run(DAY, right()), *(run(HOUR - n, wrong()) for n in range(times))]


def erring(*days, **changes):
    """Judge a device that ended runs with an error of its own so many days ago, beside a sibling."""
    errors = [run(d * DAY, outcome=ERR, **changes) for d in days]
    return ask(*reversed(errors), fresh(), peers=[(TWIN, [fresh(of=TWIN)])])


ERR = Outcome.DEVICE_ERROR
SUSPECT, FAULTY, UNKNOWN, HEALTHY = State.SUSPECT, State.FAULTY, State.UNKNOWN, State.HEALTHY


def finding(verdict, rule):
    return next(f for f in verdict.findings if f.rule == rule)


def message(verdict, rule):
    return finding(verdict, rule).message


ages = st.integers(min_value=0, max_value=40).map(lambda h: h * HOUR) | st.integers(0, 200).map(float)
places = st.sampled_from(["device", "core 0", "core 1", "cores 0 and 1"])
kinds = st.sampled_from([right, wrong, host, comparator])
comparisons = st.builds(
    lambda kind, seed, where, characterised, first: kind(
        seed=seed, characterised=characterised, **({"where": where} if kind is host else {"place": place(where)}),
        **({} if kind is right else {"first": first}),
    ),
    kinds, st.integers(1, 3), places, st.booleans(), st.sampled_from([FIRST, OTHER_FIRST]),
)  # fmt: skip
