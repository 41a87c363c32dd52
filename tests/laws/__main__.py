"""Print what breaks a law: `python -m tests.laws [--seeds N] [--law LAW] [STORY ...]`."""

from __future__ import annotations

import argparse
import sys
import time

from tests.laws.fleet import accused, innocent
from tests.laws.properties import LAWS, broken, names
from tests.story.playing import play


def main() -> int:
    """Print each break as it is found; return 1 where there is one."""
    parser = argparse.ArgumentParser(prog="python -m tests.laws")
    parser.add_argument("story", nargs="*", help="default: every story")
    parser.add_argument("--law", choices=[*LAWS], action="append", help="default: every law")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--days", type=int, default=0, help="of a healthy fleet instead of stories")
    arguments = parser.parse_args()
    seeds, found, out = range(1, arguments.seeds + 1), 0, sys.stdout
    for seed in seeds if arguments.days else ():
        begun = time.process_time()
        texts = list(accused(play(innocent(arguments.days, seed), seed=seed)))
        found += len(texts)
        out.write(f"innocence seed {seed} ({time.process_time() - begun:.0f} s)\n")
        out.writelines(f"    {text}\n" for text in texts)
        out.flush()
    for name in () if arguments.days else arguments.story or names():
        for law in arguments.law or LAWS:
            begun = time.process_time()
            texts = broken(name, law, seeds)
            found += len(texts)
            out.write(f"{name} {law} ({time.process_time() - begun:.2f} s)\n")
            out.writelines(f"    {text}\n" for text in texts)
            out.flush()
    return int(found > 0)


if __name__ == "__main__":
    sys.exit(main())
