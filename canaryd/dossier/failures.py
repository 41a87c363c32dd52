"""The failing cases of a device: how often, where and in which bits, and the results of identical devices."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from canaryd.dossier.document import Facts, Json
from canaryd.facts import Comparison, Evidence, Place, Subject
from canaryd.judge import findings
from canaryd.judge.characterised import Proof
from canaryd.judge.incidents import incidents
from canaryd.judge.node import Node
from canaryd.judge.phrases import describe_repeats
from canaryd.judge.statistics import RULE_OF_THREE, interval
from canaryd.judge.tally import counted
from canaryd.judge.verdict import fault_rate_bound
from canaryd.judge.wrong import WIDTH, prominence, type_of
from canaryd.model import Device, Outcome, Run, Verdict

FAILURES = 50
"""Largest number of failing cases that are described: a broken part fails in every case."""
PEER_RUNS = 2000
"""Number of newest runs that are read for each probe of each peer (identical device)."""
LEAST_RUNS = 1000
"""Smallest number of runs that the script for a failing case makes (ours)."""
COPIED = 10
"""Number of runs after which a script copies the operands to the device again (ours). Each copy can show a fault of
copying; the runs between two copies keep the device busy, which other faults need."""
MANTISSA = {"float64": 52, "float32": 23, "bfloat16": 7, "float16": 10}
"""Format → bits of its mantissa (IEEE 754-2019 table 3.5; bfloat16: the upper half of float32)."""


def rate(wrong: int, total: int) -> Json:
    """Return `wrong` and `total` with the 95 % interval of the rate; the interval's ends are None if `total` is 0."""
    low, high = interval(wrong, total)
    return {"wrong": wrong, "total": total, "low": low if total else None, "high": high if total else None}


def bit_name(form: str, bit: int) -> str:
    """Return the name of a bit in a number format: "sign", "exponent", "mantissa", …; "" if the format is unknown."""
    if form.startswith("int"):
        return "sign" if bit == WIDTH[form] - 1 else "lowest of the integer" if bit == 0 else "integer"
    if form not in MANTISSA:
        return ""
    if bit == WIDTH[form] - 1:
        return "sign"
    if bit >= MANTISSA[form]:
        return "exponent"
    return "lowest of the mantissa" if bit == 0 else "mantissa"


KEY = ("probe", "version", "instruction_set", "case", "shape", "seed", "subject")
"""Fields of a failing case that name its operands."""
Key = tuple[str, int, str, str, str, int, str]
"""The values of `KEY`. Equal keys: equal operands."""


def _key(run: Run, c: Comparison) -> Key:
    return run.probe, run.probe_version, run.instruction_set, c.case, c.shape, c.seed, c.subject.value


def counted_runs(verdict: Verdict, runs: Iterable[Run]) -> list[Run]:
    """Return the runs that the verdict counts: of a probe that shows a fault, those since the fault was first seen."""
    wrong = [(i.probes, min(f.since for f in i.findings if f.wrong)) for i in incidents(verdict) if i.wrong]
    since = {probe: began for probes, began in wrong for probe in probes}
    return [r for r in runs if r.started >= since.get(r.probe, 0.0)]


def find_failures(facts: Facts, spots: Sequence[Json], probes: Sequence[Json]) -> tuple[list[Json], int]:
    """Return the failing cases, the worst first, at most `FAILURES`; and the number of failing cases left out.

    The case that the verdict's command repeats is the first.
    """
    by_key: dict[Key, list[tuple[Run, Comparison]]] = defaultdict(list)
    for run in (*facts.runs, *_runs_with_wrong_reference(facts)):
        for c in run.comparisons:
            by_key[_key(run, c)].append((run, c))
    failing = {k: v for k, v in by_key.items() if any(c.wrong for _, c in v)}

    chosen = [i.wrong.elsewhere for i in incidents(facts.verdict) if i.wrong and i.wrong.elsewhere]
    repeated = {(each.probe, each.case, each.seed) for each in chosen}

    def worst_first(key: Key) -> Any:
        wrong = [(r, c) for r, c in failing[key] if c.wrong]
        is_repeated = any((r.probe, c.case, r.seed) in repeated for r, c in wrong)
        return not is_repeated, prominence(wrong), key

    ordered = sorted(failing, key=worst_first)
    proofs, found = _proofs(facts), []
    for key in ordered[:FAILURES]:
        failure = _failure(key, failing[key], proofs)
        cores = [
            p for p in failure["places"] if p["unit"] == "core" and len(p["numbers"]) == 1 and p["results"]["wrong"]
        ]
        worst = max(cores, key=lambda p: p["results"]["wrong"], default=None)
        at = [p for p in spots if worst and p["place"] == worst["place"]] or [t for t in probes if t["probe"] == key[0]]
        core = worst["numbers"][0] if worst else None
        found.append(failure | {"core": core, "needed": enough_runs(failure, *at)})
    return found, max(0, len(ordered) - FAILURES)


