"""Certificates for all tests of the web server."""

from __future__ import annotations

import pytest

from tests.pki import Authority


@pytest.fixture(scope="module")
def ca(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("pki"))


@pytest.fixture(scope="module")
def pair(ca):
    return ca.issue("server")
