"""Play one story for a person."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import yaml

from tests.story.chances import chances, rounds_until
from tests.story.format import load
from tests.story.playing import Played, play, summary


def timeline(played: Played, *, verbose: bool = False) -> Iterator[str]:
    """Yield a line whenever the verdict on a device changed; with `verbose` what was found, too."""
    changes = []
    for name, told in played.verdicts.items():
        before = ""
        for number, verdict in enumerate(told):
            now = summary(verdict)
            if now != before:
                changes.append((number, name, now, verdict))
            before = now
    for number, name, now, verdict in sorted(changes, key=lambda change: change[:2]):
        hours = number * played.story.seconds / 3600
        yield f"round {number:4}  {hours:7.1f} h  {name:12} {now}"
        if verbose and verdict is not None:
            yield from (f"{'':36}{f.rule}: {f.message}" for f in verdict.findings)
    for name, drills in played.drills.items():
        yield from (f"drill{'':18}  {name:12} {summary(verdict)}" for verdict in drills)


def main() -> int:
    """Play one story for a person."""
    parser = argparse.ArgumentParser(prog="scripts/story", description="Play a story and print how verdicts change.")
    parser.add_argument("story", type=Path)
    parser.add_argument("--seed", type=int, help="another course of chance (default: the story's own)")
    parser.add_argument("--verbose", action="store_true", help="print the findings in full")
    arguments = parser.parse_args()
    try:
        told = load(arguments.story)
    except (OSError, ValueError, yaml.YAMLError) as error:
        sys.stderr.write(f"scripts/story: {error}\n")
        return 64
    out = sys.stdout
    out.write(f"{told.name}: {told.text.strip()}\n\n")
    if told.statistics is not None:
        each = chances(told)
        medians = [rounds_until(each, q) for q in (0.5, told.statistics.probability)]
        out.write(f"{told.statistics.device} should first show by round {medians[0]} with 50 %, by round {medians[1]} ")
        out.write(f"with {told.statistics.probability:.0%}, counted from 1\n\n")
    played = play(told, seed=arguments.seed)
    out.writelines(f"{line}\n" for line in timeline(played, verbose=arguments.verbose))
    failures = played.failures()
    out.write("\n" + ("\n".join(failures) or "as expected") + "\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
