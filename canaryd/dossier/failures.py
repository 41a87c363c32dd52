"""The failing cases of a device: how often, where, which bits, and what identical devices computed."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from canaryd.dossier.facts import Facts
from canaryd.facts import Comparison, Evidence, Place, Subject
from canaryd.judge import findings
from canaryd.judge.characterised import Claims, Proof
from canaryd.judge.node import Node
from canaryd.judge.phrases import describe_repeats
from canaryd.judge.statistics import interval
from canaryd.judge.verdict import fault_rate_bound
from canaryd.model import Device, Outcome, Run

FAILURES = 50
"""Failing cases described at most: a broken part fails in every case."""
BINS = 32
"""Cells of a map along one axis at most."""
PEER_RUNS = 2000
"""Newest runs of one probe that are read for a peer."""
MANTISSA = {"float64": 52, "float32": 23, "bfloat16": 7, "float16": 10}
"""Format → bits of its mantissa (IEEE 754-2019 table 3.5; bfloat16: the upper half of float32)."""
WIDTH = {"float64": 64, "float32": 32, "bfloat16": 16, "float16": 16, "int64": 64, "int32": 32}


def rate(wrong: int, total: int) -> dict[str, Any]:
    """Return wrong and all independent trials, with the 95 % interval of the rate (None without a trial)."""
    low, high = interval(wrong, total)
    return {"wrong": wrong, "total": total, "low": low if total else None, "high": high if total else None}


def bit_name(form: str, bit: int) -> str:
    """Return what a bit of a format means; "" where that is not known."""
    if form.startswith("int"):
        return "sign" if bit == WIDTH[form] - 1 else "lowest of the integer" if bit == 0 else "integer"
    if form not in MANTISSA:
        return ""
    if bit == WIDTH[form] - 1:
        return "sign"
    if bit >= MANTISSA[form]:
        return "exponent"
    return "lowest of the mantissa" if bit == 0 else "mantissa"


def result_format(probe: str, case: str, digits: int) -> str:
    """Return the format of a case's result; its width in bits where the name does not contain the format."""
    label = case.partition("/")[0]
    form = label.partition(">")[2] or label
    form = {"tfloat32": "float32"}.get(form, form)
    if probe == "exact_integer" and case.startswith("int64/embedding/"):
        form = "int32"
    return form if form in WIDTH else f"{digits * 4} bits" if digits else "not known"


Key = tuple[str, int, str, str, str, int, str]
"""Probe, its version, instruction set, case, shape, seed, subject: equal keys mean bit-for-bit equal operands."""


def _key(run: Run, c: Comparison) -> Key:
    return run.probe, run.probe_version, run.instruction_set, c.case, c.shape, c.seed, c.subject.value


def find_failures(facts: Facts, peers: Sequence[Device]) -> tuple[list[dict[str, Any]], int]:
    """Return the failing cases, the most often wrong first, and how many more there are."""
    runs = [*facts.runs, *_runs_with_wrong_reference(facts)]
    by_key: dict[Key, list[tuple[Run, Comparison]]] = defaultdict(list)
    for run in runs:
        for c in run.comparisons:
            by_key[_key(run, c)].append((run, c))
    failing = {k: v for k, v in by_key.items() if any(c.wrong for _, c in v)}

    def worst_first(key: Key) -> Any:
        wrong = [(r, c) for r, c in failing[key] if c.wrong]
        size = next((c.evidence.total for _, c in wrong if c.evidence), 0)
        return (
            key[6] != Subject.DEVICE.value,
            -len({r.id for r, _ in wrong}),
            -sum(c.wrong_trials for _, c in wrong),
            size,
            key,
        )

    ordered = sorted(failing, key=worst_first)
    probes = {k[0] for k in ordered}
    peer_runs = [(peer, _peer_runs(facts, peer, probes)) for peer in peers]
    proofs = _proofs(facts)
    found = [_failure(k, failing[k], peer_runs, proofs) for k in ordered[:FAILURES]]
    return found, max(0, len(ordered) - FAILURES)


def _proofs(facts: Facts) -> dict[int, Proof]:
    """Return the `id` of a wrong comparison → by what its class is characterised; without those of no class."""
    device = facts.device
    among = Node(devices={device.uuid: device}, runs={device.uuid: tuple(facts.runs)}, claims=Claims(facts.store.met()))
    return {id(m.comparison): m.proof for m in among.missed[device.uuid] if m.proof is not None}


