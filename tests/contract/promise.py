"""The test of the contract, for a part of the stories: pytest gives each file of tests to one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.contract.courses import FILES, course, written
from tests.sentences import in_other_words


def promised(first: str, last: str) -> Callable[[Path, pytest.MonkeyPatch], None]:
    """Return the test of the stories whose names begin with `first` to `last`."""
    paths = [path for path in FILES if first <= path.stem[0] <= last]

    @pytest.mark.parametrize("path", paths, ids=lambda path: path.stem)
    def test(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A story takes the course that is promised, also when every sentence is changed."""
        played = in_other_words(path, monkeypatch)
        assert course(played) == written(path), f"python -m tests.contract {path.stem} prints the difference"
        assert not played.failures(), "\n".join(played.failures())

    return test
