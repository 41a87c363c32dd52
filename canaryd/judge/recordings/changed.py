"""Changes of the chain, and what is not compared yet: neither accuses a device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from canaryd.facts import LINKS, Recording
from canaryd.judge.findings import RENEWED, TEXT_ONLY, finding
from canaryd.judge.phrases import and_more, count, listed
from canaryd.judge.recordings.baseline import (
    EVERY,
    IDLE,
    LAUNCH,
    LEARN,
    Baseline,
    LinkChange,
    changed_links,
    key_of,
    known_digests,
)
from canaryd.judge.recordings.launches import UNTOLD
from canaryd.judge.recordings.record import Record
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


def changed(record: Record) -> Iterator[Finding]:
    """Results changed with the chain or with a launch of the server: name what changed, and accuse no device."""
    for probe, run in {run.probe: run for run in record.launches}.items():
        given = {(r.case, r.digest, r.chain_id) for r in run.recordings}
        newest = [r for v, (_, r) in record.newest.items() if v.probe == probe and v.case in run.unknown]
        if given.issuperset((r.case, r.digest, r.chain_id) for r in newest):
            yield finding(
                *(RENEWED, State.UNKNOWN, Cause.UNDETERMINED),
                f"{probe} gives other answers in all {count(len(run.unknown), 'case')} at once, and repeats them.",
                "Wait until the new answers are learnt.",
                *ON_LAUNCHES,
                probe=probe,
                runs=(run.id,),
            )
    groups: dict[tuple[str, tuple[LinkChange, ...], bool], list[tuple[Run, Recording, Baseline | None]]]
    groups = defaultdict(list)
    for (probe, _, _), (run, recording) in sorted(record.newest.items()):
        before = _compared_with(record, run, recording)
        own = record.baselines.get(key_of(run, recording))
        if before is None or recording.digest in known_digests(record.baselines, before.key):
            continue
        complete = own is not None and own.complete
        if own is not None and complete and (own.accepted or record.now - own.first > record.policy.week):
            continue
        if own is not None and complete and own.first <= before.first:
            continue  # back on a chain that was known before
        links = changed_links({**before.stack, **before.chain}, {**run.stack, **recording.chain})
        groups[probe, links, complete].append((run, recording, own))
    for (_, links, _), cases in groups.items():
        yield _change(record, links, *cases[0], more=len(cases))


def _compared_with(record: Record, run: Run, recording: Recording) -> Baseline | None:
    """Return the baseline before the change; of an endpoint the one before another model too, while it is unconfirmed.

    A change of the model that nobody has confirmed yet is not confirmed by the next change, of the server say.
    """
    before = record.before(run, recording)
    if before is None or not record.is_endpoint:
        return before
    stands = record.before(run, recording, intended=True) or before
    other_model = any(change.link in MODEL_LINKS for change in changed_links(stands.chain, before.chain))
    return stands if other_model else before


def _change(
    record: Record, changes: Sequence[LinkChange], run: Run, recording: Recording, own: Baseline | None, *, more: int
) -> Finding:
    complete, links = own is not None and own.complete, {change.link for change in changes}
    is_model = record.is_endpoint and not links.isdisjoint(MODEL_LINKS)
    other_operands = not record.is_endpoint and links == {"prompt"}
    unrecorded = not (record.is_endpoint or other_operands) and not any(c.before and c.after for c in changes)
    # Where no link differs, the probe has another version: its older results cannot be compared either.
    what = ", ".join(map(str, changes)) or "the version of the probe"
    where, names = f"(case {recording.case}{and_more(more)})", listed([c.link for c in changes]) or "the probe"
    rule, message = "chain-changed", f"{run.probe} results changed after a change of {names} {where}."
    evidence = [f"Changed: {what}.", "The device itself is not suspected."]
    at = recording.chain.get(LAUNCH, "") if links == {LAUNCH} else ""
    if at.startswith(UNTOLD):
        rule, evidence = RENEWED, [*ON_LAUNCHES]
        message = f"{record.device.name} changed all answers at once {at} {where}: a restart, or a fault of everything."
    elif at:
        message = f"{record.device.name} was restarted at {at}, and answers otherwise since {where}."
        evidence = [*ON_LAUNCHES]
    action = f'If the change was intended: canaryd baseline accept {record.device.name} --reason "…"'
    if at:
        action = record.deep_test if at.startswith(UNTOLD) else ""
    if not complete:
        samples = own.learnt.get(EVERY, 0) if own is not None else 0
        action = f"Wait until the new baseline is ready ({samples} of {LEARN} samples)."
    evidence.append(
        "The new results have their own baseline, which nothing has confirmed; the old one is kept."
        if complete
        else "The new results cannot be compared with the old ones."
    )
    unknown = is_model or other_operands or unrecorded or (record.is_endpoint and not complete)
    cause = Cause.HARNESS if unrecorded else Cause.HARDWARE if other_operands else Cause.SOFTWARE
    if other_operands:
        evidence, action = (
            [*evidence, action],
            "Check this host's CPU and memory: they made other inputs from the same seed.",
        )
    elif unrecorded:
        evidence.append("The rest was not recorded and may have changed too.")
    state = State.UNKNOWN if unknown else State.HEALTHY
    return finding(rule, state, cause, message, action, *evidence, probe=run.probe, runs=(run.id,))


def learning(record: Record) -> Iterator[Finding]:
    """What of a probe is not compared, or with what is not confirmed: a first answer cannot be called wrong."""
    facts: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for (probe, _, _), (run, recording) in sorted(record.newest.items()):
        own = record.baselines.get(key_of(run, recording))
        of = facts[probe]
        if own is not None:
            of["text alone"].append(own.is_text_only)
        if own is None or not own.complete:
            samples = own.learnt.get(EVERY, 0) if own is not None else 0
            of["learning"] += [samples] if record.before(run, recording) is None else []
        elif record.is_endpoint:
            of["new"] += [own.stable(IDLE)] * (not own.accepted and record.now - own.first <= record.policy.week)
        elif not witnesses(own, record.voters(own)):
            of["alone"].append(1)
    nothing = _nothing_compared(record)
    for probe, of in facts.items():
        said = []
        unknown = nothing is not None and nothing.probe == probe
        if unknown:
            said.append("No result was compared yet: no baseline was ready for the newest run.")
        if counts := of["learning"]:
            least = f"at least {min(counts)}" if len({*counts}) > 1 else f"{counts[0]}"
            have = f"{count(len(counts), 'case')} {'has' if len(counts) == 1 else 'have'}"
            said.append(f"Baseline not ready: {have} {least} of {LEARN} samples; not checked yet.")
        if new := of["new"]:
            learnt = f"{count(len(new), 'case')} learnt in the last week, {sum(new)} to the bit"
            said.append(f"New baseline: {learnt}; not confirmed.")
        if alone := of["alone"]:
            said.append(f"Baselines of {count(len(alone), 'case')} are not confirmed by another device or a reference.")
        if said:
            yield finding(
                *(
                    "baseline-learning",
                    *((State.UNKNOWN, Cause.UNDETERMINED) if unknown else (State.HEALTHY, Cause.NONE)),
                ),
                said[0],
                f"Wait for the next run, or run it now: canaryd check --device {record.device.name}" if unknown else "",
                *said[1:],
                "What was wrong from the start counts as right." if new or alone else "",
                probe=probe,
                runs=(nothing.id,) if nothing is not None and unknown else (),
            )
        if blind := sum(of["text alone"]):
            text = f"Judged by text alone: no log probabilities in {blind} of {count(len(of['text alone']), 'case')}."
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
        told = record.is_endpoint and (own is None or not own.complete)  # by `changed`
        if before is not None and (told or recording.digest in known_digests(record.baselines, before.key)):
            return None
    return recorded[-1][0]


def witnesses(own: Baseline, voters: Iterable[tuple[str, Baseline]]) -> str:
    """Return who has confirmed a baseline (siblings with all its vectors, a reference); "" for none."""
    names = sorted(name for name, b in voters if own.digests <= b.digests)
    return " and ".join([", ".join(names)] * bool(names) + ["reference"] * own.referenced)
