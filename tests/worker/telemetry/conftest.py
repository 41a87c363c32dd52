"""What several tests of telemetry share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.nvml_stand_in import StandIn
from tests.worker.telemetry.agents import Agent


@pytest.fixture
def machine(tmp_path):
    return StandIn(tmp_path)


@pytest.fixture
def agent(machine):
    with Agent(machine) as one:
        yield one


@pytest.fixture
def log(tmp_path) -> Path:
    return tmp_path / "kmsg"
