"""Prompts to a serving endpoint; its greedy answers, with log probabilities, must have the same bits as before.

Stresses: the whole service: the engine's own kernels at prefill and decode, its cache cold and warm, every device of
its parallel group, template and tokenizer.

Cannot see: faults that do not change the answers (which may be text without log probabilities); faults that only other
prompts, lengths or batches trigger; which of several devices is at fault. See docs/canaries.md.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path

from canaryd.probe import Context, Fact, NoCase, ProbeSpec, Skip, Skipped
from canaryd.worker.endpoint.canary import Endpoint, wanted
from canaryd.worker.endpoint.prompts import Prompt, load
from canaryd.worker.endpoint.recorder import Item, Progress, Recorder, names
from canaryd.worker.endpoint.settings import Settings

SPEC = ProbeSpec(
    name="endpoint_canary",
    summary="prompts that a serving endpoint must answer as it did before",
    backends=("endpoint",),
    numeric=False,
    period=300.0,
    budget={"quick": 30.0, "standard": 60.0, "deep": 300.0},
    timeout=120.0,
    order=30,
)
FILE = Path(__file__).parent / "endpoint" / "prompts.json"
ALONE = 16
"""Number of requests per case that are sent one at a time while a baseline is learnt. The judge calls a case bit-stable
after 12 known answers in a row under one condition, so a server may show four other answers first."""
LOADS = (2, 4, 8)
"""Numbers of equal requests sent together: 14 per case. With 2 that are sent beside another case, 16 requests of each
case are under load."""
DEEP_ROUNDS = 5


def run(ctx: Context) -> Iterator[Fact]:
    """Record every case once, or often enough for a baseline; then yield readings of the server and of its speed."""
    settings = Settings.read(ctx.settings)
    prompts = load(settings.prompts or FILE)
    ctx.progress(0.0, "asking which server it is")
    # Different bits may come from a decaying disk: with cases to confirm, the weights are read again.
    endpoint = Endpoint(settings, memory=ctx.memory, thorough=bool(ctx.cases))
    recorder = Recorder(ctx, endpoint)
    items = [item for item in every_item(ctx, endpoint, prompts) if any(wanted(ctx, name) for name in names(item))]
    if not items:
        raise NoCase(ctx.cases, (name for item in every_item(ctx, endpoint, prompts) for name in names(item)))
    yield from _baseline(ctx, recorder, items) if ctx.baselining else _record(ctx, recorder, items)
    if not recorder.recorded:
        raise Skip("; ".join(dict.fromkeys(recorder.refused.values())))
    yield from recorder.readings()
    if not ctx.cases:
        for api in dict.fromkeys(api for api, _ in recorder.answers):
            yield from recorder.latencies(api)


def every_item(ctx: Context, endpoint: Endpoint, prompts: tuple[Prompt, ...]) -> list[Item]:
    """Return the items to ask, beginning with the prompt that the seed chooses; at quick only this prompt."""
    turn = ctx.seed % len(prompts)
    rotated = prompts[turn:] + prompts[:turn]
    if ctx.level == "quick" and not (ctx.baselining or ctx.cases):
        rotated = rotated[:1]
    return [(api, prompt) for prompt in rotated for api in endpoint.settings.apis]


def _record(ctx: Context, recorder: Recorder, items: list[Item]) -> Iterator[Fact]:
    planned = items * (DEEP_ROUNDS if ctx.level == "deep" and not ctx.cases else 1)
    for number, item in enumerate(planned):
        ctx.progress(number / len(planned), names(item)[0])
        if number == 0 or not recorder.spent or ctx.cases:
            yield from recorder.alone(item)
        elif item not in recorder.answers and item not in recorder.refused:
            yield from map(ctx.late, names(item))


def _baseline(ctx: Context, recorder: Recorder, items: list[Item]) -> Iterator[Fact]:
    """Ask every item about 32 times to learn a baseline: alone, then beside another item, then with equal items."""
    progress = Progress("" if ctx.drill else ctx.memory, recorder.endpoint)
    before = progress.rounds()
    alone = [item for _ in range(before, ALONE) for item in items]
    if before >= ALONE:  # find out alone what is refused and how prompts are rendered
        alone = items
    for number, item in enumerate(alone):
        if number and recorder.spent:
            progress.keep(before + number // len(items))
            reason = f"{number} of {len(alone)} requests alone and none under load in this run; more to come"
            yield Skipped(case="baseline", reason=reason)
            return
        ctx.progress(number / len(alone) / 2, f"learning {names(item)[0]}, alone")
        try:
            yield from recorder.alone(item)
        except Skip as error:
            if item not in recorder.answers:  # what never answers ends the run as skipped, one bad answer does not
                yield from recorder.alone(item)
                continue
            recorder.strained = str(error)
            progress.keep(before + number // len(items))
            yield Skipped(case="baseline", reason=f"{number} of {len(alone)} requests alone: {error}")
            return
    progress.keep(ALONE)
    reasons = yield from _loaded(ctx, recorder, [item for item in items if item not in recorder.refused])
    if reasons:
        yield Skipped(case="baseline", reason="; ".join(reasons))
    if not recorder.spent or recorder.strained:
        progress.keep(0)


def _loaded(ctx: Context, recorder: Recorder, items: list[Item]) -> Generator[Fact, None, list[str]]:
    """Ask every item together with one other item and with equal items; return the reasons for loads left out.

    If the server cannot take so many requests at once, continue with half of them.
    """
    groups = [[item, items[(index + 1) % len(items)]] for index, item in enumerate(items)]
    groups += [[item] * many for many in LOADS for item in items]
    most = max(LOADS)
    reasons: list[str] = []
    for number, group in enumerate(groups):
        ctx.progress((1 + number / len(groups)) / 2, f"learning {names(group[0])[0]}, {len(group)} at once")
        rest = group
        while len(rest) > 1:  # a single request is not load
            if recorder.spent:
                return [*reasons, f"{number} of {len(groups)} loads in this run; more to come"]
            now, rest = rest[:most], rest[most:]
            failed = yield from recorder.together(now)
            rest = [*failed, *rest]
            if failed:
                most = (len(now) + 1) // 2
                reasons.append(recorder.strained)
            if most < 2:
                return reasons
    return reasons