def enough_runs(*tallies: Json) -> int:
    """Return the number of runs in which a fault with the recorded rates appears at least once with 95 % probability.

    `tallies`: counts of the failing case, and of everything that its core or its probe computed. The rate of the case
    alone is too high, because the case is listed for its failures. Results of one upload can be wrong together, so the
    number of runs also covers enough fresh copies.
    """
    each = [
        repeats * math.ceil(RULE_OF_THREE * tally[of]["total"] / tally[of]["wrong"])
        for tally in tallies
        for of, repeats in (("results", 1), ("uploads", COPIED))
        if tally[of]["wrong"]
    ]
    digits = 10 ** max(0, len(str(max(each))) - 2)
    return int(max(LEAST_RUNS, math.ceil(max(each) / digits) * digits))


def _proofs(facts: Facts) -> dict[int, Proof]:
    """Return the `id` of a wrong comparison → proof that its class is exact. Comparisons without proof are left out."""
    device = facts.device
    among = Node(devices={device.uuid: device}, runs={device.uuid: tuple(facts.runs)}, claims=facts.claims)
    return {id(m.comparison): m.proof for m in among.missed[device.uuid] if m.proof is not None}


def _runs_with_wrong_reference(facts: Facts) -> list[Run]:
    """Return runs of other devices with a wrong golden made by this processor; only comparisons of goldens are kept."""
    if facts.device.backend != "cpu":
        return []
    found = []
    for uuid in (r.device.uuid for r in facts.store.devices() if r.device.uuid != facts.device.uuid):
        for run in facts.store.runs(uuid, failed=True):
            of_host = tuple(c for c in run.comparisons if c.subject is Subject.HOST)
            found += [replace(run, comparisons=of_host)] if any(c.wrong for c in of_host) else []
    return found


def _failure(key: Key, found: Sequence[tuple[Run, Comparison]], proofs: Mapping[int, Proof]) -> Json:
    probe, _, _, case, _, _, subject = key
    wrong = [(r, c) for r, c in found if c.wrong]
    by = next((proofs[id(c)] for _, c in reversed(wrong) if id(c) in proofs), None)
    evidence = [c.evidence for _, c in wrong if c.evidence]
    best = max(evidence, key=lambda e: (bool(e.repeats), e.wrong), default=None)
    elements = [(r.id, *element) for r, c in wrong if c.evidence for element in c.evidence.first]
    bits: Counter[int] = Counter()
    for e in evidence:
        bits.update({int(bit): n for bit, n in e.bits.items()})
    failed = {r.id for r, _ in wrong}
    return dict(
        **dict(zip(KEY, key, strict=True)),
        exactness=wrong[0][1].exactness.value,
        characterised=by is not None or subject != Subject.DEVICE.value,
        characterised_by=by.by.value if by is not None else "",
        first=min(r.started for r, _ in wrong),
        last=max(r.started for r, _ in wrong),
        runs=rate(len(failed), len({r.id for r, _ in found})),
        **_counted([c for _, c in found]),
        run_ids=sorted(failed)[-findings.RUNS_NAMED :],
        places=_placed([c for _, c in found]),
        pattern=best.pattern if best else "",
        reproduced=describe_repeats(_repeats(evidence)) if evidence else "",
        lines=_shared(evidence),
        zeroed=sum(e.zeroed for e in evidence),
        nonfinite=sum(e.nonfinite for e in evidence),
        wrong_elements=sum(e.wrong for e in evidence),
        elements_of_result=best.total if best else 0,
        elements=[{"run": r, "index": i, "expected": want, "observed": got} for r, i, want, got in elements],
        format=type_of(probe, case, evidence),
        bits={str(bit): bits[bit] for bit in sorted(bits)},
        repro=max((r for r, _ in wrong), key=lambda r: (bool(r.cases), r.started)).repro,
        exhibit="",
        exhibit_absent="",
        script="",
    )


def _repeats(evidence: Sequence[Evidence]) -> Evidence:
    """Return evidence with the sum of the repeats of all runs, because the repeats of one run would be a selection."""
    alike = [e.repeats_alike for e in evidence if e.repeats_wrong]
    return replace(
        evidence[0],
        repeats=sum(e.repeats for e in evidence),
        repeats_wrong=sum(e.repeats_wrong for e in evidence),
        repeats_alike=None if None in alike else sum(n for n in alike if n is not None),
    )


def _shared(evidence: Sequence[Evidence]) -> dict[str, str]:
    """Return axis → text about the wrong indices of all runs together; an axis with unknown indices is left out."""
    found = {}
    for axis in dict.fromkeys(axis for e in evidence for axis in e.lines):
        spans = [e.lines[axis] for e in evidence if axis in e.lines]
        period = min((s.period for s in spans if s.period), default=0)
        left = {s.first % period if period and s.shared else None for s in spans}
        if len(spans) == 1 or (spans[0].shared and len({str(s) for s in spans}) == 1):
            found[axis] = str(spans[0])
        elif len(left) == 1 and None not in left:
            found[axis] = f"= {left.pop()} mod {period}"
        elif all(s.distinct for s in spans):  # a record of release 0.1.0 may know no first and last
            found[axis] = f"{min(s.first for s in spans)} to {max(s.last for s in spans)}"
    return found


