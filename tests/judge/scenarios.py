"""All scenarios of the judge: what is known, and the verdict."""

from tests.judge.evidence_scenarios import EVIDENCE
from tests.judge.mismatch_scenarios import MISMATCHES

SCENARIOS = {**MISMATCHES, **EVIDENCE}
