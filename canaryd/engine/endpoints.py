"""Serving endpoints as devices: those in the configuration are tested, judged and shown like other devices."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Collection, Iterable, Mapping
from typing import Any
from urllib.parse import urlsplit

from canaryd.config.settings import Config, EndpointConfig
from canaryd.model import ENDPOINT, TORCH, Device


def listed(config: Config, devices: Collection[Device]) -> list[Device]:
    """Return the configured endpoints as devices. Each of them names those of `devices` that serve it."""
    return [
        Device(
            uuid=f"{ENDPOINT}:{name}",
            backend=ENDPOINT,
            index=number,
            model=endpoint.model or "default",
            weak_identity=True,
            detail={
                "url": endpoint.url,
                "behind": " ".join(d.name for d in behind(endpoint, devices)),
                **({"exact": str(endpoint.exact)} if endpoint.exact else {}),
            },
        )
        for number, (name, endpoint) in enumerate(named(config).items())
    ]


def named(config: Config) -> Mapping[str, EndpointConfig]:
    """Return the configured endpoints by name; a section without a URL is left out."""
    return {name: endpoint for name, endpoint in config.endpoints.each.items() if endpoint.url}


def behind(endpoint: EndpointConfig, devices: Iterable[Device]) -> list[Device]:
    """Return the devices that serve an endpoint: those named in its settings, else all accelerators, else the CPU.

    A server on another host uses no device of this host, unless its settings name one.
    """
    every = [d for d in devices if d.computes_here]
    parts = [d for d in every if d.runtime == TORCH]  # one part of this host is one device here
    if endpoint.devices:
        return [d for d in every if {d.uuid, d.name, d.backend} & set(endpoint.devices)]
    if not _here(endpoint.url):
        return []
    return [d for d in parts if d.backend != "cpu"] or parts


def parts(config: Config, name: str, devices: Iterable[Device]) -> tuple[str, ...]:
    """Return the uuids of a configured endpoint and of the devices that serve it."""
    return f"{ENDPOINT}:{name}", *(d.uuid for d in behind(named(config)[name], devices))


def models(config: Config, device: Device, devices: Collection[Device]) -> dict[str, int]:
    """Return model directory → number of devices that share the model, for the endpoints that a device serves.

    An endpoint without a directory adds none.
    """
    served = [(e, behind(e, devices)) for e in named(config).values() if e.directory and e.directory.suffix != ".gguf"]
    return {str(e.directory): len(sharing) for e, sharing in served if device in sharing}


def _here(url: str) -> bool:
    """Return whether an address belongs to this host: a loopback address, or the host's name."""
    host = (urlsplit(url).hostname or "").lower()
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        names = {"localhost", socket.gethostname().lower()}
        return host in names or host.partition(".")[0] in names - {"localhost"}


def settings(endpoint: EndpointConfig) -> dict[str, Any]:
    """Return the settings that an endpoint's probe gets: paths as text, and "" for a text that is not set."""
    return {
        "url": endpoint.url,
        "model": endpoint.model or "",
        "directory": str(endpoint.directory or ""),
        "prompts": str(endpoint.prompts or ""),
        "exact": str(endpoint.exact or ""),
        "apis": list(endpoint.apis),
        "dialect": endpoint.dialect or "",
        "repeats": endpoint.repeats or "",
        "key_file": str(endpoint.key_file or ""),
        "ca_file": str(endpoint.ca_file or ""),
        "timeout": endpoint.timeout,
    }
