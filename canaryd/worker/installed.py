"""Compare the compiled files of the software under test with the hashes that pip recorded when it installed them.

Binary distribution format (packaging.python.org): RECORD lists each installed file with its SHA-256. conda, Debian's
packages and containers built without pip have no such record.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

COMPILED = re.compile(r"\.(so|dylib|dll|pyd|cubin|hsaco|metallib)(\.|$)")
"""Names of files with machine code or kernels; Python sources are edited on purpose, and choose none of the bits."""
BLOCK = 1 << 20
"""Bytes read at once."""


def answer(arguments: Mapping[str, Any], progress: Callable[[float, str], None]) -> dict[str, Any]:
    """Return which files of a distribution, and of those that it needs, are not as installed.

    Arguments: distribution (its name, such as torch). The answer: "compared" (number of files), "altered" (paths that
    hold other bytes, at a second reading from the disk too), "misread" (paths that held other bytes only at the first
    reading: memory or disk), "without" (names of distributions without recorded hashes).
    """
    found: dict[str, Any] = {"compared": 0, "altered": [], "misread": [], "without": []}
    every = list(needed(str(arguments["distribution"])))
    for number, distribution in enumerate(every):
        progress(number / len(every), distribution.name)
        files = [f for f in distribution.files or () if COMPILED.search(f.name)]
        hashed = [f for f in files if f.hash is not None and f.hash.mode == "sha256"]
        if not distribution.files or len(hashed) < len(files):
            found["without"].append(distribution.name)
        for file in hashed:
            path, wanted = Path(str(file.locate())), file.hash.value if file.hash else ""
            found["compared"] += 1
            if digest(path) != wanted:
                kind = "altered" if digest(path, again=True) != wanted else "misread"
                found[kind].append(str(path))
    return found


def needed(name: str) -> Iterator[metadata.Distribution]:
    """Yield an installed distribution and all those that it needs and that are installed, each once."""
    names, seen = [name], set[str]()
    while names:
        name = re.sub(r"[-_.]+", "-", names.pop()).lower()
        if name in seen:
            continue
        seen.add(name)
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        yield distribution
        names += [
            re.split(r"[^\w.-]", one, maxsplit=1)[0] for one in distribution.requires or () if "extra ==" not in one
        ]


def digest(path: Path, *, again: bool = False) -> str:
    """Return a file's SHA-256 as RECORD has it; "" if the file cannot be read.

    `again`: read it from the disk, past the copy that memory holds.
    """
    hashed = hashlib.sha256()
    try:
        with path.open("rb") as file:
            if again and hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            while block := file.read(BLOCK):
                hashed.update(block)
    except OSError:
        return ""
    return base64.urlsafe_b64encode(hashed.digest()).rstrip(b"=").decode()
