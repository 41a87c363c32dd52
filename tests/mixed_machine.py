"""A machine of eight GPUs and a processor on which much is wrong: what reports and pictures show of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from canaryd.config.settings import Config
from canaryd.facts import Place
from canaryd.model import (
    Cause,
    Confirmation,
    Device,
    Elsewhere,
    Event,
    Finding,
    Ground,
    PlaceTally,
    ProbeTally,
    Rival,
    Shown,
    State,
    Suspect,
    Tally,
    Verdict,
    WrongResults,
)
from canaryd.report import status
from canaryd.store.store import Store

NOW = 1_790_000_000.0
H, S, E, U = Cause.HARDWARE, Cause.SOFTWARE, Cause.ENVIRONMENT, Cause.UNDETERMINED
GPU = Device(uuid="GPU-3", backend="cuda", index=3, model="NVIDIA H100 80GB HBM3", detail={"serial": "1654422005434"})
SIBLINGS = tuple(f"cuda:{n}" for n in (0, 1, 2, 4, 5, 6, 7))


def rivals(cause=H, by=SIBLINGS):
    """Return what else it could be, each rejected because identical devices are right."""
    kinds = {Suspect.SOFTWARE: S, Suspect.REFERENCE: Cause.HARNESS, Suspect.HOST: H}
    return tuple(
        Rival(cause=c, why="why: so", rejected=True, what=w, shown=Shown.RIGHT, by=by) for w, c in kinds.items()
    )


def tally(wrong, of, **changes):
    places = tuple(
        PlaceTally(place=Place(unit="sm", numbers=(n,)), wrong=wrong * (n == 37), of=of // 2) for n in (36, 37)
    )
    fields = {"runs": 4, "retests": Tally(wrong=3, of=3), "bits": (11,), "places": places}
    fields["bits_by_type"] = {"bfloat16": changes.get("bits", (11,))}
    return ProbeTally(wrong=wrong, of=of, **fields | changes)


def fault(state=State.FAULTY, cause=H, *, probes=("exact_attention", "exact_matmul"), **changes):
    """Return a finding on wrong results: 9 of 1,431 for the first probe, 18 of 2,862 for the second, and so on."""
    confirmed = (Confirmation(ground=Ground.RETESTS, why="its retests failed too"),) if state is State.FAULTY else ()
    tallies = {name: tally(9 * n, 1_431 * n) for n, name in enumerate(probes, 1)}
    facts = {"why": "Cause unknown: no identical device here to compare with.", "confirmed": confirmed}
    if cause is U:
        facts["elsewhere"] = Elsewhere(device=GPU.backend, probe=probes[0], case="bfloat16/wide", seed=7, level="quick")
    return Finding(
        rule="exact-mismatch-confirmed" if state is State.FAULTY else "exact-mismatch",
        state=state,
        cause=cause,
        message="a message",
        action="Wait for 2 automatic retests",
        repro="canaryd check --device cuda:3 --probe exact_matmul --case bfloat16/wide --seed 7",
        rivals=changes.pop("rivals", rivals()),
        since=NOW - 7200,
        wrong=WrongResults(probes=tallies, **facts | changes),
    )


def verdict(*findings, device=GPU, drill=False):
    worst = max(findings, key=lambda f: f.state.severity, default=None)
    state, cause = (worst.state, worst.cause) if worst else (State.HEALTHY, Cause.NONE)
    return Verdict(
        device=device.uuid, state=state, cause=cause, findings=findings, decided=NOW - 60, since=NOW - 7200, drill=drill
    )


def mixed_machine(state: Path) -> status.Status:
    """Record it in a new state directory and return its status: one GPU is broken, one suspected, one hot, one gone."""
    with Store.open(state, now=lambda: NOW) as store:
        hot = Finding(
            rule="throttled",
            state=State.DEGRADED,
            cause=E,
            message="Slowed down by heat for 3 minutes in 60 minutes (limit 60 seconds).",
            action="Check cooling and power.",
        )
        gone = Finding(
            rule="device-vanished",
            state=State.UNKNOWN,
            cause=U,
            message="cuda:6 (NVIDIA H100 80GB HBM3) is gone; it was last found 3 hours ago",
            action="Look for it in the kernel log and on the bus",
        )
        stale = [
            replace(gone, rule="stale-evidence", probe=p, message=f"The last result of {p} is 3 hours old")
            for p in ("exact_attention", "exact_matmul", "recorded_kernels")
        ]
        note = Finding(rule="baseline-learning", state=State.HEALTHY, cause=Cause.NONE, message="Baseline not ready.")
        why = "Cause unknown: the identical devices have not run long enough to tell: cuda:0 and 6 more."
        once = fault(State.SUSPECT, U, probes=("exact_matmul",), rivals=(), to_come=2, why=why)
        seen = {"exact_matmul": tally(1, 2_870, runs=1, retests=Tally(wrong=0, of=0))}
        once = replace(once, wrong=replace(once.wrong, probes=seen))
        told_of = {
            3: (fault(rivals=rivals(by=tuple(f"cuda:{n}" for n in (0, 1, 2, 4, 7)))), note),
            5: (once,),
            2: (hot,),
            6: (gone, *stale),
        }
        for index in range(8):
            device = replace(GPU, uuid=f"GPU-{index}", index=index)
            store.see_device(device, NOW)
            store.set_verdict(verdict(*told_of.get(index, (note,)), device=device))
        cpu = Device(uuid="CPU-1", backend="cpu", index=0, model="AMD EPYC 9654 96-Core Processor")
        store.see_device(cpu, NOW)
        store.set_verdict(verdict(device=cpu))
        xid = {"kind": "xid", "name": "31", "detail": "MMU Fault: ENGINE GRAPHICS GPCCLIENT_T1_0 faulted @ 0x7f"}
        store.add_events([Event(device="GPU-3", first=NOW - 90, last=NOW - 60, **xid)])
        store.set_present({f"GPU-{n}" for n in range(8) if n != 6} | {"CPU-1"}, NOW)
        evidence = {f"GPU-{n}": {"exact_matmul": NOW - 600, "exact_attention": NOW - 60} for n in range(8)}
        evidence["CPU-1"] = {"exact_matmul": NOW - 300}
        return status.gather(store, Config(), NOW, daemon=True, evidence=evidence)
