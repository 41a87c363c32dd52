"""Both formats over HTTP: which one a scraper gets, packed or not; and what a real Prometheus makes of them."""

import gzip
import http.client
import re
import threading
import time
import urllib.request
import zlib
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from canaryd.metrics import families as metrics_families
from canaryd.metrics.exposition import (
    OPENMETRICS,
    TEXT,
    Exemplar,
    Family,
    Page,
    Prepared,
    takes_gzip,
    wants_openmetrics,
)
from canaryd.model import Ack
from canaryd.store.store import Store
from canaryd.web.server import Answer, Server
from tests.command import Daemon, configure, eventually, running
from tests.full_node import PROBES, node
from tests.prometheus import prometheus, scraping

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"
PROMETHEUS_2 = (
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)
PROMETHEUS_3 = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,"
    "text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)


@pytest.mark.parametrize(
    "accept",
    [
        PROMETHEUS_2,
        PROMETHEUS_3,
        "application/openmetrics-text; version=1.0.0; charset=utf-8",
        'Application/OpenMetrics-Text;version="1.0.0"',
        "text/plain;q=0.5, application/openmetrics-text;version=1.0.0;q=0.5",
    ],
)
def test_who_asks_for_openmetrics_gets_it(accept):
    """Prometheus of today and of tomorrow, and whoever writes the header otherwise."""
    assert wants_openmetrics(accept)


@pytest.mark.parametrize(
    "accept",
    [
        "",
        "*/*",
        "text/plain",
        "application/openmetrics-text",
        "application/openmetrics-text;version=0.0.1",
        "application/openmetrics-text;version=x",
        "application/openmetrics-text;version=1.0.0;q=0",
        "application/openmetrics-text;version=1.0.0;q=much",
        "application/openmetrics-text;version=1.0.0;q=0.3,text/plain;q=0.9",
        ";;,=;q=,,application/openmetrics-text version=1.0.0",
    ],
)
def test_everybody_else_gets_the_text_format(accept):
    """No header, other versions, no weight, more weight on text, nonsense."""
    assert not wants_openmetrics(accept)


def test_gzip_is_sent_to_who_names_it():
    """By its name, with a weight above 0."""
    assert all(map(takes_gzip, ["gzip", "deflate, GZIP;q=0.5", "br;q=1.0, gzip;q=0.001"]))
    assert not any(map(takes_gzip, ["", "identity", "*", "gzip;q=0", "gzip;q=0.000", "x-gzipped", "gzip;q=-1"]))


@pytest.mark.parametrize("body", [b"", b"a", b"canaryd_build_info 1\n" * 50_000])
@pytest.mark.parametrize("rest", [b"", b"# EOF\n"])
def test_packed_bytes_are_one_member_of_gzip(body, rest):
    """Unpacked they are body and rest, for readers that know of one member only; the second time as well."""
    prepared = Prepared(body)
    for more in (rest, b"other " + rest):
        reader = zlib.decompressobj(wbits=31)
        assert reader.decompress(prepared.gzip(more)) + reader.flush() == body + more
        assert reader.eof
        assert reader.unused_data == b""


def test_many_scrapers_at_once_get_whole_pages():
    """Who comes while the page is being packed waits for it."""
    prepared = Prepared(metrics_families.render(node(4)).text.body)
    found = []
    threads = [threading.Thread(target=lambda n=n: found.append((n, prepared.gzip(b"%d" % n)))) for n in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(found) == 16
    assert all(gzip.decompress(packed) == prepared.body + b"%d" % n for n, packed in found)


def test_an_exemplar_shows_in_openmetrics_alone():
    """Behind the value, with its time; the text format, which has none, stays as it is."""
    page = Page({"a_seconds_total": Family("counter", (), "A.")})
    page.add("a_seconds_total", 3, exemplar=Exemplar("019a-1", 12.5))
    text = page.openmetrics().decode() + "# EOF\n"
    assert text == (
        "# TYPE a_seconds counter\n# UNIT a_seconds seconds\n# HELP a_seconds A.\n"
        'a_seconds_total 3.0 # {run_id="019a-1"} 1.0 12.500\n# EOF\n'
    )
    (family,) = text_string_to_metric_families(text)
    assert family.samples[0].exemplar.labels == {"run_id": "019a-1"}
    assert page.text() == b"# HELP a_seconds_total A.\n# TYPE a_seconds_total counter\na_seconds_total 3.0\n"


@pytest.fixture
def serving():
    """A server of the page of a full node: (server, exposition)."""
    page = metrics_families.render(node(2, 7))
    server = Server("127.0.0.1", 0, {"/metrics": lambda headers: metrics_families.answer(page, headers)})
    server.start()
    yield server, page
    server.close()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("accept", [PROMETHEUS_2, "*/*"])
def test_over_http(serving, accept, packed):
    """Type, encoding and length are those of the body; what may be cached says by what it differs."""
    server, page = serving
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=5)
    connection.request("GET", "/metrics", headers={"Accept": accept, **({"Accept-Encoding": "gzip"} if packed else {})})
    response = connection.getresponse()
    body = response.read()
    connection.close()
    assert int(response.headers["Content-Length"]) == len(body)
    assert response.headers["Vary"] == "Accept, Accept-Encoding"
    assert response.headers["Content-Encoding"] == ("gzip" if packed else None)
    text = gzip.decompress(body) if packed else body
    wanted, begin = (TEXT, page.text) if accept == "*/*" else (OPENMETRICS, page.openmetrics)
    assert response.headers["Content-Type"] == wanted
    assert text.startswith(begin.body)
    assert b"process_resident_memory_bytes " in text[len(begin.body) :]
    assert text.endswith(b"# EOF\n") == (wanted == OPENMETRICS)


