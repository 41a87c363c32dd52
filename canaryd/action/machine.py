"""What a provider asks about a machine, from files and variables whose place is documented; no network is asked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CLOUD_INIT = "run/cloud-init/instance-data.json"
"""What cloud-init knows of the instance (docs.cloud-init.io, "Instance metadata")."""
KVP_POOL = "var/lib/hyperv/.kvp_pool_3"
"""What Hyper-V tells its guest: records of a key and a value (tools/hv/hv_kvp_daemon.c of Linux)."""
KVP_KEY, KVP_VALUE = 512, 2048
"""Bytes of a key and of a value in that file, filled up with zeros."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Facts about a machine; "" for what is not known here."""

    node: str = ""
    """Name of the node in Kubernetes, or of the instance."""
    zone: str = ""
    resource_id: str = ""
    """Azure's id of the virtual machine."""
    physical_host: str = ""
    """Azure's name of the physical machine; another one after a redeployment."""


def read(root: Path, environ: Mapping[str, str]) -> Machine:
    """Return what is known of this machine. `root`: the directory that stands for /."""
    try:
        told = json.loads((root / CLOUD_INIT).read_bytes())
    except (OSError, ValueError):
        told = None  # no cloud-init: nothing is known
    standard, compute = _part(told, "v1"), _part(told, "ds", "meta_data", "imds", "compute")
    return Machine(
        node=environ.get("NODE_NAME", "") or str(standard.get("local_hostname") or ""),
        zone=environ.get("CLOUDSDK_COMPUTE_ZONE", "") or str(standard.get("availability_zone") or ""),
        resource_id=str(compute.get("resourceId") or ""),
        physical_host=_kvp(root / KVP_POOL).get("PhysicalHostName", ""),
    )


def _part(told: object, *names: str) -> Mapping[str, Any]:
    """Return the object that lies at these names, or {} if something else does."""
    for name in names:
        told = told.get(name) if isinstance(told, Mapping) else None
    return told if isinstance(told, Mapping) else {}


def _kvp(path: Path) -> dict[str, str]:
    try:
        data = path.read_bytes()
    except OSError:
        return {}
    starts = range(0, len(data) - KVP_KEY, KVP_KEY + KVP_VALUE)
    records = [(data[at : at + KVP_KEY], data[at + KVP_KEY : at + KVP_KEY + KVP_VALUE]) for at in starts]
    return {_text(key): _text(value) for key, value in records}


def _text(padded: bytes) -> str:
    return padded.partition(b"\0")[0].decode("utf-8", "replace")
