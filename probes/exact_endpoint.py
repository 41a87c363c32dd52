"""The exact canary through a serving engine: every question has one right answer, known before the first request.

Stresses: the whole service: the engine's own kernels at prefill and decode, batching, its cache cold and warm,
tokenizer, template and sampler, every device of its parallel group.

Cannot see: faults that need large matrices or full load, which the exact canary does not have; errors of rounding;
which of several devices is at fault. See docs/exact-canary.md.
"""

from __future__ import annotations

from collections.abc import Iterator

from canaryd.probe import Context, Fact, NoCase, ProbeSpec, Skip
from canaryd.worker.endpoint.canary import Endpoint, wanted
from canaryd.worker.endpoint.examiner import Examiner
from canaryd.worker.endpoint.settings import Settings
from canaryd.worker.exact_canary.expected import Question, load

SPEC = ProbeSpec(
    name="exact_endpoint",
    summary="a served model with one right answer: words and log probabilities",
    backends=("exact_endpoint",),
    numeric=False,
    period=300.0,
    budget={"quick": 30.0, "standard": 60.0, "deep": 300.0},
    timeout=120.0,
    order=30,
)
LOADS = (2, 4, 8)
"""Numbers of different questions that are sent at the same time."""
QUICK = 2
"""Number of questions that a quick run asks alone: a wrong and a right answer suffice to exclude a rounding format."""


def run(ctx: Context) -> Iterator[Fact]:
    """Ask questions alone, then again, then several at once; compare each answer with its one right answer."""
    settings = Settings.read(ctx.settings)
    if settings.exact is None:
        raise Skip("exact: not set: this endpoint serves no exact canary")
    expected = load(settings.exact)
    ctx.progress(0.0, "asking which server it is")
    endpoint = Endpoint(settings, memory=ctx.memory)
    examiner = Examiner(ctx, endpoint, expected)
    if not any(wanted(ctx, case) for case in every_case(settings)):
        raise NoCase(ctx.cases, every_case(settings))
    stopped = None
    try:
        yield from _ask(ctx, examiner, expected.questions)
    except Skip as error:  # what was answered before counts
        stopped = error
    try:
        yield from examiner.concluded()
    except Skip as error:
        stopped = stopped or error
    if stopped is not None:
        raise stopped


def every_case(settings: Settings) -> list[str]:
    """Return the names of all cases of an endpoint with these settings."""
    kinds = ("alone", "again", *(f"{count}-at-once" for count in LOADS))
    return [f"{api}/{kind}" for api in settings.apis for kind in kinds]


def _ask(ctx: Context, examiner: Examiner, questions: tuple[Question, ...]) -> Iterator[Fact]:
    """Ask the level's questions, rotated by the seed, at deep until time is spent; yield wrong answers as they come."""
    turn = ctx.seed % len(questions)
    rotated = questions[turn:] + questions[:turn]
    quick = ctx.level == "quick"
    first = True
    while first or (ctx.level == "deep" and not ctx.cases and ctx.left > 0):
        for api in examiner.endpoint.settings.apis:
            yield from _round(ctx, examiner, api, rotated, quick=quick)
        first = False


def _round(ctx: Context, examiner: Examiner, api: str, rotated: tuple[Question, ...], *, quick: bool) -> Iterator[Fact]:
    asked = rotated[:QUICK] if quick else rotated
    if any(wanted(ctx, f"{api}/{kind}") for kind in ("alone", "again")):
        for number, question in enumerate(asked):
            ctx.progress(number / len(asked) / 2, f"{api}, prompt {question.number}, alone")
            examiner.alone(api, question)
            yield from examiner.accused(api)
    loads = (LOADS[ctx.seed % len(LOADS)],) if quick and not ctx.cases else LOADS
    for load_ in loads:
        if wanted(ctx, f"{api}/{load_}-at-once"):
            ctx.progress(0.75, f"{api}, {load_} at once")
            examiner.together(api, rotated[:load_])
            yield from examiner.accused(api)
