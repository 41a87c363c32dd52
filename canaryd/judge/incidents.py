"""Incidents: an incident is all findings that one fault explains. Every report shows it in the same way.

An incident is derived from the findings of a verdict and is not stored, so no two reports can differ. Rules, times
and causes decide which findings belong together; their words never do. `FAMILIES` has the rules.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
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
from canaryd.model import Cause, Finding, State, Verdict, WrongResults

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
            *("xid", "driver-advice", "keeps-failing", "pcie-aer", "event-reported"),
        ),
    ),
    Family(leads=("keeps-failing",), explains=(NOT_COMPLETED, "stale-evidence", NO_EVIDENCE)),
    Family(leads=("memory-failed", "uncorrected-error"), explains=("memory-worn", "machine-check", "device-error")),
    Family(leads=("pcie-aer", "pcie-slow", "link-errors"), explains=()),
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
    def blaming(self) -> Finding:
        """The first finding that has the incident's state and cause."""
        return next(f for f in self.findings if (f.state, f.cause) == (self.state, self.cause))

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
    found: list[list[Finding]] = []
    # Wrong results of the software and those of the device are two faults, as for the judge.
    for family, excused in itertools.product(FAMILIES, (False, True)):
        if leads := [f for f in left if f.rule in family.leads and (f.cause is Cause.SOFTWARE) is excused]:
            leads.sort(key=lambda f: (-f.state.severity, family.leads.index(f.rule)))
            found.append([*leads, *(f for f in left if f.rule in family.explains and _follows(f, leads))])
            left = [f for f in left if f not in found[-1]]
    made = [Incident(findings=tuple(each), since=_since(each, verdict)) for each in (*found, *_alike(left))]
    return tuple(sorted(made, key=lambda i: (-i.state.severity, CAUSES.index(i.cause), i.since, i.lead.rule)))


def _alike(findings: Sequence[Finding]) -> Iterable[list[Finding]]:
    """Return findings in groups of one rule and cause. How a probe's newest run ended says why it has no result."""
    ended = {f.probe: f for f in findings if f.rule == NOT_COMPLETED}
    alike: dict[tuple[str, Cause], list[Finding]] = defaultdict(list)
    for each in sorted(findings, key=lambda f: f.rule != NOT_COMPLETED):
        lead = ended.get(each.probe, each) if each.rule in (NO_EVIDENCE, "stale-evidence") else each
        alike[lead.rule, lead.cause].append(each)
    return alike.values()


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

    Of a probe in both they give the same counts.
    """
    return WrongResults(
        probes=dict(sorted({**other.probes, **one.probes}.items())),
        why=one.why or other.why,
        confirmed=one.confirmed or other.confirmed,
        to_come=max(one.to_come, other.to_come),
        doubt=one.doubt or other.doubt,
        elsewhere=one.elsewhere or other.elsewhere,
        files=one.files or other.files,
    )
