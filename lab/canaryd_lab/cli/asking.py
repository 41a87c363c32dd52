"""Functions that the lab's commands share: they ask a module of the worker and return the answer."""

from __future__ import annotations

from typing import Any

from canaryd.cli.common import ProgressPrinter, complain
from canaryd.engine.engine import Engine
from canaryd.judge.coverage import OUTCOMES
from canaryd.model import Device, Outcome
from canaryd.store.locks import Busy

PATIENCE = 3600.0
"""Maximum seconds of a capture or a comparison, which may read a large model from a disk."""


def ask(engine: Engine, device: Device, module: str, arguments: dict[str, Any], wait: float) -> dict[str, Any] | None:
    """Let `module` in a worker answer a request; return its answer, or None after printing why there is none."""
    printer = ProgressPrinter()
    try:
        outcome, answer, detail = engine.answer(
            device,
            module,
            arguments,
            timeout=PATIENCE,
            wait=wait,
            on_wait=printer.waiting,
            on_progress=lambda fraction, text: printer.moving(fraction, f"{module} {text}"),
        )
    except Busy as busy:
        outcome, answer, detail = Outcome.ERRORED, {}, str(busy)
    printer.clear()
    if outcome is Outcome.COMPLETED:
        return answer
    complain(f"{module} {OUTCOMES[outcome][1]}: {detail or 'no reason given'}")
    return None


def ask_processor(
    command: str, engine: Engine, what_for: str, module: str, arguments: dict[str, Any], wait: float
) -> dict[str, Any] | None:
    """Return `ask`'s answer from a worker on this host's CPU; None, after printing the reason, if none can start."""
    cpu = next((d for d in engine.devices.values() if d.backend == "cpu"), None)
    if cpu is None:
        complain(f"{command}: cannot start worker.python, which {what_for}", *engine.problems)
        return None
    return ask(engine, cpu, module, arguments, wait)
