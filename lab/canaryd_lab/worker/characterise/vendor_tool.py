"""The values that the vendor's own tool reports, under canaryd's names."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from typing import Any

from canaryd.probe import Skip
from canaryd.worker.telemetry.command import output
from canaryd.worker.telemetry.sysfs import Unreadable
from canaryd_lab.worker.characterise.bench import Bench

PATIENCE = 8.0
"""Seconds to wait for the tool's answer."""


@dataclass(frozen=True)
class Field:
    """One field of nvidia-smi, and its conversion to a reading of canaryd."""

    query: str
    reading: str
    factor: float = 1.0
    """Number by which the tool's value is multiplied to get the reading's unit."""
    tolerance: float = 0.0
    """Largest difference, in the reading's unit, between two reads a second apart (ours)."""


FIELDS = (
    # Names: nvidia-smi --help-query-gpu. What cannot change within a second has no tolerance.
    Field("temperature.gpu", "temperature_celsius{sensor=core}", 1, 5),
    Field("temperature.memory", "temperature_celsius{sensor=memory}", 1, 5),
    Field("power.draw", "power_watts", 1, 100),
    Field("enforced.power.limit", "power_limit_watts{limit=enforced}", 1, 0.01),
    Field("power.default_limit", "power_limit_watts{limit=default}", 1, 0.01),
    Field("power.min_limit", "power_limit_watts{limit=min}", 1, 0.01),
    Field("power.max_limit", "power_limit_watts{limit=max}", 1, 0.01),
    Field("memory.total", "memory_total_bytes", 1 << 20, 1 << 20),
    Field("memory.used", "memory_used_bytes", 1 << 20, 1 << 30),
    Field("pcie.link.gen.max", "pcie_generation_max"),
    Field("pcie.link.width.current", "pcie_width"),
    Field("pcie.link.width.max", "pcie_width_max"),
    Field("ecc.errors.corrected.volatile.dram", "ecc_errors_total{kind=corrected,location=dram}"),
    Field("ecc.errors.uncorrected.volatile.dram", "ecc_errors_total{kind=uncorrected,location=dram}"),
    Field("ecc.errors.corrected.volatile.sram", "ecc_errors_total{kind=corrected,location=sram}"),
    Field("ecc.errors.uncorrected.volatile.sram", "ecc_errors_total{kind=uncorrected,location=sram}"),
    Field("ecc.errors.corrected.aggregate.dram", "ecc_aggregate_errors_total{kind=corrected,location=dram}"),
    Field("ecc.errors.uncorrected.aggregate.dram", "ecc_aggregate_errors_total{kind=uncorrected,location=dram}"),
)
WITHOUT = ("[N/A]", "[Not Supported]", "N/A", "[Unknown Error]", "")
"""Texts that the tool prints in place of a value that it does not have."""


def parse(names: list[str], line: str) -> dict[str, dict[str, Any]]:
    """Return reading → {value, tolerance, field of the tool}, from one line of CSV with the fields `names`."""
    cells = [cell.strip() for cell in next(csv.reader([line]))]
    known = {field.query: field for field in FIELDS}
    found = {}
    for name, cell in zip(names, cells, strict=True):
        if cell in WITHOUT:
            continue
        field = known[name]
        value = float(cell) * field.factor
        found[field.reading] = {"value": value, "tolerance": field.tolerance, "field": f"nvidia-smi {name}"}
    return found


def vendor_tool(bench: Bench) -> None:
    """Ask nvidia-smi for all fields at once, or one by one if it does not know some; record the values."""
    device = bench.device
    base = ["nvidia-smi", f"--id={device.parent or device.uuid}", "--format=csv,noheader,nounits"]
    found: dict[str, dict[str, Any]] = {}
    unknown: list[str] = []
    names = [field.query for field in FIELDS]
    try:
        found = parse(names, output([*base, f"--query-gpu={','.join(names)}"], PATIENCE))
    except (Unreadable, ValueError) as first:
        for name in names:
            try:
                found |= parse([name], output([*base, f"--query-gpu={name}"], PATIENCE))
            except (Unreadable, ValueError):
                unknown.append(name)
        if not found:
            raise Skip(str(first)) from first
    bench.facts["fields"] = found
    bench.facts["unknown_to_the_tool"] = unknown
