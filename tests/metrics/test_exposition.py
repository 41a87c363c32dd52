"""The page over HTTP, packed or not; and what a real Prometheus makes of it."""

import gzip
import http.client
import re
import threading
import time
import zlib
from pathlib import Path

import pytest

from canaryd.metrics import families as metrics_families
from canaryd.metrics.exposition import TEXT, takes_gzip
from canaryd.model import Ack
from canaryd.store.store import Store
from canaryd.web.server import Answer, Server
from tests.command import Daemon, configure, eventually, running
from tests.full_node import PROBES, node
from tests.prometheus import prometheus, scraping

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"


def test_gzip_is_sent_to_who_names_it():
    """By its name, with a weight above 0."""
    assert all(map(takes_gzip, ["gzip", "deflate, GZIP;q=0.5", "br;q=1.0, gzip;q=0.001"]))
    assert not any(map(takes_gzip, ["", "identity", "*", "gzip;q=0", "gzip;q=0.000", "x-gzipped"]))


def test_many_scrapers_at_once_get_whole_pages():
    """Who comes while the page is being packed gets all of it, as one member of gzip."""
    page = metrics_families.page_of(node(4))
    found = []
    ask = {"accept-encoding": "gzip"}
    threads = [threading.Thread(target=lambda: found.append(page.answer(ask).body)) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(found) == 16
    assert all(gzip.decompress(packed) == page.text for packed in found)
    reader = zlib.decompressobj(wbits=31)
    assert reader.decompress(found[0]) == page.text
    assert (reader.eof, reader.unused_data) == (True, b"")


@pytest.fixture
def serving():
    """A server of the page of a full node: (server, exposition)."""
    page = metrics_families.page_of(node(2, 7))
    server = Server("127.0.0.1", 0, {"/metrics": lambda request: page.answer(request.headers)})
    server.start()
    yield server, page
    server.close()


@pytest.mark.parametrize("packed", [False, True])
def test_over_http(serving, packed):
    """Type, encoding and length are those of the body; what may be cached says by what it differs."""
    server, page = serving
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=5)
    connection.request("GET", "/metrics", headers={"Accept-Encoding": "gzip"} if packed else {})
    response = connection.getresponse()
    body = response.read()
    connection.close()
    assert int(response.headers["Content-Length"]) == len(body)
    assert response.headers["Vary"] == "Accept-Encoding"
    assert response.headers["Content-Encoding"] == ("gzip" if packed else None)
    assert response.headers["Content-Type"] == TEXT
    assert (gzip.decompress(body) if packed else body) == page.text
    assert b"\nprocess_resident_memory_bytes " in page.text


def test_a_real_prometheus_reads_it(tmp_path):
    """It asks for gzip, takes every series, and joins with dcgm-exporter's."""
    full = node(2, 7)
    page, seen = metrics_families.page_of(full), []
    dcgm = "".join(
        f'DCGM_FI_DEV_GPU_TEMP{{UUID="{v.device.uuid}",gpu="{v.device.index}"}} 61\n'
        for v in full.devices
        if not v.device.parent
    )

    def scraped(request):
        seen.append(request.headers["accept-encoding"])
        return page.answer(request.headers)

    one = Server("127.0.0.1", 0, {"/metrics": scraped})
    other = Server("127.0.0.1", 0, {"/metrics": lambda _: Answer(200, TEXT, dcgm.encode())})
    config = scraping(*(f"127.0.0.1:{server.port}" for server in (one, other)))
    one.start()
    other.start()
    try:
        with prometheus(tmp_path, config) as scraper:
            eventually(lambda: len(scraper.query("up == 1")) == 2)
            assert takes_gzip(seen[0])
            lines = [line for line in page.text.decode().splitlines() if line.startswith("canaryd_")]
            counted = scraper.query('count({__name__=~"canaryd_.*"})')
            assert int(counted[0]["value"][1]) == len(lines)
            assert len(scraper.query("canaryd_golden_fingerprint")) == len(full.devices) * len(PROBES)
            joins = re.findall(r"```promql\n(.*?)```", DOCS.read_text(), re.DOTALL)
            # The device is suspect here, so the documentation's query for faulty ones must be asked about those.
            first, second = (join.replace('"faulty"', '"suspect"') for join in joins)
            assert [float(s["value"][1]) for s in scraper.query(first)] == [61.0, 61.0]
            assert len(scraper.query(second)) == 14
    finally:
        one.close()
        other.close()


def test_a_real_daemon_shows_periods_and_words(tmp_path):
    """The probe's period, when the state began, an operator's word once it is said."""
    config = configure(tmp_path, "mismatches", each={"mismatches": {"period": "30m"}})
    state = tmp_path / "state"
    with running(Daemon(config, state)) as daemon:
        eventually(lambda: daemon.value("canaryd_probe_mismatches_total"))
        assert daemon.value("canaryd_probe_period_seconds", probe="mismatches") == 1800.0
        assert daemon.value("canaryd_device_acknowledged") == 0.0
        since = eventually(lambda: daemon.value("canaryd_device_state_since_timestamp_seconds"))
        assert time.time() - 60 < since <= time.time()
        eventually(lambda: daemon.value("canaryd_device_state", state="faulty") == 1.0)  # a fault after it is news
        with Store.open(state) as store:
            now, (record,) = time.time(), store.devices()
            ack = Ack(device=record.device.uuid, kind="acknowledged", at=now, until=now + 3600, reason="known")
            assert store.add_ack(ack)
        eventually(lambda: daemon.value("canaryd_device_acknowledged") == 1.0)
