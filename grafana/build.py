"""Write the dashboards, `python -m grafana.build`, or say which are out of date, `python -m grafana.build --check`.

Needs grafana-foundation-sdk at the version that pyproject.toml pins (Grafana 11.6, schema version 41); an unpinned
install takes another. The files that it writes need nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from grafana import device, fleet, itself, node

OUT = Path(__file__).parent / "dashboards"


def dashboards() -> Mapping[str, str]:
    """Return file name → JSON of every dashboard."""
    encoder = JSONEncoder(sort_keys=True, indent=2, ensure_ascii=False)
    pages = (module.page() for module in (fleet, node, device, itself))
    return {f"{page.uid}.json": encoder.encode(page.write()) + "\n" for page in pages}


def main() -> int:
    """Write, or compare: exit status 1 where a file differs from what the code gives."""
    parser = argparse.ArgumentParser(description="write the dashboards as JSON")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where a file is out of date")
    check = parser.parse_args().check
    stale = []
    for name, text in dashboards().items():
        path = OUT / name
        if path.exists() and path.read_text() == text:
            continue
        stale.append(name)
        if not check:
            OUT.mkdir(exist_ok=True)
            path.write_text(text)
    if check and stale:
        sys.stderr.write(f"out of date: {', '.join(stale)}; run: python -m grafana.build\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
