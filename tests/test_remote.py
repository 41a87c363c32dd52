"""Remote write as docs/metrics.md says it: a real agent scrapes, a real Prometheus receives and evaluates."""

import re
import time
from pathlib import Path

import yaml

from canaryd.metrics import families
from canaryd.web.server import Server
from tests.command import eventually
from tests.full_node import node
from tests.prometheus import prometheus

DOCS = Path(__file__).parent.parent / "docs" / "metrics.md"


def example():
    """Return the agent's configuration from the documentation."""
    return yaml.safe_load(re.search(r"```yaml\n# agent.yml\n(.*?)```", DOCS.read_text(), re.DOTALL)[1])


def test_an_agent_sends_series_and_exemplars(tmp_path):
    """Every series arrives under the node's name with the agent's labels, exemplars too."""
    now = time.time()
    full = node(1)
    for run in full.devices[0].mismatches.values():
        object.__setattr__(run, "started", now - 5)
    page = families.render(full)
    lines = [line for line in page.text.body.decode().splitlines() if not line.startswith("#")]
    server = Server("127.0.0.1", 0, {"/metrics": lambda headers: families.answer(page, headers)})
    server.start()
    try:
        with prometheus(
            tmp_path / "receiver", {}, "--web.enable-remote-write-receiver", "--enable-feature=exemplar-storage"
        ) as receiver:
            config = example()
            config["global"]["scrape_interval"] = "1s"
            config["scrape_configs"][0]["static_configs"][0]["targets"] = [f"127.0.0.1:{server.port}"]
            config["remote_write"][0]["url"] = f"http://{receiver.address}/api/v1/write"
            with prometheus(tmp_path / "agent", config, "--enable-feature=agent,exemplar-storage"):
                ours = 'count({__name__=~"canaryd_.*",instance="node0001",cluster="training",job="canaryd"})'
                eventually(lambda: receiver.query(f"{ours} == {len(lines)}"))
                exemplars = eventually(
                    lambda: receiver.ask(
                        "/api/v1/query_exemplars",
                        query="canaryd_probe_mismatches_total",
                        start=str(now - 60),
                        end=str(now + 60),
                    )
                )
        runs = {e["labels"]["run_id"] for series in exemplars for e in series["exemplars"]}
        assert runs <= {run.id for run in full.devices[0].mismatches.values()}
        assert runs
    finally:
        server.close()
