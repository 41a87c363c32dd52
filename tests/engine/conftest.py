"""What several tests of the engine share."""

from __future__ import annotations

import pytest

from canaryd.config.settings import BudgetConfig
from tests.engine.budgets import PROBE


@pytest.fixture
def policy():
    return BudgetConfig()


@pytest.fixture
def probe(tmp_path):
    path = tmp_path / "computes.py"
    path.write_text(PROBE)
    return path
