"""The settings of an endpoint canary, checked as a whole."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from canaryd.probe import Skip
from canaryd.worker.endpoint.dialects import DIALECTS

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
    """The directory of a served exact canary, as `canaryd canary export` wrote it."""
    command: str = ""
    """What starts the server at level deep; "" where it runs by itself."""
    memory: int = 0
    """Bytes that a started server may use; 0 for a share of the host's."""
    key: str = field(default="", repr=False)
    ca_file: str = ""
    timeout: float = 60.0
    """Seconds per request."""

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Settings:
        """Return settings from plain data, where None and "" mean not set; raise `Skip` with all mistakes at once."""
        problems = []
        texts = {name: given.get(name) or "" for name in ("url", "model", "dialect", "command", *_FILES)}
        for name, value in texts.items():
            if not isinstance(value, str):
                problems.append(f"{name}: got {type(value).__name__}, wanted a text")
            elif name in _FILES and value and not value.startswith("/"):
                problems.append(f"{name}: got {value!r:.200}, wanted an absolute path")
        if not texts["url"]:
            problems.append('url: not set, wanted e.g. "http://127.0.0.1:8000/v1"')
        if isinstance(texts["dialect"], str) and texts["dialect"] and texts["dialect"] not in DIALECTS:
            problems.append(f"dialect: got {texts['dialect']!r:.200}, wanted one of {', '.join(DIALECTS)}")
        apis = given.get("apis") or APIS
        if not isinstance(apis, (list, tuple)) or not set(map(str, apis)) <= set(APIS):
            problems.append(f"apis: got {apis!r:.200}, wanted a list of {', '.join(APIS)}")
        timeout = given.get("timeout") or 60.0
        if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 < timeout <= 86400:
            problems.append(f"timeout: got {timeout!r:.200}, wanted seconds from above 0 to 86400")
        if problems:
            raise Skip("; ".join(problems))
        return cls(
            url=texts["url"].rstrip("/"),
            model=texts["model"],
            dialect=texts["dialect"],
            apis=tuple(apis),
            directory=Path(texts["directory"]) if texts["directory"] else None,
            prompts=Path(texts["prompts"]) if texts["prompts"] else None,
            exact=Path(texts["exact"]) if texts["exact"] else None,
            command=texts["command"],
            memory=int(given.get("memory") or 0),
            key=_key(Path(texts["key_file"])) if texts["key_file"] else "",
            ca_file=texts["ca_file"],
            timeout=float(timeout),
        )


_FILES = ("directory", "prompts", "exact", "key_file", "ca_file")


def _key(path: Path) -> str:
    """Return the API key in a file; raise `Skip`, never with the key, where it cannot be used."""
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
