"""Remote write as docs/metrics.md says it: a real agent scrapes, a real Prometheus receives and evaluates."""

import re
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


def test_an_agent_sends_series(tmp_path):
    """Every series arrives under the node's name with the agent's labels."""
    page = families.page_of(node(1))
    lines = [line for line in page.text.decode().splitlines() if line.startswith("canaryd_")]
    server = Server("127.0.0.1", 0, {"/metrics": lambda request: page.answer(request.headers)})
    server.start()
    try:
        with prometheus(tmp_path / "receiver", {}, "--web.enable-remote-write-receiver") as receiver:
            config = example()
            config["global"]["scrape_interval"] = "1s"
            config["scrape_configs"][0]["static_configs"][0]["targets"] = [f"127.0.0.1:{server.port}"]
            config["remote_write"][0]["url"] = f"http://{receiver.address}/api/v1/write"
            with prometheus(tmp_path / "agent", config, "--enable-feature=agent"):
                ours = 'count({__name__=~"canaryd_.*",instance="node0001",cluster="training",job="canaryd"})'
                eventually(lambda: receiver.query(f"{ours} == {len(lines)}"))
    finally:
        server.close()
