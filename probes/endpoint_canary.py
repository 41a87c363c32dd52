"""Prompts to a serving endpoint; its greedy answers, with log probabilities, must have the same bits as before.

Stresses: the whole service: the engine's own kernels at prefill and decode, its cache cold and warm, every device of
its parallel group, template and tokenizer.

Cannot see: faults that do not change the answers (which may be text without log probabilities); faults that only other
prompts, lengths or batches trigger; which of several devices is at fault. See docs/canaries.md.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from functools import partial
from pathlib import Path

from canaryd.probe import Context, Fact, NoCase, ProbeSpec, Skip, Skipped
from canaryd.worker.endpoint.canary import Endpoint, wanted
from canaryd.worker.endpoint.prompts import Prompt, load
from canaryd.worker.endpoint.recorder import Item, Recorder, names
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
Asking = Generator[Fact, None, bool]
MORE = "the time of this run was over before all was asked; more to come"


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
        for api in dict.fromkeys(api for api, _ in recorder.answers if api != "forced"):
            yield from recorder.latencies(api)


def every_item(ctx: Context, endpoint: Endpoint, prompts: tuple[Prompt, ...]) -> list[Item]:
    """Return the items to ask, beginning with the prompt that the seed chooses; at quick only this prompt."""
    turn = ctx.seed % len(prompts)
    rotated = prompts[turn:] + prompts[:turn]
    if ctx.level == "quick" and not (ctx.baselining or ctx.cases):
        rotated = rotated[:1]
    apis = (*endpoint.settings.apis, *(("forced",) if endpoint.scores_prompts else ()))
    return [(api, prompt) for prompt in rotated for api in apis]


def _record(ctx: Context, recorder: Recorder, items: list[Item]) -> Iterator[Fact]:
    planned = items * (DEEP_ROUNDS if ctx.level == "deep" and not ctx.cases else 1)
    for number, item in enumerate(planned):
        ctx.progress(number / len(planned), names(item)[0])
        if number == 0 or not recorder.spent or ctx.cases:
            yield from recorder.alone(item)
        elif item not in recorder.answers and item not in recorder.refused:
            yield from map(ctx.late, names(item))


def _baseline(ctx: Context, recorder: Recorder, items: list[Item]) -> Iterator[Fact]:
    """Ask every item about 32 times to learn a baseline: alone, then beside another item, then with equal items.

    With an odd seed load comes first, so that a server too slow for both in one run is asked in both ways after a few.
    """
    reasons: list[str] = []
    alone, loaded = partial(_alone, ALONE - 1), _loaded
    for way in (partial(_alone, 1), *((loaded, alone) if ctx.seed % 2 else (alone, loaded))):
        if not (yield from way(ctx, recorder, items, reasons)):
            break
    if reasons:
        yield Skipped(case="baseline", reason="; ".join(reasons))


def _alone(rounds: int, ctx: Context, recorder: Recorder, items: list[Item], reasons: list[str]) -> Asking:
    """Ask every item `rounds` times alone; return whether to go on, and add the reason to `reasons` if not."""
    for number, item in enumerate(items * rounds):
        if recorder.recorded and recorder.spent:
            reasons.append(MORE)
            return False
        ctx.progress(number / len(items) / ALONE / 2, f"learning {names(item)[0]}, alone")
        try:
            yield from recorder.alone(item)
        except Skip as error:
            if item in recorder.answers:
                recorder.strained = str(error)
                reasons.append(f"a request alone: {error}")
                return False
            yield from recorder.alone(item)  # what never answers ends the run as skipped, one bad answer does not
    return True


def _loaded(ctx: Context, recorder: Recorder, every: list[Item], reasons: list[str]) -> Asking:
    """Ask every item with one other and with equal ones, half as many if that is too much; add the reasons for it."""
    items = [item for item in every if item not in recorder.refused]
    groups = [[item, items[(index + 1) % len(items)]] for index, item in enumerate(items)]
    groups += [[item] * many for many in LOADS for item in items]
    most = max(LOADS)
    for number, group in enumerate(groups):
        ctx.progress((1 + number / len(groups)) / 2, f"learning {names(group[0])[0]}, {len(group)} at once")
        rest = group
        while len(rest) > 1 and most > 1:  # a single request is not load
            if recorder.spent:
                reasons.append(MORE)
                return False
            now, rest = rest[:most], rest[most:]
            failed = yield from recorder.together(now)
            rest = [*failed, *rest]
            if failed:
                most = (len(now) + 1) // 2
                reasons.append(recorder.strained)
    return True
