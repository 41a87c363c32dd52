"""What the tests of actions share."""

import pytest


@pytest.fixture
def account(tmp_path):
    """The directory of a service account, with its token."""
    (tmp_path / "token").write_text("secret\n")
    return tmp_path
