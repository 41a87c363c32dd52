"""The files of a dossier, and the vendors' tools that are asked."""

from __future__ import annotations

import gzip
import os
import re
import shutil
import tarfile

import pytest

from canaryd.config.settings import Config
from canaryd.dossier import perishable, write
from canaryd.dossier.document import DossierError
from tests.dossier.made import GPU, NOW, SERIAL, UUID, tools, written


def test_the_archive_is_the_directory_and_reproducible(store, tmp_path):
    """The same names and bytes; nobody's files; written again at the same time, the archive is equal bit for bit."""
    made, _, _ = written(store, tmp_path)
    archive = made.with_name(made.name + ".tar.gz")
    with tarfile.open(archive) as tar:
        members = tar.getmembers()
        names = [m.name for m in members]
        assert names == sorted(names)
        assert {(m.uid, m.gid, m.uname, m.mtime) for m in members} == {(0, 0, "", NOW)}
        inside = {m.name: tar.extractfile(m).read() for m in members if m.isfile()}
    outside = {str(p.relative_to(made.parent)): p.read_bytes() for p in made.rglob("*") if p.is_file()}
    assert inside == outside
    shutil.move(made.parent, tmp_path / "before")
    again, _, _ = written(store, tmp_path)
    assert archive.read_bytes() == (tmp_path / "before" / archive.name).read_bytes()
    assert again.name == "canaryd-dossier-cuda-3-20260921T141320Z"


def test_a_dossier_is_never_overwritten(store, tmp_path):
    """The second one in the same second is refused, and the first stays."""
    made, _, _ = written(store, tmp_path)
    with pytest.raises(DossierError, match="already exists"):
        written(store, tmp_path)
    assert (made / "SHA256SUMS").exists()


def test_what_cannot_be_written_leaves_nothing(store, tmp_path):
    """A file where the directory should be: one sentence, no rest."""
    (tmp_path / "out").write_text("a file")
    with pytest.raises(DossierError, match="cannot be made: File exists"):
        write.write(store, Config(), None, GPU, tmp_path / "out", redact=False, now=NOW)
    assert (tmp_path / "out").read_text() == "a file"


def test_the_vendors_tool_is_asked_about_this_device(store, tmp_path, monkeypatch):
    """`nvidia-smi -q -i UUID`, with its processes left out; with --redact its names are pseudonyms as well."""
    said = (
        'echo "asked: $*"; echo "    Serial Number : 1650923004711"; echo "    Processes"; echo "        Name : python"'
    )
    monkeypatch.setenv("PATH", tools(tmp_path / "bin", nvidia_smi=said))
    made, document, _ = written(store, tmp_path)
    text = (made / "nvidia-smi-q.txt").read_text()
    assert f"asked: -q -i {UUID}" in text
    assert SERIAL in text
    assert "python" not in text
    assert any(a["file"] == "nvidia-bug-report.log.gz" for a in document["absent"])
    made, _, _ = written(store, tmp_path, redact=True, now=NOW + 1)
    text = (made / "nvidia-smi-q.txt").read_text()
    assert SERIAL not in text
    assert re.search(r"Serial Number : \[serial [0-9a-f]{8}\]", text)


@pytest.mark.parametrize(("body", "why"), [("exit 9", "ended with status 9"), ("sleep 60", "did not end within 0.5 s")])
def test_a_tool_that_fails_is_absent_with_the_reason(store, tmp_path, monkeypatch, body, why):
    """Its failure or its hanging costs its file alone."""
    monkeypatch.setenv("PATH", tools(tmp_path / "bin", nvidia_smi=body))
    monkeypatch.setitem(perishable.TOOL_PATIENCE, "nvidia-smi", 0.5)
    _, document, _ = written(store, tmp_path)
    (absent,) = (a for a in document["absent"] if a["file"] == "nvidia-smi-q.txt")
    assert why in absent["why"]


@pytest.mark.skipif(os.geteuid() != 0, reason="nvidia-bug-report.sh needs root, so canaryd does not start it here")
def test_the_bug_report_is_cleaned_and_never_redacted(store, tmp_path, monkeypatch):
    """It comes along without processes and names; a redacted dossier leaves it out and says why."""
    lines = r"printf 'uname of rack7\n    Processes\n        Name : python\n    Next : /home/eve/x\n' | gzip > $2"
    monkeypatch.setenv("PATH", tools(tmp_path / "bin", nvidia_bug_report_sh=lines))
    made, _, _ = written(store, tmp_path)
    text = gzip.decompress((made / "nvidia-bug-report.log.gz").read_bytes()).decode()
    assert "Next : /home/[user]/x" in text
    assert "python" not in text
    _, document, _ = written(store, tmp_path, redact=True, now=NOW + 1)
    (absent,) = (a for a in document["absent"] if a["file"] == "nvidia-bug-report.log.gz")
    assert "cannot be redacted" in absent["why"]
