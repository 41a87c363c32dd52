"""The loop of a process that acts on the gate's answers: it asks, does what is new, and says so once."""

from __future__ import annotations

import argparse
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from canaryd.action.kubernetes import ApiError
from canaryd.config import load
from canaryd.config.load import ConfigError
from canaryd.facts import printable
from canaryd.report import gate

Asked = tuple[gate.Answer, str]
"""The gate's answer, and the reason why enforcement is off or ""."""
QUESTION = gate.Question(proven=True)
"""What was done about a device is undone where this passes: it is healthy, and proven since its last repair."""


@dataclass(kw_only=True)
class Turns(ABC):
    """What one process does about the gate's answers."""

    ask: Callable[[], Asked]
    """May raise `ConfigError`."""
    told: set[str] = field(default_factory=set)

    @abstractmethod
    def act(self, answer: gate.Answer, silence: str, now: float) -> Iterator[str]:
        """Yield one line for everything that is done, or would be. May raise `ApiError`."""

    def turn(self, now: float) -> list[str]:
        """Do once what the gate's answer asks for, and return what is new about it, one line each."""
        said: list[str] = []
        try:
            for line in self.act(*self.ask(), now):
                said.append(line)  # noqa: PERF402  what was said before an error stays said
        except (ApiError, ConfigError) as error:
            said.append(f"nothing is changed: {error}")
        before, self.told = self.told, set(said)
        return [printable(line) for line in said if line not in before]

    def run(self, every: float) -> None:
        """Take a turn every so many seconds, for ever."""
        while True:
            for line in self.turn(time.time()):
                sys.stdout.write(f"{line}\n")
            sys.stdout.flush()
            time.sleep(every)


def options(name: str, description: str) -> argparse.ArgumentParser:
    """Return a parser with the options that each of these processes has."""
    parser = argparse.ArgumentParser(prog=f"canaryd.action.{name}", description=description)
    parser.add_argument("--config", type=Path, metavar="FILE")
    parser.add_argument("--every", type=float, default=60.0, metavar="SECONDS")
    return parser


def node_name(parser: argparse.ArgumentParser) -> str:
    """Return the name of this node, or end the process if it is not told."""
    return os.environ.get("NODE_NAME") or parser.error("NODE_NAME is not set; set it from spec.nodeName")


def asking(config: Path | None, question: gate.Question = QUESTION) -> Callable[[], Asked]:
    """Return a function that asks the gate, and reads the configuration anew each time."""

    def ask() -> Asked:
        settings = load.load(config)
        return gate.ask(settings, question), gate.silenced(settings, os.environ)

    return ask