def _runs_with_wrong_reference(facts: Facts) -> list[Run]:
    """Return runs of other devices in which the host's processor computed a wrong reference, reduced to those cases."""
    if facts.device.backend != "cpu" or facts.drill:
        return []
    found = []
    for uuid in (r.device.uuid for r in facts.store.devices() if r.device.uuid != facts.device.uuid):
        for run in facts.store.runs(uuid, failed=True):
            of_host = tuple(c for c in run.comparisons if c.subject is Subject.HOST)
            found += [replace(run, comparisons=of_host)] if any(c.wrong for c in of_host) else []
    return found


def _peer_runs(facts: Facts, peer: Device, probes: Iterable[str]) -> list[Run]:
    """Return the newest runs of a peer with these probes."""
    return [r for p in sorted(probes) for r in facts.store.runs(peer.uuid, p, drill=facts.drill, limit=PEER_RUNS)]


def _failure(
    key: Key,
    found: Sequence[tuple[Run, Comparison]],
    peer_runs: Sequence[tuple[Device, Sequence[Run]]],
    proofs: Mapping[int, Proof],
) -> dict[str, Any]:
    probe, version, instruction_set, case, shape, seed, subject = key
    wrong = [(r, c) for r, c in found if c.wrong]
    by = next((proofs[id(c)] for _, c in reversed(wrong) if id(c) in proofs), None)
    evidence = [c.evidence for _, c in wrong if c.evidence]
    best = max(evidence, key=lambda e: (bool(e.repeats), e.wrong), default=None)
    elements = [(r.id, *element) for r, c in wrong if c.evidence for element in c.evidence.first]
    digits = len(elements[0][2].removeprefix("0x")) if elements else 0
    bits: Counter[int] = Counter()
    for e in evidence:
        bits.update({int(bit): n for bit, n in e.bits.items()})
    runs, failed_runs = {r.id for r, _ in found}, {r.id for r, _ in wrong}
    return {
        "probe": probe,
        "version": version,
        "instruction_set": instruction_set,
        "case": case,
        "shape": shape,
        "seed": seed,
        "subject": subject,
        "exactness": wrong[0][1].exactness.value,
        "characterised": by is not None if subject == Subject.DEVICE.value else True,
        "characterised_by": by.by.value if by is not None else "",
        "first": min(r.started for r, _ in wrong),
        "last": max(r.started for r, _ in wrong),
        "runs": rate(len(failed_runs), len(runs)),
        **_counted([c for _, c in found]),
        "run_ids": sorted(failed_runs)[-findings.RUNS_NAMED :],
        "places": placed([c for _, c in found]),
        "pattern": best.pattern if best else "",
        "reproduced": describe_repeats(_repeats(evidence)) if evidence else "",
        "lines": _shared(evidence),
        "zeroed": sum(e.zeroed for e in evidence),
        "nonfinite": sum(e.nonfinite for e in evidence),
        "wrong_elements": sum(e.wrong for e in evidence),
        "elements_of_result": best.total if best else 0,
        "elements": [{"run": r, "index": list(i), "expected": want, "observed": got} for r, i, want, got in elements],
        "format": result_format(probe, case, digits),
        "bits": {str(bit): bits[bit] for bit in sorted(bits)},
        "map": _map([tuple(i) for _, i, _, _ in elements], shape, best.total if best else 0),
        "peers": _same_bytes(key, peer_runs),
        "repro": max((r for r, _ in wrong), key=lambda r: (bool(r.cases), r.started)).repro,
        "exhibit": "",
        "exhibit_absent": "",
    }


def _repeats(evidence: Sequence[Evidence]) -> Evidence:
    """Return the evidence with all fresh uploads of all runs: one run's would be chosen."""
    alike = [e.repeats_alike for e in evidence if e.repeats_wrong]
    return replace(
        evidence[0],
        repeats=sum(e.repeats for e in evidence),
        repeats_wrong=sum(e.repeats_wrong for e in evidence),
        repeats_alike=None if None in alike else sum(n for n in alike if n is not None),
    )


def _shared(evidence: Sequence[Evidence]) -> dict[str, str]:
    """Return what the wrong indices of all runs share along each axis; nothing of one where that is not known."""
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
            found[axis] = f"{min(s.first for s in spans)}…{max(s.last for s in spans)}"
    return found


