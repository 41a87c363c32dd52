"""Files that are written whole or not at all."""

from __future__ import annotations

import os
import resource
import signal
import stat
from pathlib import Path

import pytest

from canaryd.cli.common import write_report
from canaryd.files import keep, recall, write_whole


@pytest.fixture
def small():
    """Let this process write 1,000 bytes to a file, as on a disk that fills meanwhile."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.usefixtures("small")
def test_a_write_that_fails_keeps_the_old_file_and_leaves_no_part(tmp_path):
    """A report of yesterday is better than half of today's."""
    path = tmp_path / "report.json"
    write_whole(path, b"the old one")
    with pytest.raises(OSError, match="File too large"):
        write_whole(path, b"x" * 2000)
    assert path.read_bytes() == b"the old one"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(("mode", "given"), [(None, 0o640), (0o644, 0o644)])
def test_a_file_has_the_rights_that_the_user_or_its_reader_wants(tmp_path, mode, given):
    """Those of the umask, unless another program has to read it."""
    before = os.umask(0o027)
    try:
        write_whole(tmp_path / "a", b"x", mode)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == given


def test_a_report_keeps_the_rights_of_the_one_before(tmp_path):
    """One that nobody else may read stays so."""
    path = tmp_path / "report.json"
    path.write_text("old")
    path.chmod(0o600)
    assert write_report(path, "new")
    assert (path.read_text(), stat.S_IMODE(path.stat().st_mode)) == ("new", 0o600)


def test_a_report_goes_to_the_file_that_the_caller_has_open(tmp_path):
    """Replaced, it would be in no file that the caller sees."""
    with (tmp_path / "open").open("w+") as file:
        (tmp_path / "open").unlink()
        assert write_report(Path(f"/dev/fd/{file.fileno()}"), "delivered")
        assert file.read() == "delivered"


def test_no_name_leads_out_of_the_directory(tmp_path):
    """A driver names the devices, and may name one "../other"."""
    names = ("../../other", "/etc/other", "..", "a\0b", "GPU-1")
    for name in names:
        keep(str(tmp_path / "state/memory"), name, name)
    assert [recall(str(tmp_path / "state/memory"), name) for name in names] == [*names]
    assert [path for path in tmp_path.rglob("*") if path.is_file() and path.parent.name != "memory"] == []
    keep(str(tmp_path / "state/memory"), "GPU-1", None)
    assert recall(str(tmp_path / "state/memory"), "GPU-1") is recall("", "GPU-1") is None
