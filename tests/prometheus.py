"""A real Prometheus for tests, where one is installed."""

from __future__ import annotations

import contextlib
import json
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.command import eventually, free_port
from tests.programs import needed


def scraping(*targets: str) -> dict[str, Any]:
    """Return a configuration that scrapes HOST:PORT targets every second."""
    jobs = [{"job_name": "canaryd", "static_configs": [{"targets": list(targets)}]}]
    return {"global": {"scrape_interval": "1s"}, "scrape_configs": jobs}


class Prometheus:
    """Its HTTP interface."""

    def __init__(self, port: int) -> None:
        self.address = f"127.0.0.1:{port}"

    def ask(self, path: str, **parameters: str) -> Any:
        """Return the data of an answer, None while there is none."""
        url = f"http://{self.address}{path}?" + urllib.parse.urlencode(parameters)
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                return json.load(answer).get("data")
        except OSError:
            return None

    def query(self, text: str) -> list[dict[str, Any]]:
        """Return the series of an instant query."""
        data = self.ask("/api/v1/query", query=text)
        return data["result"] if data else []


@contextlib.contextmanager
def prometheus(directory: Path, config: Mapping[str, Any], *arguments: str) -> Iterator[Prometheus]:
    """Run Prometheus in `directory` until the block ends; arguments beyond the address and the folder are its own."""
    program, port = needed("prometheus", untested="nothing was scraped"), free_port()
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "prometheus.yml"
    path.write_text(json.dumps(config))  # JSON is YAML
    data = "agent" if any("feature=agent" in argument for argument in arguments) else "tsdb"
    log = directory / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [
                program,
                f"--config.file={path}",
                f"--storage.{data}.path={directory / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
                *arguments,
            ],
            stdout=file,
            stderr=file,
        )
    running = Prometheus(port)

    def ready() -> bool:
        assert process.poll() is None, log.read_text()[-2000:]
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://{running.address}/-/ready", timeout=5):
            return True
        return False

    try:
        eventually(ready)
        yield running
    finally:
        process.terminate()
        process.wait(30)
