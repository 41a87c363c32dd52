"""The compiled files of the software under test are compared with pip's record of them."""

from __future__ import annotations

import base64
import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

from canaryd.worker.installed import digest, needed
from tests.command import ROOT, environment

ASK = """
import json, sys
from canaryd.worker.installed import answer
print(json.dumps(answer({"distribution": "Some.Kernels"}, lambda *_: None)))
"""


def plant(site: Path, name: str, files: dict[str, bytes], *, recorded: bool = True, needs: str = "") -> None:
    """Install a distribution by hand, with or without the hashes of its files."""
    lines = []
    for path, content in files.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_bytes(content)
        hashed = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        lines.append(f"{path},{f'sha256={hashed}' if recorded else ''},{len(content) if recorded else ''}")
    info = site / f"{name}-1.0.dist-info"
    info.mkdir()
    requires = f"Requires-Dist: {needs}\n" if needs else ""
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{requires}")
    (info / "RECORD").write_text("\n".join(lines) + "\n")


@pytest.fixture
def site(tmp_path):
    """A directory with a package of kernels and one that it needs."""
    plant(
        *(
            tmp_path,
            "some_kernels",
            {"some_kernels/lib/libproduct.so.1": b"right" * 999, "some_kernels/api.py": b"x=1"},
        ),
        needs='more-kernels>=1; python_version > "3"',
    )
    plant(tmp_path, "more_kernels", {"more_kernels/sums.so": b"sums" * 999})
    return tmp_path


def ask(site: Path) -> dict:
    """Return the answer of an interpreter that sees the directory."""
    import json

    argv = [sys.executable, "-c", ASK]
    done = subprocess.run(
        argv, cwd=ROOT, env=environment(PYTHONPATH=f"{site}:{ROOT}"), capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def test_files_are_as_installed(site):
    """Those of what it needs too; sources are not compared."""
    (site / "some_kernels/api.py").write_bytes(b"x=2")
    assert ask(site) == {"compared": 2, "altered": [], "misread": [], "without": []}


@pytest.mark.parametrize("path", ["some_kernels/lib/libproduct.so.1", "more_kernels/sums.so"])
def test_one_altered_bit_is_found(site, path):
    """And a file that is gone: its path is named."""
    content = bytearray((site / path).read_bytes())
    content[100] ^= 4
    (site / path).write_bytes(content)
    assert ask(site)["altered"] == [str(site / path)]
    (site / path).unlink()
    assert ask(site)["altered"] == [str(site / path)]


def test_a_distribution_without_hashes_is_named(site):
    """So nobody takes silence for a match."""
    plant(site, "numerics", {"numerics/sum.so": b"sum"}, recorded=False)
    info = site / "more_kernels-1.0.dist-info/METADATA"
    info.write_text(info.read_text() + "Requires-Dist: numerics\n")
    assert ask(site) == {"compared": 2, "altered": [], "misread": [], "without": ["numerics"]}


def test_a_second_reading_gives_the_same(tmp_path):
    """Past the copy in memory; what cannot be read has no digest."""
    (tmp_path / "file").write_bytes(b"bytes" * 1_000_000)
    assert digest(tmp_path / "file", again=True) == digest(tmp_path / "file") != ""
    assert digest(tmp_path) == ""


def test_what_is_not_installed_needs_nothing():
    """No error: another runtime may come without pip."""
    assert list(needed("no-such-distribution")) == []
