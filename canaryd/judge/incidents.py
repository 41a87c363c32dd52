"""Incidents: an incident is all findings that one fault explains. Every report shows it in the same way.

An incident is derived from the findings of a verdict and is not stored, so no two reports can differ. Rules, times
and causes decide which findings belong together; their words never do. `FAMILIES` has the rules.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from canaryd.formatting import DAY
from canaryd.judge.findings import (
    CAUSES,
    DEPARTED,
    NO_EVIDENCE,
    NOT_COMPLETED,
    OTHER_BITS,
    RUNS_NAMED,
    UNCHARACTERISED,
    conclusion,
)
from canaryd.model import Cause, Finding, ProbeTally, State, Verdict, WrongResults

BESIDE = DAY
"""Seconds by which a consequence can begin before the fault itself was seen (ours). No verdict depends on it."""
WRONG = ("exact-mismatch-confirmed", "exact-mismatch", "golden-disagreement", "comparator-disagreement")
"""Rules that accuse the device of wrong results, the most informative first."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """Rules whose findings one fault can cause together."""

    leads: tuple[str, ...]
    """Rules about the fault itself, the most informative first."""
    explains: tuple[str, ...]
    """Rules about consequences. Their findings count if they began with the fault or later and have no other cause."""


FAMILIES = (
    Family(
        leads=WRONG,
        explains=(
            *(UNCHARACTERISED, "host-in-doubt", "device-error", DEPARTED),
            *(OTHER_BITS, "broken-output"),
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
"""The families; a finding belongs to the first that has its rule. All other findings are grouped by rule and cause."""


@dataclass(frozen=True, kw_only=True)
class Incident:
    """One fault of one device."""

    findings: tuple[Finding, ...]
    """The findings about the fault, the most informative first."""
    since: float
    """Time at which the incident began, as far as known, in seconds since the epoch."""

    @property
    def lead(self) -> Finding:
        """The most informative finding."""
        return self.findings[0]

    @property
    def state(self) -> State:
        """The worst state among the incident's findings."""
        return conclusion(self.findings)[0]

    @property
    def cause(self) -> Cause:
        """The cause of the findings with the worst state."""
        return conclusion(self.findings)[1]

    @property
    def rules(self) -> tuple[str, ...]:
        """The rules of the incident's findings, each once."""
        return tuple(dict.fromkeys(f.rule for f in self.findings))

    @property
    def probes(self) -> tuple[str, ...]:
        """The probes that show the incident, each once."""
        wrong = self.wrong.probes if self.wrong else {}
        return tuple(sorted(wrong or {f.probe for f in self.findings if f.probe}))

    @property
    def runs(self) -> tuple[str, ...]:
        """Ids of the newest runs that show the incident, oldest first."""
        return tuple(sorted({run for f in self.findings for run in f.runs}))[-RUNS_NAMED:]

    @property
    def repeat(self) -> str:
        """The command that repeats the test that shows the incident, or "" if no run shows it."""
        return next((f.repro for f in self.findings if f.repro), "")

    @functools.cached_property
    def wrong(self) -> WrongResults | None:
        """The summary of the incident's wrong results; None if it is about something else."""
        accusing = [f.wrong for f in self.findings if f.wrong and f.rule in WRONG]
        parts = accusing or [f.wrong for f in self.findings if f.wrong]
        return functools.reduce(_merged, parts) if parts else None


def incidents(verdict: Verdict) -> tuple[Incident, ...]:
    """Return the incidents of a device, the worst first. A healthy finding is no incident."""
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
    """Return the findings with the state healthy, which say nothing against the device."""
    return tuple(f for f in verdict.findings if f.state is State.HEALTHY)


def _follows(finding: Finding, leads: Sequence[Finding]) -> bool:
    """Return whether the fault of `leads` can explain a finding.

    It can if the finding did not begin long before the fault, has no other cause, and is no worse. A finding that is
    worse than an acknowledged fault was not acknowledged with it.
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
    """Return one summary of wrong results from the summaries of two findings about the same fault.

    For a probe in both, the larger count is right, because it contains the results of the smaller one.
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
