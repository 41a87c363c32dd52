"""What several tests of the store share."""

import subprocess

import pytest


@pytest.fixture
def small_disk(tmp_path):
    """A filesystem of one mebibyte of its own."""
    where = tmp_path / "disk"
    where.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", where], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("NOT TESTED: a filesystem of its own needs root and CAP_SYS_ADMIN to mount")
    yield where
    subprocess.run(["umount", "--lazy", where], check=True)
