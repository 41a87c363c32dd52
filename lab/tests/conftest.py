"""The lab's tests rely on what the tests of the core rely on."""

from tests.conftest import *  # noqa: F403
