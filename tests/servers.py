"""Real model servers that others wrote, on checkpoints of tests/checkpoints.py: started, killed, paused and slowed.

docs/testing.md tells how to get them. A server that is not there skips the test and says so.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from tests import checkpoints
from tests.command import eventually, free_port

PATIENCE = 300.0
"""Seconds that a server may take until it answers: vLLM takes two minutes on two cores."""
ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",  # two that wait for each other on two busy cores take ten times as long
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # it would ask the network for prices
    "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",  # on loopback, for a test
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
}
_LOCAL = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True)
class Kind:
    """How one server is found and started."""

    variable: str
    """Environment variable that names its program, or the Python of the environment that holds it."""
    program: str
    arguments: Callable[[Path, Path], list[str]]
    """From the checkpoint's directory and the server's own: what stands before host and port."""
    model: str = ""
    """The name that requests call the model; by default the checkpoint's directory."""
    behind: str = ""
    """The server that it stands in front of, one of `KINDS`; started before it, on a port of its own."""
    turns: Literal["restart", "name", "reload"] = "restart"
    """How it comes to serve another checkpoint: started anew, by the name in a request, or told to read its weights."""

    def found(self) -> str:
        """Return its program, "" where there is none."""
        named = Path(os.environ.get(self.variable) or shutil.which(self.program) or "")
        if named.name.startswith("python"):
            named = named.with_name(self.program)
        return str(named) if os.access(named, os.X_OK) and named.is_file() else ""


def _llama(directory: Path, work: Path) -> list[str]:
    file = directory / "model.gguf"
    if not file.exists():
        dtype = json.loads((directory / "config.json").read_text())["dtype"]
        file = checkpoints.gguf(directory, work / "tiny.gguf", dtype)
    arguments = ["-m", str(file), "--alias", "tiny", "-c", "8192", "-np", "8", "-t", "1"]
    return [*arguments, "--metrics", "--slots", "--jinja"]


def _vllm(directory: Path, _: Path) -> list[str]:
    limits = ["--max-model-len", "1024", "--max-num-seqs", "8", "--max-logprobs", "50", "--enforce-eager"]
    return ["serve", str(directory), "--served-model-name", "tiny", *limits]


def _litellm(directory: Path, work: Path) -> list[str]:
    """Pass what is asked of "tiny" on to the server behind, chat and completions alike."""
    behind = json.loads((work / "behind.json").read_text())
    passed = {"model": f"openai/{behind['model']}", "api_base": behind["url"], "api_key": "none"}
    (work / "proxy.yaml").write_text(json.dumps({"model_list": [{"model_name": "tiny", "litellm_params": passed}]}))
    return ["--config", str(work / "proxy.yaml"), "--telemetry", "False"]


KINDS = {
    "mlx": Kind("CANARYD_TEST_MLX", "mlx_lm.server", lambda directory, _: ["--model", str(directory)], turns="name"),
    "transformers": Kind(
        "CANARYD_TEST_TRANSFORMERS",
        "transformers",
        lambda *_: ["serve", "--device", "cpu", "--dtype", "auto"],
        turns="name",
    ),
    "llama": Kind("CANARYD_TEST_LLAMA_SERVER", "llama-server", _llama, "tiny"),
    "vllm": Kind("CANARYD_TEST_VLLM", "vllm", _vllm, "tiny", turns="reload"),
}
UNKNOWN = {
    "fastchat": Kind("CANARYD_TEST_FASTCHAT", "fastchat-serve", lambda directory, _: [str(directory)], "tiny"),
    "litellm": Kind("CANARYD_TEST_LITELLM", "litellm", _litellm, "tiny", behind="mlx"),
}
"""Servers that canaryd has no dialect for."""


def need(name: str) -> str:
    """Return the program of a server; skip the test where there is none."""
    kind = (KINDS | UNKNOWN)[name]
    if not (program := kind.found()):
        pytest.skip(
            f"no {kind.program} here: run `scripts/servers DIR {name}`, then `. DIR/env.sh`, which sets {kind.variable}"
        )
    return program


