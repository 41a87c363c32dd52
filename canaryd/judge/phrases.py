"""Phrases that several rules share.

The sentences of a finding are in the file of its rule, those of an incident in canaryd/report/incidents.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from canaryd.facts import Doubt, Evidence
from canaryd.formatting import HOUR, MINUTE, command
from canaryd.judge.cause import Mismatch
from canaryd.model import Device, Elsewhere, Run

PROVIDER = "your hardware provider (cloud or vendor)"
"""Words for the owner of a part that its uuid does not name: canaryd does not know whether the machine is virtual."""
DOUBTS = {
    Doubt.MADE_TWICE.value: "This CPU computed the reference twice and got two results",
    Doubt.ARITHMETIC.value: "Integer and float64 arithmetic of this CPU disagree",
    Doubt.DIGEST.value: "The reference computed on this CPU differs from the shipped one",
    Doubt.UNKNOWN.value: "The reference computed on this CPU is in doubt",
}
"""Reason to doubt a golden (a value of `Doubt`) → words for it."""
VENDOR_CASE = "open a vendor case"
KERNEL_LOG = "journalctl -k -n 100"
"""Command that shows the newest lines of the kernel log."""
DETAIL = 300
"""Most characters of a worker's own message that a finding repeats."""


def describe(mismatch: Mismatch) -> str:
    """Return text about one mismatch: case, operands, place, elements and bits."""
    c, found = mismatch.comparison, mismatch.comparison.evidence
    text = f"{c.case} ({', '.join(filter(None, (c.shape, f'seed {c.seed}')))})"
    text += f" {'in' if c.place.unit == 'memory' else 'on'} {c.place}" if str(c.place) else ""
    if found is None:
        return f"{text}: {c.wrong_trials} of {c.trials} results wrong"
    if found.wrong:
        text += f": {found.wrong} of {found.total} elements wrong"
    return "; ".join(filter(None, (f"{text}: {found.pattern}", describe_repeats(found))))


def describe_repeats(found: Evidence) -> str:
    """Return text about the results of fresh uploads of the same operands; "" if there were none."""
    if not found.repeats:
        return ""
    text = f"{found.repeats_wrong} of {found.repeats} fresh uploads wrong"
    if found.repeats_wrong and found.repeats_alike is not None:
        text += f", {found.repeats_alike} with the same bits in the same elements"
    return text


def recipient(device: Device) -> str:
    """Return words for the receiver of the report on a faulty part, such as the vendor."""
    return PROVIDER if device.weak_identity else "the vendor"


def whom_to_tell(device: Device) -> str:
    """Return words for what to do after a faulty part was taken out of service."""
    return f"tell {PROVIDER}" if device.weak_identity else VENDOR_CASE


def identical(device: Device, elsewhere: Elsewhere | None) -> str:
    """Return words for where to repeat a test to find the cause: an identical device of this node, or another node.

    If `elsewhere` names only a backend, its command would test the same device again on this node.
    """
    if elsewhere is None or elsewhere.device == device.backend:
        return "another node (not here) with the same model and software"
    return f"{elsewhere.device}, which is identical"


def find_cause(device: Device, elsewhere: Elsewhere | None) -> str:
    """Return a sentence that says how to find the cause of wrong results."""
    return f"To find the cause, repeat the test on {identical(device, elsewhere)}"


def repeating(of: Elsewhere, device: str) -> str:
    """Return the command that repeats a test on a device."""
    size, unit = next(((s, u) for s, u in ((HOUR, "h"), (MINUTE, "m")) if not of.seconds % s), (1, "s"))
    return command(
        *("check", ("device", device), ("probe", of.probe), ("case", of.case), ("seed", str(of.seed))),
        *(("level", of.level), ("instruction_set", of.instruction_set), ("intensity", of.intensity)),
        ("for", f"{of.seconds / size:.0f}{unit}" if of.seconds else ""),
    )


def reason_of(run: Run) -> str:
    """Return the reason in a run's `detail`: the last line of a traceback, or the first line of any other text."""
    lines = [line.strip() for line in run.detail.splitlines() if line.strip()] or [s.reason for s in run.skipped[:1]]
    line = lines[-1 if lines[0].startswith("Traceback") else 0] if lines else ""
    return line if len(line) <= DETAIL else f"{line[:DETAIL].rstrip(' ;,:')}…"


def count(number: int, thing: str) -> str:
    """Return a number with its noun: "1 run", "4 runs", "1,200 results"."""
    return f"{number:,} {thing}{'s' * (number != 1)}"


def listed(names: Sequence[str], word: str = "and") -> str:
    """Return names as a list in a sentence: "a", "a and b", "a, b and c"; with another `word`, "a, b or c"."""
    return f" {word} ".join([*filter(None, [", ".join(names[:-1])]), *names[-1:]])


def first_of(names: Sequence[str], most: int) -> str:
    """Return the first `most` names and the number of others: "a, b and 3 more"."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def and_more(number: int) -> str:
    """Return " and 3 more" if `number` is 4, because one of the things was already named; "" if it is 1."""
    return f" and {number - 1} more" if number > 1 else ""
