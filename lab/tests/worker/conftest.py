"""The worker's part of the lab is tested with what the core's worker is tested with."""

from tests.worker.conftest import *  # noqa: F403
