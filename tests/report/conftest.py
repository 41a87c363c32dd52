"""What several tests of reports share."""

import pytest

from canaryd.store.store import Store
from tests.report.statuses import NOW


@pytest.fixture
def store(tmp_path):
    with Store.open(tmp_path / "state", now=lambda: NOW) as opened:
        yield opened