def test_a_real_prometheus_reads_it_with_exemplars(tmp_path):
    """It negotiates OpenMetrics with gzip, takes every series and every exemplar, and joins with dcgm-exporter's."""
    now = time.time()
    full = node(2, 7)
    for view in full.devices:
        for run in view.mismatches.values():
            object.__setattr__(run, "started", now - 5)
    page, seen = metrics_families.render(full), []
    dcgm = "".join(
        f'DCGM_FI_DEV_GPU_TEMP{{UUID="{v.device.uuid}",gpu="{v.device.index}"}} 61\n'
        for v in full.devices
        if not v.device.parent
    )

    def scraped(headers):
        seen.append((headers["accept"], headers["accept-encoding"]))
        return metrics_families.answer(page, headers)

    one = Server("127.0.0.1", 0, {"/metrics": scraped})
    other = Server("127.0.0.1", 0, {"/metrics": lambda _: Answer(200, TEXT, dcgm.encode())})
    config = scraping(*(f"127.0.0.1:{server.port}" for server in (one, other)))
    one.start()
    other.start()
    try:
        with prometheus(tmp_path, config, "--enable-feature=exemplar-storage") as scraper:
            eventually(lambda: len(scraper.query("up == 1")) == 2)
            assert wants_openmetrics(seen[0][0])
            assert takes_gzip(seen[0][1])
            lines = [line for line in page.text.body.decode().splitlines() if not line.startswith("#")]
            counted = scraper.query('count({__name__=~"canaryd_.*"})')
            assert int(counted[0]["value"][1]) == len(lines)
            assert len(scraper.query("canaryd_golden_fingerprint")) == len(full.devices) * len(PROBES)
            found = eventually(
                lambda: scraper.ask(
                    "/api/v1/query_exemplars",
                    query="canaryd_probe_mismatches_total",
                    start=str(now - 60),
                    end=str(now + 60),
                )
            )
            assert len(found) == len(full.devices) * len(PROBES)
            wanted = {run.id for view in full.devices for run in view.mismatches.values()}
            assert {e["labels"]["run_id"] for series in found for e in series["exemplars"]} == wanted
            joins = re.findall(r"```promql\n(.*?)```", DOCS.read_text(), re.DOTALL)
            # The device is suspect here, so the documentation's query for faulty ones must be asked about those.
            first, second = (join.replace('"faulty"', '"suspect"') for join in joins)
            assert [float(s["value"][1]) for s in scraper.query(first)] == [61.0, 61.0]
            assert len(scraper.query(second)) == 14
    finally:
        one.close()
        other.close()


def test_a_real_daemon_shows_periods_words_and_runs(tmp_path):
    """The probe's period, when the state began, an operator's word once it is said, the run of the mismatch."""
    config = configure(tmp_path, "mismatches", each={"mismatches": {"period": "30m"}})
    state = tmp_path / "state"
    with running(Daemon(config, state)) as daemon:
        eventually(lambda: daemon.value("canaryd_probe_mismatches_total"))
        assert daemon.value("canaryd_probe_period_seconds", probe="mismatches") == 1800.0
        assert daemon.value("canaryd_device_acknowledged") == 0.0
        since = eventually(lambda: daemon.value("canaryd_device_state_since_timestamp_seconds"))
        assert time.time() - 60 < since <= time.time()
        request = urllib.request.Request(daemon.address + "/metrics", headers={"Accept": OPENMETRICS})
        with urllib.request.urlopen(request, timeout=10) as answer:
            assert answer.headers["Content-Type"] == OPENMETRICS
            families = {f.name: f for f in text_string_to_metric_families(answer.read().decode())}
        (sample,) = families["canaryd_probe_mismatches"].samples
        eventually(lambda: daemon.value("canaryd_device_state", state="faulty") == 1.0)  # a fault after it is news
        with Store.open(state) as store:
            found = {run.id for run in store.runs(probe="mismatches") if run.wrong}
            now = time.time()
            ack = Ack(device=sample.labels["device"], kind="acknowledged", at=now, until=now + 3600, reason="known")
            assert store.add_ack(ack)
        assert sample.exemplar.labels["run_id"] in found
        eventually(lambda: daemon.value("canaryd_device_acknowledged") == 1.0)
