"""The pages of the daemon come from one look at the record."""

from prometheus_client.parser import text_string_to_metric_families

from canaryd.daemon.publisher import Publisher
from canaryd.report import status
from canaryd.web.server import Request
from tests.story.format import STORIES, load
from tests.story.host import Host


def test_the_metrics_say_of_an_old_verdict_what_status_says(tmp_path):
    """A device whose verdict was not renewed is unknown by the test's own fault, and the finding says why, on both."""
    host = Host(load(STORIES / "xid-79.yaml"), 0, tmp_path, 1)  # a story of 2021: its verdicts are years old
    try:
        names = sorted(host.play(0))
        publisher = Publisher(host.engine, host.engine.store)
        publisher.changed()
        page = publisher.routes()["/metrics"](Request({})).body.decode()
        shown = status.gather(host.engine.store, host.config, daemon=True, evidence={}).devices
    finally:
        host.close()
    samples = [s for family in text_string_to_metric_families(page) for s in family.samples if s.value == 1]
    told = {(s.labels["device"], s.labels["cause"]) for s in samples if s.name == "canaryd_device_cause"}
    found = {(s.labels["device"], s.labels["rule"]) for s in samples if s.name == "canaryd_finding"}
    assert len(names) == len(shown) > 1
    assert {d.verdict.cause.value for d in shown} == {"harness"}
    assert told == {(d.device.uuid, "harness") for d in shown}
    assert {(d.device.uuid, f.rule) for d in shown for f in d.verdict.findings} <= found
