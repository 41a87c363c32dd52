"""Write an exact canary for a serving engine (docs/exact-canary.md); run it where torch is installed.

python -m tools.export_exact_canary DIRECTORY [--like config.json] [--seed N] [--layers N] [--no-anchor]
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from canaryd.worker.exact_canary.construct import construct
from canaryd.worker.exact_canary.export import export
from canaryd.worker.exact_canary.shape import TINY, Unfit, like


def main(words: list[str] | None = None) -> int:
    """Run from the command line; 64 for sizes that do not fit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--like", type=Path, metavar="CONFIG", help="a served model's config.json (default: tiny)")
    parser.add_argument("--layers", type=int, default=4, help="most layers with --like (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-anchor", action="store_true", help="for engines that scale queries by a rounded factor")
    given = parser.parse_args(words)
    try:
        shape = like(json.loads(given.like.read_text()), given.layers) if given.like else TINY
        model = construct(shape, given.seed, anchored=False if given.no_anchor else None)
    except (Unfit, OSError, ValueError, KeyError) as error:
        print(f"{given.like or given.directory}: {error}", file=sys.stderr)
        return 64
    export(model, given.directory)
    print(f"{given.directory}: {shape}, {model.program}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
