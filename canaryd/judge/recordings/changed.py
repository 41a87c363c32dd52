"""Changes of the chain, and what is not compared yet: neither accuses a device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from canaryd.facts import LINKS
from canaryd.judge.findings import RENEWED, TEXT_ONLY, finding
from canaryd.judge.phrases import and_more, count, listed
from canaryd.judge.recordings.baseline import IDLE, LAUNCH, LEARN, Baseline, key_of, known_digests
from canaryd.judge.recordings.launches import UNTOLD
from canaryd.judge.recordings.record import Newest, Record
from canaryd.model import Cause, Finding, Outcome, Run, State

MODEL_LINKS = LINKS[: LINKS.index("prompt") + 1]
"""Links that make it another model: an operator should confirm that the change was intended. A prompt that the server
renders in another way shows another tokenizer or chat template."""
ON_LAUNCHES = (
    "Servers that tune kernels at start answer otherwise after every start, in the last bits.",
    "Off in vLLM: --no-enable-flashinfer-autotune, VLLM_BATCH_INVARIANT=1.",
    "Off in SGLang: --disable-flashinfer-autotune, --enable-deterministic-inference.",
    "A fault that begins with a restart looks the same: exact tests of the devices and an exact canary show it.",
)


class LinkChange(NamedTuple):
    """One link of the chain or stack that differs; "" for a value that is not known."""

    link: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.link} ({self.before or 'unknown'} → {self.after or 'unknown'})"


def changed_links(before: Mapping[str, str], after: Mapping[str, str]) -> tuple[LinkChange, ...]:
    """Return the links that differ, in the order from weights to answer, the stack's last."""
    order = [*LINKS, *sorted((before.keys() | after.keys()) - {*LINKS})]
    changes = (LinkChange(link, before.get(link, ""), after.get(link, "")) for link in order)
    return tuple(change for change in changes if change.before != change.after)


def changed(record: Record) -> Iterator[Finding]:
    """Results changed with the chain or with a launch of the server: name what changed, and accuse no device."""
    for probe, run in {run.probe: run for run in record.launches}.items():
        given = {(r.case, r.digest, r.chain_id) for r in run.recordings}
        newest = [n.recording for n in record.newest if n.run.probe == probe and n.recording.case in run.unknown]
        if given.issuperset((r.case, r.digest, r.chain_id) for r in newest):
            yield finding(
                *(RENEWED, State.UNKNOWN, Cause.UNDETERMINED),
                f"{probe} gives other answers in all {count(len(run.unknown), 'case')} at once, and repeats them.",
                "Wait until the new answers are learnt.",
                *ON_LAUNCHES,
                probe=probe,
                runs=(run.id,),
            )
    groups: dict[tuple[str, tuple[LinkChange, ...], bool], list[Newest]] = defaultdict(list)
    for new in record.newest:
        before, own = _compared_with(record, new), new.complete
        if before is None or new.recording.digest in known_digests(record.baselines, before.key):
            continue
        if own is not None and (not record.is_fresh(own) or own.first <= before.first):
            continue  # nothing new any more, or back on a chain that was known before
        links = changed_links({**before.stack, **before.chain}, {**new.run.stack, **new.recording.chain})
        groups[new.run.probe, links, own is not None].append(new)
    for (_, links, _), cases in groups.items():
        yield _change(record, links, cases[0], more=len(cases))


def _compared_with(record: Record, new: Newest) -> Baseline | None:
    """Return the baseline before the change; of an endpoint the one before another model too, while it is unconfirmed.

    A change of the model that nobody has confirmed yet is not confirmed by the next change, of the server say.
    """
    if new.before is None or record.device.has_witnesses:
        return new.before
    stands = record.before(new.run, new.recording, intended=True) or new.before
    other_model = any(change.link in MODEL_LINKS for change in changed_links(stands.chain, new.before.chain))
    return stands if other_model else new.before


