"""Incidents: the findings that one fault explains, as one thing that every report tells alike.

An incident is derived from the findings of a verdict and stored nowhere, so no two reports can differ. Findings belong
together by their rules, times and causes, never by their words. `FAMILIES` says which.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from canaryd.formatting import DAY
from canaryd.judge.findings import CAUSES, DEPARTED, NO_EVIDENCE, NOT_COMPLETED, RUNS_NAMED, UNCHARACTERISED, conclusion
from canaryd.model import Cause, Finding, ProbeTally, State, Verdict, WrongResults

BESIDE = DAY
"""Seconds by which what a fault explains may have begun before it was seen itself (ours); no verdict rests on it."""
WRONG = ("exact-mismatch-confirmed", "exact-mismatch", "golden-disagreement", "comparator-disagreement")
"""Rules that accuse the device of wrong results; the first that speaks leads the incident."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """Rules whose findings one fault explains."""

    leads: tuple[str, ...]
    """Rules that show the fault itself, the most telling first."""
    explains: tuple[str, ...]
    """Rules of what follows from it, where it began with the fault or after it, and no other cause is known."""


FAMILIES = (
    Family(
        leads=WRONG,
        explains=(
            *(UNCHARACTERISED, "host-in-doubt", "device-error", DEPARTED),
            *("recording-departed", "recording-unconfirmed", "recording-outvoted", "broken-output"),
        ),
    ),
    Family(
        leads=("gpu-lost", "device-vanished", "keeps-vanishing"),
        explains=(
            *("telemetry-stale", "stale-evidence", NO_EVIDENCE, NOT_COMPLETED, "unreached", "device-error"),
            *("xid-recovery", "recovery-action", "keeps-failing", "pcie-aer", "kernel-pcie"),
        ),
    ),
    Family(leads=("keeps-failing",), explains=(NOT_COMPLETED, "stale-evidence", NO_EVIDENCE)),
    Family(
        leads=("row-remap-failed", "sram-threshold", "row-remap-exhausted", "uncorrected-error"),
        explains=("row-remap-pending", "retired-pages", "retired-pages-pending", "memory-bad-pages", "device-error"),
    ),
    Family(leads=("host-uncorrected-error",), explains=("machine-check",)),
    Family(leads=("throttled", "hot"), explains=()),
    Family(leads=("pcie-aer", "pcie-width", "pcie-generation", "pcie-replays"), explains=("kernel-pcie",)),
)
"""Asked in this order. Findings of no family belong together by rule and cause."""


@dataclass(frozen=True, kw_only=True)
class Incident:
    """One fault of one device."""

    findings: tuple[Finding, ...]
    """What says so, the one that tells most of it first."""
    since: float
    """When it began, as far as that is known, in seconds since the epoch."""

    @property
    def lead(self) -> Finding:
        """The finding that tells most of it."""
        return self.findings[0]

    @property
    def state(self) -> State:
        """The worst state that its findings call for."""
        return conclusion(self.findings)[0]

    @property
    def cause(self) -> Cause:
        """The cause of the findings that call for its state."""
        return conclusion(self.findings)[1]

    @property
    def rules(self) -> tuple[str, ...]:
        """The rules of its findings, each once."""
        return tuple(dict.fromkeys(f.rule for f in self.findings))

    @property
    def probes(self) -> tuple[str, ...]:
        """The probes that show it, each once."""
        wrong = self.wrong.probes if self.wrong else {}
        return tuple(sorted(wrong or {f.probe for f in self.findings if f.probe}))

    @property
    def runs(self) -> tuple[str, ...]:
        """Ids of its newest runs, oldest first."""
        return tuple(sorted({run for f in self.findings for run in f.runs}))[-RUNS_NAMED:]

    @property
    def repeat(self) -> str:
        """The command that repeats it; "" where no run shows it."""
        return next((f.repro for f in self.findings if f.repro), "")

    @functools.cached_property
    def wrong(self) -> WrongResults | None:
        """What its wrong results amount to; None where it is about something else."""
        accusing = [f.wrong for f in self.findings if f.wrong and f.rule in WRONG]
        parts = accusing or [f.wrong for f in self.findings if f.wrong]
        return functools.reduce(_merged, parts) if parts else None


def incidents(verdict: Verdict) -> tuple[Incident, ...]:
    """Return the incidents of a device, the worst first; what is healthy is no incident."""
    left = [f for f in verdict.findings if f.state is not State.HEALTHY]
    found: list[tuple[Finding, ...]] = []
    for family in FAMILIES:
        # Wrong results of the software and those of the device are two faults, as for the judge.
        for excused in (False, True):
            leads = [f for f in left if f.rule in family.leads and (f.cause is Cause.SOFTWARE) is excused]
            if leads:
                leads.sort(key=lambda f: (-f.state.severity, family.leads.index(f.rule)))
                members = [*leads, *(f for f in left if f.rule in family.explains and _follows(f, leads))]
                left = [f for f in left if f not in members]
                found.append(tuple(members))

    ended = {f.probe: f for f in left if f.rule == NOT_COMPLETED}

    def alike(finding: Finding) -> tuple[str, str]:
        # That a probe has no fresh result follows from how its newest run ended.
        lead = ended.get(finding.probe, finding) if finding.rule in (NO_EVIDENCE, "stale-evidence") else finding
        return lead.rule, lead.cause.value

    left.sort(key=lambda f: (*alike(f), f.rule != NOT_COMPLETED))
    found += [tuple(group) for _, group in itertools.groupby(left, key=alike)]
    made = [Incident(findings=each, since=_since(each, verdict)) for each in found]
    return tuple(sorted(made, key=lambda i: (-i.state.severity, CAUSES.index(i.cause), i.since, i.lead.rule)))


def notes(verdict: Verdict) -> tuple[Finding, ...]:
    """Return the findings that say nothing against the device."""
    return tuple(f for f in verdict.findings if f.state is State.HEALTHY)


def _follows(finding: Finding, leads: Sequence[Finding]) -> bool:
    """Return whether a finding may come of a fault: it did not begin long before, blames nothing else, and is no worse.

    What is worse than a fault that an operator has acknowledged was not acknowledged with it.
    """
    began = min((f.since for f in leads if f.since), default=0.0)
    causes = {finding.cause, *(f.cause for f in leads)} - {Cause.UNDETERMINED}
    worst = max(f.state.severity for f in leads)
    return (
        (not finding.since or finding.since >= began - BESIDE) and len(causes) <= 1 and finding.state.severity <= worst
    )


def _since(findings: Iterable[Finding], verdict: Verdict) -> float:
    return min((f.since for f in findings if f.since), default=verdict.since)


def _merged(one: WrongResults, other: WrongResults) -> WrongResults:
    """Return what two findings about one fault say together.

    What both say of a probe rests on the same results, or of one of them on more: the larger count holds.
    """
    tallies: dict[str, ProbeTally] = {**one.probes}
    for probe, tally in other.probes.items():
        tallies[probe] = max(tallies.get(probe, tally), tally, key=lambda t: (t.wrong, t.of))
    return WrongResults(
        probes=dict(sorted(tallies.items())),
        why=one.why or other.why,
        confirmed=one.confirmed or other.confirmed,
        to_come=max(one.to_come, other.to_come),
        elsewhere=one.elsewhere or other.elsewhere,
    )
