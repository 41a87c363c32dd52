"""Parts (groups of tests) that run in the daemon's interpreter: they start workers and probes and check the outcome."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from canaryd.codec import to_json
from canaryd.engine import schedule
from canaryd.model import TORCH, Outcome
from canaryd_lab.characterise.conversation import MODULE, Conversation, observed, result
from canaryd_lab.characterise.results import Part, Result
from canaryd_lab.observation import Claim, Observation, Seen

CarryOut = Callable[[Part, Conversation], Result]
EVERY = ("*",)
"""Value of `Context.cases` with which a probe runs all its cases, in every shape and layout."""
SECONDS: Mapping[str, float] = {
    "exact_integer": 10, "exact_matmul": 60, "exact_attention": 40, "recorded_kernels": 12,
}  # fmt: skip
"""Probe → maximum seconds for running all its cases once. `OTHERS` is the limit of a probe that is not listed."""
OTHERS = 15.0
KILLED_WITHIN = 5.0
"""Seconds after SIGKILL within which a worker must be gone (ours). The supervisor's limit, `WAKE`, is longer."""


def parts(conversation: Conversation) -> dict[str, tuple[Part, CarryOut]]:
    """Return name → (part, function that carries it out), for the parts that run in the daemon's interpreter."""
    entries = conversation.engine.entries
    found: list[tuple[Part, CarryOut]] = []
    for turn, (name, entry) in enumerate(sorted(entries.items(), key=lambda e: (e[1].spec.order, e[0]))):
        if entry.spec.numeric and not entry.spec.opt_in and schedule.applies(entry, conversation.device):
            part = Part(name=f"cases/{name}", title=f"Every case of {name} once", rank=20 + min(turn, 9),
                        seconds=SECONDS.get(name, OTHERS), workers=1)  # fmt: skip
            found.append((part, every_case))
    if conversation.device.runtime != TORCH:  # the others call torch, in the worker or in their probes
        return {part.name: (part, carry_out) for part, carry_out in found}
    if "recorded_kernels" in entries:
        found.append(
            (
                Part(name="recorded", title="Recorded kernels: equal bits again", rank=75, seconds=20, workers=2),
                recorded,
            )
        )
    found += [
        (Part(name="kill", title="Killed and hung workers", rank=86, seconds=12, workers=2), kill),
    ]
    return {part.name: (part, carry_out) for part, carry_out in found}


def every_case(part: Part, conversation: Conversation) -> Result:
    """Run every case of a probe once, and record whether each case ran, was refused or raised an error."""
    return _probe(part, conversation, part.name.partition("/")[2], EVERY)


def _probe(part: Part, conversation: Conversation, name: str, cases: tuple[str, ...]) -> Result:
    drill = conversation.drill if conversation.drill != "blind" else ""
    entry = conversation.engine.entries[name]
    run = conversation.run_probe(entry, conversation.seconds(part), cases=cases, drill=drill)
    readings = {r.key: r.value for r in run.readings}
    facts = {"stack": dict(run.stack), "probe_version": entry.spec.version, "readings": readings}
    return result(part, run.outcome, run.detail, observed(run), facts)


def recorded(part: Part, conversation: Conversation) -> Result:
    """Run every serving kernel repeatedly in two workers, and count the different results of each kernel."""
    entry, share = conversation.engine.entries["recorded_kernels"], conversation.seconds(part) / 2
    runs = [conversation.run_probe(entry, share, baselining=True) for _ in range(2)]
    worst = next((r for r in runs if r.outcome is not Outcome.COMPLETED), runs[0])
    seen = [o for run in runs for o in observed(run) if o.claim is Claim.STRICT]
    cases = dict.fromkeys(r.case for run in runs for r in run.recordings)
    seen += [_recorded(case, [{r.digest for r in run.recordings if r.case == case} for run in runs]) for case in cases]
    unlike = sum(1 for o in seen if o.values.get("vectors", 1) != 1)
    return result(part, worst.outcome, worst.detail, tuple(seen), {"kernels_with_other_bits": unlike})


def _recorded(case: str, digests: list[set[str]]) -> Observation:
    together = set().union(*digests)
    values = {"vectors": len(together), "first_worker": len(digests[0]), "second_worker": len(digests[1])}
    text = "" if len(together) == 1 else "gives other bits from one time to the next"
    return Observation(name=case, claim=Claim.OPEN, seen=Seen.MEASURED, detail=text, values=values)


def kill(part: Part, conversation: Conversation) -> Result:
    """Kill a computing worker, let another exceed its deadline, then check that a new worker computes correctly."""
    seen = [_killed(conversation), _overrun(conversation)]
    again = conversation.carry_out(replace(part, name="controls", seconds=10.0))
    right = again.outcome is Outcome.COMPLETED and again.count(Claim.CONTROL, Seen.WRONG) > 0
    if conversation.is_late:
        return result(part, Outcome.TIMED_OUT, "the minutes were spent")
    kind = Seen.RIGHT if right else Seen.WRONG
    seen.append(Observation(name="computes afterwards", claim=Claim.STRICT, seen=kind, detail=again.detail[:300]))
    return result(part, Outcome.COMPLETED, "", tuple(seen))


def _spin(conversation: Conversation, seconds: float) -> dict[str, object]:
    return {"part": "spin", "device": to_json(conversation.device), "seconds": seconds, "drill": ""}


def _killed(conversation: Conversation) -> Observation:
    """Kill a worker while the device computes; return an observation of the seconds until the worker is gone."""
    series = conversation.start()
    at: list[float] = []

    def end() -> None:
        at.append(time.monotonic())
        series.kill("killed by the characterisation")

    timer = threading.Timer(conversation.within(6.0), end)
    timer.start()
    try:
        outcome, _, detail = series.answer(MODULE, _spin(conversation, 60.0), conversation.within(90.0))
    finally:
        timer.cancel()
        timer.join()
        conversation.engine.workers.end(series)
    took = time.monotonic() - at[0] if at else 0.0
    good = bool(at) and outcome is not Outcome.UNKILLABLE and took < KILLED_WITHIN
    return _gone("SIGKILL while the device computes", took, "" if good else f"{outcome.value}: {detail[:300]}")


def _overrun(conversation: Conversation) -> Observation:
    """Let a worker exceed its deadline; return an observation, which is right if the run ended as timed out."""
    series = conversation.start()
    begun = time.monotonic()
    try:
        outcome, _, detail = series.answer(MODULE, _spin(conversation, 120.0), conversation.within(6.0))
    finally:
        conversation.engine.workers.end(series)
    wrong = "" if outcome is Outcome.TIMED_OUT else f"{outcome.value}: {detail[:300]}"
    return _gone("a deadline of 6 s that passes", time.monotonic() - begun, wrong)


def _gone(name: str, seconds: float, wrong: str) -> Observation:
    """Return an observation of the seconds until a worker was gone; `wrong` says what was wrong, or is ""."""
    seen, values = Seen.WRONG if wrong else Seen.RIGHT, {"gone_after_seconds": round(seconds, 3)}
    return Observation(name=name, claim=Claim.STRICT, seen=seen, detail=wrong, values=values)