def _change(record: Record, changes: Sequence[LinkChange], new: Newest, *, more: int) -> Finding:
    """Return the finding on a change of these links: what it means depends on which they are."""
    device, probe, links = record.device.name, new.run.probe, {change.link for change in changes}
    where = f"(case {new.recording.case}{and_more(more)})"
    # Another chain is always in another launch.
    names = listed([c.link for c in changes if c.link != LAUNCH or links == {LAUNCH}]) or "the probe"
    # Where no link differs, the probe has another version: its older results cannot be compared either.
    what = ", ".join(map(str, changes)) or "the version of the probe"
    rule, message = "chain-changed", f"{probe} results changed after a change of {names} {where}."
    evidence = [f"Changed: {what}.", "The device itself is not suspected."]
    action = f"If the change was intended: {record.acceptance}"
    state, cause = State.UNKNOWN if new.complete is None else State.HEALTHY, Cause.SOFTWARE
    if links == {LAUNCH} and (at := new.recording.chain.get(LAUNCH, "")):
        evidence, action = [*ON_LAUNCHES], ""
        message = f"{device} was restarted at {at}, and answers otherwise since {where}."
        if at.startswith(UNTOLD):
            rule, action = RENEWED, record.deep_test
            message = f"{device} changed all answers at once {at} {where}: a restart, or a fault of everything."
    if new.complete is None:
        action = f"Wait until the new baseline is ready ({new.samples} of {LEARN} samples)."
        evidence.append("The new results cannot be compared with the old ones.")
    else:
        evidence.append("The new results have their own baseline, which nothing has confirmed; the old one is kept.")
    if not record.device.has_witnesses:
        state = State.HEALTHY if links.isdisjoint(MODEL_LINKS) and new.complete is not None else State.UNKNOWN
    elif links == {"prompt"}:
        state, cause = State.UNKNOWN, Cause.HARDWARE
        evidence.append(action)
        action = "Check this host's CPU and memory: they made other inputs from the same seed."
    elif not any(c.before and c.after for c in changes):
        state, cause = State.UNKNOWN, Cause.HARNESS
        evidence.append("The rest was not recorded and may have changed too.")
    else:
        state = State.HEALTHY
    return finding(rule, state, cause, message, action, *evidence, probe=probe, runs=(new.run.id,))


def learning(record: Record) -> Iterator[Finding]:
    """What of a probe is not compared, or with what is not confirmed: a first answer cannot be called wrong."""
    of_probe: dict[str, list[Newest]] = defaultdict(list)
    for new in record.newest:
        of_probe[new.run.probe].append(new)
    nothing = _nothing_compared(record)
    for probe, cases in of_probe.items():
        complete, blind = [n.complete for n in cases if n.complete], [n.own.is_text_only for n in cases if n.own]
        of = nothing if nothing is not None and nothing.probe == probe else None
        said = ["No result was compared yet: no baseline was ready for the newest run."] if of else []
        if counts := [n.samples for n in cases if not (n.complete or n.before)]:
            least = f"at least {min(counts)}" if len({*counts}) > 1 else f"{counts[0]}"
            have = f"{count(len(counts), 'case')} {'has' if len(counts) == 1 else 'have'}"
            said.append(f"Baseline not ready: {have} {least} of {LEARN} samples; not checked yet.")
        fresh = [] if record.device.has_witnesses else [b for b in complete if record.is_fresh(b)]
        alone = [b for b in complete if record.device.has_witnesses and not witnesses(b, record.voters(b))]
        if fresh:
            learnt = (
                f"{count(len(fresh), 'case')} learnt in the last week, {sum(b.stable(IDLE) for b in fresh)} to the bit"
            )
            said.append(f"New baseline: {learnt}; not confirmed.")
        if alone:
            said.append(f"Baselines of {count(len(alone), 'case')} are not confirmed by another device or a reference.")
        if said:
            state, cause = (State.UNKNOWN, Cause.UNDETERMINED) if of else (State.HEALTHY, Cause.NONE)
            yield finding(
                *("baseline-learning", state, cause, said[0]),
                f"Wait for the next run, or run it now: canaryd check --device {record.device.name}" if of else "",
                *said[1:],
                "What was wrong from the start counts as right." if fresh or alone else "",
                probe=probe,
                runs=(of.id,) if of else (),
            )
        if any(blind):
            text = f"Judged by text alone: no log probabilities in {sum(blind)} of {count(len(blind), 'case')}."
            unseen = "A fault that changes no word is not seen."
            yield finding(TEXT_ONLY, State.HEALTHY, Cause.NONE, text, "", unseen, probe=probe)


def _nothing_compared(record: Record) -> Run | None:
    """Return the newest run where recordings are the only evidence, and none had a known one beside it."""
    of = (r for r in record.runs if r.outcome is Outcome.COMPLETED and not r.confirms and (r.recordings or r.trials))
    runs = {run.id: run for run in {(r.probe, r.instruction_set): r for r in of}.values()}
    recorded = [(run, recording) for run in runs.values() for recording in run.recordings]
    if not recorded or any(run.trials for run in runs.values()):
        return None
    seen = (o for each in record.observations.values() for o in each if o.run.id in runs)
    if any(o.is_judged and (not o.is_outlier or o.is_comparable) for o in seen):
        return None
    for run, recording in recorded:  # what a case gave on an earlier chain may say something of it
        before, own = record.before(run, recording), record.baselines.get(key_of(run, recording))
        told = not record.device.has_witnesses and (own is None or not own.complete)  # by `changed`
        if before is not None and (told or recording.digest in known_digests(record.baselines, before.key)):
            return None
    return recorded[-1][0]


def witnesses(own: Baseline, voters: Iterable[tuple[str, Baseline]]) -> str:
    """Return who has confirmed a baseline (siblings with all its vectors, a reference); "" for none."""
    names = sorted(name for name, b in voters if own.digests <= b.digests)
    return " and ".join([", ".join(names)] * bool(names) + ["reference"] * own.referenced)