def _counted(comparisons: Iterable[Comparison]) -> dict[str, Any]:
    """Return {"uploads": wrong and all uploads with the rate's interval, "results": wrong and all results}.

    The uploads include the clean repeats after a wrong upload; these are not stored as comparisons.
    """
    every = list(comparisons)
    clean = sum(c.evidence.repeats - c.evidence.repeats_wrong for c in every if c.evidence)
    results = {"wrong": sum(c.wrong_trials for c in every), "total": sum(c.trials for c in every)}
    return {"uploads": rate(sum(c.wrong for c in every), sum(c.uploads for c in every) + clean), "results": results}


def placed(facts: Facts) -> list[Json]:
    """Return the device's results by place (core, SM, …): how many were computed there, and how many were wrong."""
    return _placed(c for r in facts.runs for c in r.comparisons if c.subject is Subject.DEVICE)


def _placed(comparisons: Iterable[Comparison]) -> list[Json]:
    at: dict[Place, list[Comparison]] = defaultdict(list)
    for c in comparisons:
        at[c.place].append(c)
    return [
        {"place": str(p), "unit": p.unit, "numbers": p.numbers, **_counted(at[p])}
        for p in sorted(at, key=lambda p: (p.unit, p.numbers))
        if p.unit
    ]


def bit_totals(failures: Sequence[Json]) -> list[Json]:
    """Return, for each number format of results, how often each bit was flipped in all failing cases."""
    sums: dict[str, Counter[int]] = defaultdict(Counter)
    for failure in failures:
        sums[failure["format"]].update({int(b): n for b, n in failure["bits"].items()})
    return [
        {
            "format": form,
            "width": WIDTH.get(form, max(counts) + 1),
            "bits": [{"bit": b, "name": bit_name(form, b), "count": counts[b]} for b in sorted(counts)],
        }
        for form, counts in sorted(sums.items())
        if counts
    ]


def probe_totals(facts: Facts) -> list[Json]:
    """Return for each probe the counts of its results, and the upper bound of the fault rate if all were right."""
    bounds = fault_rate_bound(facts.runs)
    by_probe: dict[str, list[Run]] = defaultdict(list)
    for run in facts.runs:
        by_probe[run.probe].append(run)
    told = {probe: t for i in incidents(facts.verdict) if i.wrong for probe, t in i.wrong.probes.items()}
    results = {probe: told.get(probe) or counted(runs) for probe, runs in by_probe.items()}
    return [
        dict(
            probe=probe,
            runs=len(runs),
            not_completed=sum(r.outcome is not Outcome.COMPLETED for r in runs),
            **_counted(c for r in runs for c in r.comparisons if c.subject is Subject.DEVICE)
            | {"results": {"wrong": results[probe].wrong, "total": results[probe].of}},
            rules_out=bounds.get(probe),
            recordings=sum(len(r.recordings) for r in runs),
            unknown=sum(len(r.unknown) for r in runs),
            first=runs[0].started,
            last=runs[-1].started,
        )
        for probe, runs in sorted(by_probe.items())
    ]


def peer_results(facts: Facts, peers: Iterable[Device], failures: Sequence[Json]) -> list[Json]:
    """Return for each peer (identical device) the counts of its results in the same probes and on the same operands."""
    verdicts = facts.store.verdicts()
    probes = {f["probe"] for f in failures} or {r.probe for r in facts.runs}
    keys = {tuple(f[name] for name in KEY) for f in failures}
    own_stack = facts.runs[-1].stack_id if facts.runs else ""
    found = []
    for peer in sorted(peers, key=lambda d: d.name):
        by_probe = (facts.store.runs(peer.uuid, p, limit=PEER_RUNS) for p in sorted(probes))
        runs = [run for of_probe in by_probe for run in of_probe]
        results = [(_key(r, c), c) for r in runs for c in r.comparisons if c.subject is Subject.DEVICE]
        same = [c for key, c in results if key in keys]
        found.append(
            {
                "uuid": peer.uuid,
                "name": peer.name,
                "state": verdicts[peer.uuid].state.value if peer.uuid in verdicts else "unknown",
                "results": sum(c.trials for _, c in results),
                "wrong": sum(c.wrong_trials for _, c in results),
                "same_stack": any(r.stack_id == own_stack for r in runs if r.stack),
                "same_bytes": sum(c.trials for c in same),
                "same_bytes_wrong": sum(c.wrong_trials for c in same),
            }
        )
    return found
