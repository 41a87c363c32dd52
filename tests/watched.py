"""A real server on a checkpoint of its own, watched by an engine of its own: for tests and benchmarks."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from canaryd.model import Finding, Run, State
from tests import checkpoints, engines
from tests.command import configure
from tests.engines import NAMED
from tests.servers import Server

PROMPTS = {"prompts": [{"name": "reef", "text": "import json and then read the file " * 6, "tokens": 32}]}


class Watched:
    """A server on a checkpoint of its own, and an engine that watches it."""

    def __init__(
        self, name: str, directory: Path, *, told: bool = True, family: str = "qwen2", **endpoint: object
    ) -> None:
        self.checkpoint = checkpoints.make(directory / "checkpoint", family=family)
        self.server = Server(name, self.checkpoint, directory)
        (directory / "prompts.json").write_text(json.dumps(PROMPTS))
        section = {"url": self.server.url, "model": self.server.model, "prompts": str(directory / "prompts.json")}
        section |= {"timeout": "30s"} | endpoint
        if told:
            section["directory"] = str(self.checkpoint)
        self.file = configure(
            directory,
            each={"endpoint_canary": {"enabled": True}},
            endpoints={"main": section},
            state_dir=str(directory / "state"),
        )
        self.engine = engines.start(self.file)

    def ask(self) -> list[Run]:
        """Run the canary once, with all that it calls for."""
        return engines.ask(self.engine)

    def learn(self) -> None:
        """Run until every case has its baseline."""
        for _ in range(6):
            runs = self.ask()
            assert all(r.recordings for r in runs), [r.detail for r in runs]
            if not self.engine._learning.lacks_baseline(NAMED, "endpoint_canary"):
                return
        pytest.fail(f"no baseline after six runs: {self.found()}")

    def found(self, uuid: str = NAMED) -> dict[str, Finding]:
        """Return what is found of the endpoint, or of a device, by rule."""
        return engines.rules(self.engine, uuid)

    @property
    def behind(self) -> dict[str, Finding]:
        """What is found of the device behind it."""
        return self.found(engines.cpu(self.engine))

    @property
    def state(self) -> State:
        """The endpoint's."""
        return self.engine.verdict(NAMED).state

    @contextlib.contextmanager
    def restarted(self) -> Iterator[None]:
        """Stop the server for a change of its checkpoint."""
        self.server.stop()
        yield
        self.server.start()

    def load(self, threads: int = 3) -> contextlib.AbstractContextManager[None]:
        """Keep the server busy with other prompts of other lengths."""

        @contextlib.contextmanager
        def busy() -> Iterator[None]:
            over = threading.Event()

            def ask(number: int) -> None:
                turn = 0
                while not over.is_set():
                    turn += 1
                    body = {"prompt": "def " * (5 + 7 * ((turn + number) % 9)), "max_tokens": 24, "temperature": 0}
                    with contextlib.suppress(OSError):
                        self.server.ask("completions", body)

            workers = [threading.Thread(target=ask, args=(n,), daemon=True) for n in range(threads)]
            for worker in workers:
                worker.start()
            try:
                yield
            finally:
                over.set()
                for worker in workers:
                    worker.join()

        return busy()