def _counted(comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """Return how many uploads were wrong, with the interval, and how many results, without one.

    Results of one upload are not independent: what the upload put into memory spoils all of them alike.
    """
    uploads = sum(c.uploads + _clean_reuploads(c.evidence) for c in comparisons)
    results = {"wrong": sum(c.wrong_trials for c in comparisons), "total": sum(c.trials for c in comparisons)}
    return {"uploads": rate(sum(c.wrong for c in comparisons), uploads), "results": results}


def _clean_reuploads(evidence: Evidence | None) -> int:
    """Return how many fresh uploads after a wrong one were clean: no comparison is stored for those."""
    return evidence.repeats - evidence.repeats_wrong if evidence else 0


def placed(comparisons: Iterable[Comparison]) -> list[dict[str, Any]]:
    """Return the places where results were computed, with how many were wrong there, ordered by number."""
    at: dict[Place, list[Comparison]] = defaultdict(list)
    for c in comparisons:
        at[c.place].append(c)
    return [
        {"place": str(p), "unit": p.unit, "numbers": list(p.numbers), **_counted(at[p])}
        for p in sorted(at, key=lambda p: (p.unit, p.numbers))
        if p.unit
    ]


def _map(indices: Sequence[tuple[int, ...]], shape: str, total: int) -> dict[str, Any] | None:
    """Return where in the result the wrong elements lie, in at most 32 x 32 cells; None where no element is known."""
    if not indices:
        return None
    sizes = {name: int(n) for name, n in re.findall(r"\b([A-Z])=(\d+)", shape)}
    width = len(indices[0])
    if width == 1:
        # A long vector is folded like text: row and column are the quotient and the remainder.
        columns = 2 ** max(0, math.ceil(math.log2(max(1, total)) / 2))
        rows = max(1, -(-total // columns))
        cells = [(i[0] // columns, i[0] % columns) for i in indices]
        axes = (f"element // {columns}", f"element % {columns}")
    else:
        named = ("M", "N") if {"M", "N"} <= sizes.keys() else ("L", "D")
        rows = max(sizes.get(named[0], 0), 1 + max(i[-2] for i in indices))
        columns = max(sizes.get(named[1], 0), 1 + max(i[-1] for i in indices))
        cells, axes = [(i[-2], i[-1]) for i in indices], ("row", "column")
    high, wide = min(BINS, rows), min(BINS, columns)
    counts = Counter((r * high // rows, c * wide // columns) for r, c in cells)
    return {
        "rows": rows,
        "columns": columns,
        "row_bins": high,
        "column_bins": wide,
        "axes": list(axes),
        "counts": [[r, c, n] for (r, c), n in sorted(counts.items())],
        "elements": len(indices),
    }


def _same_bytes(key: Key, peer_runs: Sequence[tuple[Device, Sequence[Run]]]) -> list[dict[str, Any]]:
    """Return the peers that computed the same bytes, with their results."""
    found = []
    for peer, runs in peer_runs:
        same = [c for r in runs for c in r.comparisons if _key(r, c) == key]
        if same:
            counts = {"results": sum(c.trials for c in same), "wrong": sum(c.wrong_trials for c in same)}
            found.append({"uuid": peer.uuid, "name": peer.name, **counts})
    return found


def bit_totals(failures: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the flipped bits of all failing cases, by the format of the result."""
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


def probe_totals(facts: Facts) -> list[dict[str, Any]]:
    """Return the results of each probe and the fault rate that they rule out."""
    bounds = fault_rate_bound(facts.runs, drill=facts.drill)
    found = []
    for probe in sorted({r.probe for r in facts.runs}):
        runs = [r for r in facts.runs if r.probe == probe]
        done = [r for r in runs if r.outcome is Outcome.COMPLETED]
        of_device = [c for r in runs for c in r.comparisons if c.subject is Subject.DEVICE]
        found.append(
            {
                "probe": probe,
                "runs": len(runs),
                "not_completed": len(runs) - len(done),
                **_counted(of_device),
                "rules_out": bounds.get(probe),
                "recordings": sum(len(r.recordings) for r in runs),
                "unknown": sum(len(r.unknown) for r in runs),
                "first": runs[0].started,
                "last": runs[-1].started,
            }
        )
    return found


def peer_results(facts: Facts, peers: Sequence[Device], failures: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the results of the peers in the same probes."""
    verdicts = {} if facts.drill else facts.store.verdicts()
    probes = {f["probe"] for f in failures} or {r.probe for r in facts.runs}
    own_stack = facts.runs[-1].stack_id if facts.runs else ""
    found = []
    for peer in sorted(peers, key=lambda d: d.name):
        runs = _peer_runs(facts, peer, probes)
        results = [c for r in runs for c in r.comparisons if c.subject is Subject.DEVICE]
        found.append(
            {
                "uuid": peer.uuid,
                "name": peer.name,
                "state": verdicts[peer.uuid].state.value if peer.uuid in verdicts else "unknown",
                "results": sum(c.trials for c in results),
                "wrong": sum(c.wrong_trials for c in results),
                "same_stack": any(r.stack_id == own_stack for r in runs if r.stack),
                "same_bytes": sum(p["results"] for f in failures for p in f["peers"] if p["uuid"] == peer.uuid),
                "same_bytes_wrong": sum(p["wrong"] for f in failures for p in f["peers"] if p["uuid"] == peer.uuid),
            }
        )
    return found
