"""When a verdict is worth writing again."""

from __future__ import annotations

from canaryd.model import (
    Verdict,
)

REWRITE = 600.0
"""Seconds after which an unchanged verdict is written again, so that readers of the store see that it is maintained."""
REJUDGED = 600.0
"""Seconds after which recordings are judged anew though none was added: their windows are days."""
REWORD = 60.0
"""The same where only its words are others, since "3 minutes ago" would be written at every look."""


def news(verdict: Verdict, previous: Verdict | None) -> bool:
    """Return whether a verdict is worth a write: it says something else, or the stored one looks old."""
    if previous is None or (verdict.state, verdict.cause) != (previous.state, previous.cause):
        return True
    if [(f.rule, f.state) for f in verdict.findings] != [(f.rule, f.state) for f in previous.findings]:
        return True
    same = [f.message for f in verdict.findings] == [f.message for f in previous.findings]
    return verdict.decided - previous.decided > (REWRITE if same else REWORD)
