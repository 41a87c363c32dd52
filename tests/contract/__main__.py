"""Compare the courses of stories with what is promised; `--write` promises what they are now."""

from __future__ import annotations

import difflib
import os
import sys
from multiprocessing import get_context

from tests.contract.courses import COURSES, FILES, played, written


def main() -> int:
    """Print the differences; return 1 where there are any and they were not written."""
    names = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
    paths = [path for path in FILES if not names or path.stem in names]
    differ = False
    with get_context("spawn").Pool(os.cpu_count()) as pool:
        for path, now in zip(paths, pool.imap(played, paths), strict=True):
            before = written(path)
            if now != before:
                differ = True
                lines = difflib.unified_diff(before.splitlines(), now.splitlines(), path.stem, "now", n=1, lineterm="")
                sys.stdout.writelines(f"{line}\n" for line in lines)
            if "--write" in sys.argv:
                COURSES.mkdir(exist_ok=True)
                (COURSES / f"{path.stem}.txt").write_text(now)
    return int(differ and "--write" not in sys.argv)


if __name__ == "__main__":
    sys.exit(main())
