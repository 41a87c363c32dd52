"""Write the recording that `canaryd demo` shows: python -m tests.story.demo."""

from __future__ import annotations

import contextlib
import gzip
import sqlite3
from collections.abc import Sequence
from pathlib import Path

from canaryd.cli.demo import RECORDING
from tests.story.format import load
from tests.story.host import Host
from tests.story.playing import play

STORY = Path(__file__).parent / "demo.yaml"


def recorded() -> str:
    """Return the database that the story leaves behind, as SQL."""
    found = []

    def end(hosts: Sequence[Host]) -> None:
        store = hosts[0].engine.store
        path = store.path
        hosts[0].close()
        with contextlib.closing(sqlite3.connect(path)) as database:
            # Readings of telemetry are most of the size, and nothing shows the older ones.
            database.execute(
                "delete from polls where rowid not in (select max(rowid) from polls group by device, probe)"
            )
            database.execute("delete from events where kind = 'files'")  # a made-up node has no files of torch
            database.commit()
            version = database.execute("pragma user_version").fetchone()[0]
            found.append("\n".join([*database.iterdump(), f"pragma user_version={version};\n"]))

    played = play(load(STORY), end=end)
    assert not played.failures(), played.failures()
    return found[0]


if __name__ == "__main__":
    RECORDING.write_bytes(gzip.compress(recorded().encode(), mtime=0))
