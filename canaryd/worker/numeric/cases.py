"""The test cases of probes with exactly known results: definition, selection, and reasons for skipping one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from canaryd.facts import GRAPH, beginning
from canaryd.model import Device
from canaryd.probe import Context, NoCase, Skip
from canaryd.worker.numeric.characterised import is_characterised, room_of
from canaryd.worker.numeric.errors import is_refusal
from canaryd.worker.numeric.operands import POOLS, Problem, Product, build
from canaryd.worker.numeric.products import computing, label_of
from canaryd.worker.numeric.sizes import stem
from canaryd.worker.numeric.tensors import FORMATS
from canaryd.worker.runtime import interface
from canaryd.worker.runtime.interface import Elsewhere, Unsupported

QUOTED = 90
"""Largest number of characters of a backend's error message that the reason of a skipped case quotes."""


@dataclass(frozen=True)
class Case:
    """One test case: a function that builds operands and golden (the right result), and a function for the device."""

    name: str
    """Name "dtype/content/shape-kind/layout@sizes"; the part before "@" is stable, the sizes depend on the time."""
    build: Callable[..., Problem]
    """Function that takes a seed and returns the problem: operands and golden."""
    compute: Callable[[tuple[Any, ...], Any], Any]
    """Function that takes (operands on the device, a result to overwrite or None) and returns a contiguous result."""
    characterised: bool = True
    """Whether canaryd knows that healthy devices of this kind give the right result (`is_characterised`)."""
    struck: int = 0
    """Index of the operand that an injected fault changes. Every bit of this operand affects the result."""
    fixed: bool = False
    """True if the case is built from `FIXED_SEED`, computed once, and part of the fingerprint of the device."""
    product: Product | None = None
    """The product, if the device can gather new operands for it; `build` then also takes the draw's number `turn`."""
    stem: str = ""
    """Text from which the seed is derived, if cases of other sizes draw operands from the same pools. If it is "", the
    seed is derived from the name before "@"."""
    measure: Callable[..., Any] | None = None
    """Function that computes and compares the case in its own way, with the arguments and the result of
    `measure.measure_whole`; None for the usual way."""
    seconds: float = 0.0
    """Seconds of the run that are kept free for the case; 0 for a share of those that are left."""
    repeats: bool = False
    """Whether a device that makes graphs computes the one upload of the case in a graph, again and again."""

    @property
    def base(self) -> str:
        """The name without the number of a turn. Faults name cases so."""
        return self.name.partition("#")[0]

    def at(self, turn: int, *, graph: bool = False) -> Case:
        """Return this case as "name#turn" ("name" for turn 0), with operands that the host draws in draw `turn`.

        With `graph` the name says that the device computes it in a graph.
        """
        name = f"{self.name}#{turn}{GRAPH if graph else ''}" if turn else self.name
        build = self.build if self.product is None else partial(self.build, turn=turn)
        return replace(self, name=name, build=build, product=None)


def chosen(ctx: Context, name: str) -> bool:
    """Return whether `ctx.cases` selects a case; an empty `ctx.cases` selects all."""
    return not ctx.cases or any(selects(want, name) for want in ctx.cases)


def selects(want: str, name: str) -> bool:
    """Return whether `want` selects the case `name`: if it is "*", the name, or the part of it before a "/" or "@".

    With "*" a run tries every variant of every case until its time is spent, at any level of thoroughness.
    """
    return want in ("*", name) or (name.startswith(want) and name[len(want)] in "/@")


def refusal(device: Device, problem: Problem, compute: Callable[[tuple[Any, ...], Any], Any]) -> str:
    """Return the reason why the device does not support this problem, or "" if it computed the problem.

    The device computes with torch's strict switches on. Any other error is raised: a failing device must not look like
    a missing kernel.
    """
    runtime = interface.of(device)
    try:
        with runtime.strict(device):
            first_result(device, compute, runtime.upload(problem.operands, device))
    except Refused as refused:
        return str(refused)
    except Unsupported as error:  # the device does not even hold such operands
        return why_refused(device, error)
    return ""


class Refused(Exception):
    """A kernel does not support a problem; the text gives the reason."""


def first_result(device: Device, compute: Callable[[tuple[Any, ...], Any], Any], operands: tuple[Any, ...]) -> Any:
    """Return the result of the first computation on new operands; raise `Refused` if no kernel supports them."""
    try:
        return compute(operands, None)
    except Exception as error:
        if not is_refusal(error):
            raise
        raise Refused(why_refused(device, error)) from error


def why_refused(device: Device, error: Exception) -> str:
    """Return the reason to report for a case that was skipped because of `error`."""
    if isinstance(error, Elsewhere):
        return str(error)  # whole: it names the nodes
    text = (str(error).splitlines() or ["no reason given"])[0]
    text = beginning(text, QUOTED)
    return f"this {device.runtime} on {device.unit} does not support it: {text}"


def restrict(ctx: Context, cases: Sequence[Case], refused: Sequence[str] = ()) -> list[Case]:
    """Return the cases that `ctx.cases` selects.

    If there is none, raise `Skip` with the first of `refused`, the reasons why the device lacks cases that `ctx.cases`
    selects; without reasons, raise `NoCase`, or `Skip` if there are no cases at all.
    """
    kept = [case for case in cases if chosen(ctx, case.name)]
    for case, (name, _, turn) in itertools.product(cases, (want.partition("#") for want in ctx.cases)):
        number = turn.removesuffix(GRAPH)
        if name == case.name and number.isdigit():
            if case.product is not None:
                kept.append(case.at(int(number)))
            if turn != number and case not in kept:
                kept.append(case)  # what failed in a graph is repeated in one too, if it gathers: on other operands
    if not kept and refused:
        raise Skip(none_supported(ctx.device, ", ".join(ctx.cases) or "case of this probe", *refused))
    if not cases:
        raise Skip(none_supported(ctx.device, "case of this probe"))
    if not kept:
        raise NoCase(ctx.cases, (case.name for case in cases))
    return kept


def none_supported(device: Device, what: str, *reasons: str) -> str:
    """Return a sentence that says that the device supports no `what`, with the first of the `reasons`."""
    return f"this {device.runtime} on {device.unit} supports no {what}" + "".join(f": {why}" for why in reasons[:1])


def product_case(
    device: Device, source: str, target: str, content: str, kind: str, layout: str, sizes: tuple[int, int, int, int]
) -> Case:
    """Return one float product as a case. `sizes`: M, N, K, batch (0: no batch). The kind "fixed" has a fixed seed."""
    M, N, K, batch = sizes
    room = room_of(device, source, target, batched=batch > 0)
    fresh = kind != "fixed"
    sides = (FORMATS[source], FORMATS[target], room, M, N, K, batch)
    product = Product(content, *sides, layout, POOLS.get(kind, 0))
    where = kind if fresh else f"fixed{room}"
    name = f"{label_of(source, target)}/{content}/{where}/{layout}@{f'{batch}x' if batch else ''}{M}x{N}x{K}"
    known = is_characterised(device, source, rounds_nothing=content == "permute")
    return Case(
        name,
        partial(build, product),
        computing(device, source, target),
        known,
        fixed=not fresh,
        product=product if fresh else None,
        stem=stem(name) if fresh else "",
    )
