"""The settings of an endpoint canary."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from canaryd.probe import Skip

APIS = ("completions", "chat")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of one endpoint, from the configuration."""

    url: str
    model: str = ""
    dialect: str = ""
    apis: tuple[str, ...] = APIS
    directory: Path | None = None
    prompts: Path | None = None
    exact: Path | None = None
    """Directory of a served exact canary, written by `canaryd canary export`."""
    repeats: str = ""
    """What the operator promises of the answers, a value of the reading `ENDPOINT_REPEATS`; "" if nothing."""
    key: str = field(default="", repr=False)
    ca_file: str = ""
    timeout: float = 60.0
    """Maximum seconds for one request."""

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Settings:
        """Return settings from the checked section of the configuration, in which None and "" mean that nothing is set.

        Raises `Skip` if the file of the API key cannot be used.
        """
        paths = {name: Path(given[name]) if given.get(name) else None for name in ("directory", "prompts", "exact")}
        return cls(
            url=given["url"].rstrip("/"),
            model=given.get("model") or "",
            dialect=given.get("dialect") or "",
            apis=tuple(given.get("apis") or APIS),
            repeats=given.get("repeats") or "",
            key=_key(Path(given["key_file"])) if given.get("key_file") else "",
            ca_file=given.get("ca_file") or "",
            timeout=given.get("timeout") or 60.0,
            **paths,
        )


def _key(path: Path) -> str:
    """Return the API key in a file; raise `Skip` if the file cannot be used. The `Skip` never contains the key."""
    try:
        mode, data = path.stat().st_mode, path.read_bytes()
    except OSError as error:
        raise Skip(f"key_file: {path}: cannot be read: {error.strerror}") from None
    if mode & 0o004:
        raise Skip(f"key_file: {path}: any user can read it: chmod o-r {path}")
    text = data.decode("ascii", errors="replace").strip()
    if not re.fullmatch(r"[\x21-\x7e]{1,4096}", text):
        raise Skip(f"key_file: {path}: {len(data)} bytes, wanted one key on one line of printable ASCII")
    return text
