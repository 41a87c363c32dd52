"""Run a characterisation: one part after the other until the given minutes are spent; each result is stored at once."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from pathlib import Path

from canaryd.facts import stack_id
from canaryd.formatting import did_you_mean
from canaryd.model import Outcome
from canaryd_lab.characterise import document, host_parts, outside
from canaryd_lab.characterise.conversation import Conversation
from canaryd_lab.characterise.page import page
from canaryd_lab.characterise.results import Directory, Part, Result, file_name, sliced, write

RESERVE = 4.0
"""Seconds reserved for the document, the page and the end of the workers (ours)."""
FIRST = 60.0
"""Seconds for reading the device and its stack, even if the given minutes are fewer (ours)."""


class NoSuchPart(ValueError):
    """The device has no part of the given name."""


def _is_named(part: str, name: str) -> bool:
    """Return whether `part` is called `name`, or has a name that begins with `name` and a "/"."""
    return part == name or part.startswith(f"{name}/")


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a characterisation."""

    minutes: float = 10.0
    slice: tuple[int, int] = (1, 1)
    """(slice number, number of slices): (2, 4) takes every fourth part, beginning with the second."""
    directory: Path | None = None
    """Directory of the results, new or with earlier results; None for a new directory in the working directory."""
    only: tuple[str, ...] = ()
    """Names of the parts (groups of tests) to run, or beginnings of names that end before a "/"; empty for all."""


@dataclass
class Characterisation:
    """The characterisation of one device, run under the device's lock."""

    conversation: Conversation
    options: Options
    on_part: Callable[[Part, int, int], None] = lambda _part, _number, _of: None
    """Function that is called before each part with the part, its number, and the number of parts."""
    on_result: Callable[[Result], None] = lambda _result: None
    directory: Directory = field(init=False)
    base: Path = field(init=False)
    """Path of the document (the characterisation as JSON) without its suffix."""
    planned: list[Part] = field(init=False, default_factory=list)
    left: list[Part] = field(init=False, default_factory=list)
    """Parts of this slice that have no result yet."""

    def run(self) -> document.Document:
        """Carry out the parts that have no result yet, and return the document.

        Raises `NoSuchPart` or `NotOurs`; `FileExistsError` if the default directory exists; `OSError` if the directory
        cannot be written; `RuntimeError` if no worker answers.
        """
        begun = time.monotonic()
        deadline = begun + 60.0 * self.options.minutes - RESERVE
        try:
            self.conversation.deadline = max(deadline, begun + FIRST)
            parts = {p.name: p for p in [*self.conversation.listed(), *(part for part, _ in self._ours.values())]}
            self._refuse_unknown(parts)
            first = self._environment(parts)
            self.conversation.deadline = deadline
            self.planned = [p for p in sliced(parts.values(), *self.options.slice) if self._wanted(p)]
            done = {r.name for r in self.directory.results()}
            if first.name not in done:
                self.directory.add(first)
                self.on_result(first)
                done.add(first.name)
            self._write()
            todo = [p for p in self.planned if p.name not in done]
            for number, part in enumerate(todo):
                if self.conversation.engine.stopping:
                    break
                if time.monotonic() + self.conversation.needed(part) > deadline:
                    continue  # a shorter one may fit
                self.on_part(part, number, len(todo))
                result = self._carry_out(part)
                cut_short = self.conversation.engine.stopping or self.conversation.is_late
                if cut_short and result.outcome not in (Outcome.COMPLETED, Outcome.SKIPPED):
                    break  # by canaryd: no result
                self.directory.add(result)
                self.on_result(result)
                self._write()
        finally:
            self.conversation.close()
        return self._write()

    def _wanted(self, part: Part) -> bool:
        return not self.options.only or any(_is_named(part.name, name) for name in self.options.only)

    def _refuse_unknown(self, parts: Collection[str]) -> None:
        for name in self.options.only:
            if not any(_is_named(part, name) for part in parts):
                groups = dict.fromkeys(part.partition("/")[0] for part in parts)
                raise NoSuchPart(
                    f"{name}: no such part; choose from {', '.join(groups)}{did_you_mean(name, [*groups, *parts])}"
                )

    @functools.cached_property
    def _ours(self) -> dict[str, tuple[Part, host_parts.CarryOut]]:
        return host_parts.parts(self.conversation) | outside.parts(self.conversation)

    def _environment(self, parts: dict[str, Part]) -> Result:
        """Run the part that reads the device and its stack, and return its result; open the directory for results."""
        device = self.conversation.device
        result = self._carry_out(parts["environment"])
        if result.outcome is not Outcome.COMPLETED:
            raise RuntimeError(f"{result.outcome.value}: {result.detail}")
        stack = {str(k): str(v) for k, v in result.facts.get("stack", {}).items()}
        name = f"characterise-{file_name(device.model)}-{file_name(document.stack_name(stack))}"
        path = self.options.directory
        if path is None:
            path = Path.cwd() / name
            if path.exists():
                raise FileExistsError(str(path))
        self.directory = Directory(path)
        self.directory.open(
            {"device": device.uuid, "stack": stack_id(stack), "drill": self.conversation.drill, "name": name}
        )
        self.base = path / name
        return result

    def _carry_out(self, part: Part) -> Result:
        started, begun = time.time(), time.monotonic()
        ours = self._ours.get(part.name)
        made = ours[1](part, self.conversation) if ours else self.conversation.carry_out(part)
        return replace(made, started=started, seconds=round(time.monotonic() - begun, 3))

    def _write(self) -> document.Document:
        results = self.directory.results()
        names = {r.name for r in results}
        self.left = [p for p in self.planned if p.name not in names]
        made = document.document(self.conversation.device, results, self.left, drill=self.conversation.drill)
        with contextlib.suppress(OSError):  # a full disk: the results that are there stay
            write(self.base.with_name(f"{self.base.name}.json"), document.text(made))
            write(self.base.with_name(f"{self.base.name}.html"), page(made))
        return made