class Server:
    """A server on a port of its own, which a restart keeps. Every start reads the checkpoint anew."""

    def __init__(self, name: str, directory: Path, work: Path, *options: str, **environment: str) -> None:
        self.kind, self.directory, self.options = (KINDS | UNKNOWN)[name], directory, options
        self.program = need(name)
        self.work = work / name
        (self.work / "hub").mkdir(parents=True, exist_ok=True)  # mlx-lm and transformers fail without one
        self.environment = os.environ | ENVIRONMENT | {"HF_HUB_CACHE": str(self.work / "hub")} | environment
        self.log = self.work / "log"
        self.port = free_port()
        self.model = self.kind.model or str(directory)
        self.process: subprocess.Popen[bytes] | None = None
        self.behind = Server(self.kind.behind, directory, work) if self.kind.behind else None
        if self.behind:
            told = {"url": self.behind.url, "model": self.behind.model}
            (self.work / "behind.json").write_text(json.dumps(told))

    @property
    def url(self) -> str:
        """Base of the OpenAI-compatible interface."""
        return f"http://127.0.0.1:{self.port}/v1"

    def start(self, within: float = PATIENCE) -> None:
        """Start it and wait until it completes a prompt; fail with its log after `within` seconds."""
        assert self.process is None, "it runs already"
        if self.behind:
            self.behind.start(within)
        argv = [self.program, *self.kind.arguments(self.directory, self.work)]
        argv += ["--host", "127.0.0.1", "--port", str(self.port), *self.options]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                argv, cwd=self.work, env=self.environment, stdout=log, stderr=log, start_new_session=True
            )
        end = time.monotonic() + within
        while not self._answers(end - time.monotonic()):
            code, late = self.process.poll(), time.monotonic() > end
            if code is not None or late:
                self.kill()
                why = f"no answer within {within} s" if late else f"it ended with status {code}"
                raise AssertionError(f"{argv}: {why}:\n{self.log.read_text(errors='replace')[-4000:]}")
            time.sleep(0.2)

    def _answers(self, within: float) -> bool:
        # The first request is the one that loads or compiles, so it has all the time that is left.
        try:
            status, _ = self.ask("completions", {"prompt": "a", "max_tokens": 1, "temperature": 0}, max(within, 1.0))
        except (OSError, http.client.HTTPException):
            return False
        return status == 200

    def ask(self, path: str, body: dict[str, Any] | None = None, timeout: float = 60.0) -> tuple[int, Any]:
        """Send a request (POST with `body` and the model's name, else GET); return the status and JSON or text."""
        data = None if body is None else json.dumps({"model": self.model} | body).encode()
        url = urllib.parse.urljoin(f"{self.url}/", path)
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        try:
            with _LOCAL.open(request, timeout=timeout) as answer:
                status, text = answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                status, text = error.code, error.read().decode(errors="replace")
        try:
            return status, json.loads(text)
        except ValueError:
            return status, text

    def turn_to(self, directory: Path) -> None:
        """Serve another checkpoint of the same sizes and vocabulary from now on.

        vLLM does so only where it was started with VLLM_SERVER_DEV_MODE=1.
        """
        self.directory = directory
        if self.kind.turns == "restart":
            self.stop()
            self.start()
        elif self.kind.turns == "name":
            self.model = str(directory)
            assert self._answers(PATIENCE), f"{self.kind.program} does not serve {directory}"
        else:
            told = {"method": "reload_weights", "kwargs": {"weights_path": str(directory)}}
            for path, body in (("/collective_rpc", told), ("/reset_prefix_cache", {})):
                status, said = self.ask(path, body, PATIENCE)
                assert status == 200, f"{path}: {status} {said}"

    def stop(self, within: float = 30.0) -> None:
        """Ask it to end; kill what is left after `within` seconds."""
        if self.process:
            self._signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(within)
            self.kill()
        if self.behind:
            self.behind.stop(within)

    def kill(self) -> None:
        """End it and every process that it started, at once."""
        if self.process:
            group = self.process.pid
            shared = {name for pid in _living(group) for name in _shared_memory(pid)}
            self._signal(signal.SIGKILL)
            self.process.wait(60.0)
            eventually(lambda: not _living(group))
            self.process = None
            for name in shared:  # vLLM, when killed, leaves hundreds of megabytes
                Path(name).unlink(missing_ok=True)
        if self.behind:
            self.behind.kill()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Stop it: connections are taken up by the kernel, and nothing answers."""
        assert self.process, "it does not run"
        self._signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._signal(signal.SIGCONT)

    @contextlib.contextmanager
    def slowed(self, period: float = 0.5) -> Iterator[None]:
        """Let it run for 10 ms in every `period` seconds: what it computes stays the same.

        Its own waits go on meanwhile, so `period` has to be longer than what it waits for at each token.
        """
        over = threading.Event()

        def brake() -> None:
            while not over.is_set():
                self._signal(signal.SIGSTOP)
                over.wait(period - 0.01)
                self._signal(signal.SIGCONT)
                over.wait(0.01)

        thread = threading.Thread(target=brake, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _signal(self, number: signal.Signals) -> None:
        if process := self.process:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)


@contextlib.contextmanager
def serving(name: str, directory: Path, work: Path, *options: str, **environment: str) -> Iterator[Server]:
    """Run the server `name` of KINDS or UNKNOWN on the checkpoint in `directory`; options go to it, later ones win.

    `work` takes its log and its files. What runs at the end is stopped.
    """
    server = Server(name, directory, work, *options, **environment)
    try:
        server.start()
        yield server
    finally:
        server.stop()


def _living(group: int) -> list[str]:
    """Return the process ids of a group; zombies are dead."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, number = entry.read_text().rpartition(")")[2].split()[:3]
            if state != "Z" and int(number) == group:
                found.append(entry.parent.name)
    return found


def _shared_memory(pid: str) -> list[str]:
    """Return the files of named shared memory that a process has mapped and that still have their name."""
    with contextlib.suppress(OSError):
        return re.findall(r" (/dev/shm/\S+)$", Path(f"/proc/{pid}/maps").read_text(), re.MULTILINE)
    return []


@contextlib.contextmanager
def beside(server: Server, prompts: list[str]) -> Iterator[None]:
    """Let a client for each prompt ask the server again and again, each with another length of prompt and answer."""
    over = threading.Event()

    def client(number: int, prompt: str) -> None:
        asked = " ".join(prompt.split()[: 5 + 2 * number])
        while not over.is_set():
            server.ask("completions", {"prompt": asked, "max_tokens": 5 + 4 * number, "temperature": 0})

    threads = [threading.Thread(target=client, args=each, daemon=True) for each in enumerate(prompts)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()
