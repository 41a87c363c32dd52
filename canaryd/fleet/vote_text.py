"""`canaryd fleet` for a terminal, and as one JSON object."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

from canaryd.codec import to_json
from canaryd.facts import printable
from canaryd.fleet.vote import STALE, Disputed, Fleet, Odd
from canaryd.formatting import format_time, wrapped
from canaryd.judge import verdict

SCHEMA = "canaryd.fleet/1"
MOST_ENTRIES = 20
"""Entries of each list that the text shows; JSON has them all."""
SILENT = {
    "down": "does not answer",
    "gone": "no longer a target, answered today",
    "empty": "answers, and shows no device",
    "stuck": "its verdicts are older than half an hour, or a clock is wrong",
}
"""`Silent.why` → what the text says."""


def as_json(fleet: Fleet) -> dict[str, Any]:
    """Return the object that `canaryd fleet --json` prints (docs/fleet.schema.json)."""
    document = {f.name: to_json(getattr(fleet, f.name)) for f in fields(fleet)}
    document["prometheus"] = document.pop("url")
    state = fleet.state
    return {
        "schema": SCHEMA,
        "state": state.value,
        "exit_code": verdict.exit_code(state),
        "answer": answer(fleet),
        **document,
    }


def answer(fleet: Fleet) -> str:
    """Return whether this fleet's numbers may be trusted, as one sentence."""
    bad = [
        (fleet.states.get("faulty", 0), "faulty device", "faulty devices"),
        (fleet.states.get("suspect", 0), "suspect device", "suspect devices"),
        (len(fleet.accused), "device outvoted by identical ones", "devices outvoted by identical ones"),
    ]
    open_ = [
        (fleet.states.get("unknown", 0), "unknown device", "unknown devices"),
        (len(fleet.silent), "silent node", "silent nodes"),
        (len(fleet.disputed), "disputed vote", "disputed votes"),
        (len(fleet.problems), "problem", "problems"),
    ]
    if found := [_many(*entry) for entry in bad if entry[0]]:
        return f"NO, do not trust all of this fleet: {', '.join(found)}."
    if found := [_many(*entry) for entry in open_ if entry[0]]:
        return f"UNKNOWN for part of this fleet: {', '.join(found)}."
    if degraded := fleet.states.get("degraded", 0):
        return f"YES, all numbers are right so far; {_many(degraded, 'device is', 'devices are')} degraded."
    return "YES, every device is healthy and no vote disagrees."


def as_text(fleet: Fleet, width: int) -> str:
    """Return the fleet for a terminal: the answer, then problems, then the inventory; lists end at `MOST_ENTRIES`."""
    devices = ", ".join(f"{count:,} {state}" for state, count in fleet.states.items() if count)
    at = f"; as of {format_time(fleet.now)}" if fleet.now else ""
    lines = wrapped("", f"{fleet.state.value.upper()}  {answer(fleet)}", width)
    lines += wrapped("", f"{_many(fleet.nodes, 'node', 'nodes')}; devices: {devices or 'none'}{at}", width)
    vote = f"vote: {fleet.decided:,} of {_many(fleet.groups, 'group', 'groups')} of identical devices have a majority"
    if fleet.duplicates:
        vote += f"; {_many(fleet.duplicates, 'device has', 'devices have')} no vote: two targets report the same uuid"
    lines += wrapped("", vote, width)
    for title, entries in _sections(fleet):
        if entries:
            lines += ["", title, *_cut(entries, width)]
    return "\n".join(printable(line) for line in lines)


def _sections(fleet: Fleet) -> Iterator[tuple[str, list[str]]]:
    yield "problems", list(fleet.problems)
    yield "outvoted by identical devices (hardware)", [_odd_entry(o) for o in fleet.accused]
    yield (
        "suspect or faulty by their own tests",
        [
            f"{d.instance}  {d.device}  {d.model}  {d.state}: "
            + (", ".join(f"{f['rule']} ({f['cause']})" for f in d.findings) or "no finding")
            + (", also outvoted" if any((o.instance, o.device) == (d.instance, d.device) for o in fleet.odd) else "")
            for d in fleet.doubted
        ],
    )
    yield "results differ, no device accused", [_dispute_entry(d) for d in fleet.disputed]
    yield (
        "silent nodes",
        [f"{s.instance} ({s.job}): {SILENT[s.why]}" for s in fleet.silent],
    )
    yield (
        "oldest evidence, in periods of its probe",
        [
            f"{s.instance}  {s.device}  {s.probe}: {s.periods:.1f} periods{', stale' if s.periods > STALE else ''}"
            for s in fleet.stalest
        ],
    )
    yield (
        "stacks that differ from each other (software, no alarm)",
        [f"{x.get('model', '')}  {x.get('probe', '')}" for x in fleet.stacks_differ],
    )
    yield (
        "devices by model and stack",
        [
            f"{s.devices:>7,}  {s.labels.get('model', 'no model')}  stack {s.labels.get('stack', '')}  "
            + ", ".join(f"{k} {v}" for k, v in s.labels.items() if k not in ("model", "stack"))
            for s in fleet.stacks
        ],
    )
    yield "canaryd", [f"{count:>7,}  {version}" for version, count in sorted(fleet.versions.items())]


def _odd_entry(odd: Odd) -> str:
    probes = ", ".join(sorted({x["probe"] for x in odd.results}))
    whole = "; so are all voting devices of its node" if odd.scope == "node" else ""
    return f"{odd.instance}  {odd.device}  {odd.model}: odd in {probes}{whole}"


def _dispute_entry(dispute: Disputed) -> str:
    sides = []
    for side in dispute.sides:
        more = side.nodes - len(side.some_nodes)
        where = ", ".join(side.some_nodes) + (f" and {more:,} more" if more > 0 else "")
        sides.append(f"{side.fingerprint}: {_many(side.votes, 'vote', 'votes')} ({where})")
    kind = "several nodes share a result that differs from the majority" if dispute.majority else "no majority"
    return f"{dispute.model}  {dispute.probe}  stack {dispute.stack}: {kind}: {'; '.join(sides[:4])}" + (
        f"; and {len(sides) - 4:,} other results" if len(sides) > 4 else ""
    )


def _cut(entries: Sequence[str], width: int) -> Iterator[str]:
    for entry in entries[:MOST_ENTRIES]:
        lead = "  " + " " * (len(entry) - len(entry.lstrip()))
        first, *rest = wrapped(lead, entry.lstrip(), width) or [""]
        yield first
        yield from (f"    {line.lstrip()}" for line in rest)
    if len(entries) > MOST_ENTRIES:
        yield f"  and {len(entries) - MOST_ENTRIES:,} more; --json has them all"


def _many(count: int, one: str, several: str) -> str:
    return f"{count:,} {one if count == 1 else several}"
