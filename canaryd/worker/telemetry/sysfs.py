"""Readers of /sys that several vendors' modules use: one small file at a time; every failure becomes a reason.

The files have the kernel's units (Documentation/ABI/testing/sysfs-bus-pci, Documentation/hwmon/sysfs-interface.rst);
the readers return base units.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

from canaryd.facts import Reading, reading_key
from canaryd.probe import Absent


class Unreadable(Exception):
    """Raised if a value could not be read; the text is the reason for people, `code` is the driver's error code."""

    def __init__(self, reason: str, code: int = 0) -> None:
        super().__init__(reason)
        self.code = code


class Denied(Unreadable):
    """Raised if the user of this process may not read the file."""


Fact = Reading | Absent
_GENERATIONS = {"2.5": 1, "5.0": 2, "5": 2, "8.0": 3, "8": 3, "16.0": 4, "32.0": 5, "64.0": 6, "128.0": 7}
"""GT/s → PCI Express generation (the PCI Express Base Specifications 1.0 to 7.0)."""
_WIDTHS = (1, 2, 4, 8, 12, 16, 32)
"""Possible numbers of lanes of a link. The kernel writes 0 or 255 if the number is unknown."""
_NATURAL = re.compile(r"(\d+)")


def only(settings: Mapping[str, Any], probe: str, *names: str) -> None:
    """Raise `ValueError` if a setting of the probe has a name that is not in `names`."""
    if unknown := sorted(set(settings) - set(names)):
        raise ValueError(f"{unknown[0]}: {probe} has no such setting; it has {', '.join(sorted(names))}")


def path_setting(settings: Mapping[str, Any], name: str, default: str) -> Path:
    """Return the setting `name`, an absolute path, or else `default`; raise `ValueError` for any other value."""
    given = settings.get(name, default)
    if not isinstance(given, str) or not given.startswith("/") or "\0" in given:
        raise ValueError(f"{name}: got {given!r}, wanted an absolute path such as {default!r}")
    return Path(given)


def read_bytes(path: Path) -> bytes:
    """Return a file's bytes; raise `Unreadable` with the reason if it cannot be read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise unreadable(error, path) from None
    try:
        parts = []
        while part := os.read(descriptor, 1 << 16):
            parts.append(part)
        return b"".join(parts)
    except OSError as error:
        raise unreadable(error, path) from None
    finally:
        os.close(descriptor)


def read_text(path: Path) -> str:
    """Return a file's text without surrounding blanks; raise `Unreadable` if it cannot be read or is empty."""
    text = read_bytes(path).decode(errors="replace").strip("\0 \t\r\n")
    if not text:
        raise Unreadable(f"{path} is empty")
    return text


def read_int(path: Path) -> int:
    """Return the whole number in a file, decimal or hexadecimal after 0x; raise `Unreadable` for any other content."""
    text = read_text(path)
    if re.fullmatch(r"[+-]?[0-9]{1,20}", text):
        return int(text)
    if re.fullmatch(r"0x[0-9a-fA-F]{1,16}", text):
        return int(text, 16)
    raise Unreadable(f"{path} holds {text[:40]!r}, not a number")


def read_count(path: Path) -> int:
    """Return the number in a file; raise `Unreadable` if it is negative or cannot be read."""
    number = read_int(path)
    if number < 0:
        raise Unreadable(f"{path} holds {number}, not a count")
    return number


def entries(directory: Path, pattern: str = "*") -> list[Path]:
    """Return a directory's matching entries in natural order (mc2, mc10); raise `Unreadable` if it cannot be listed."""
    try:
        found = [path for path in directory.iterdir() if fnmatchcase(path.name, pattern)]
    except OSError as error:
        raise unreadable(error, directory) from None
    return sorted(found, key=lambda path: [s.zfill(20) if s.isdigit() else s for s in _NATURAL.split(path.name)])


def optional_text(path: Path) -> str:
    """Return a file's text, or "" if it cannot be read; used for names and labels, which are not essential."""
    try:
        return read_text(path)
    except Unreadable:
        return ""


def optional_entries(directory: Path, pattern: str) -> list[Path]:
    """Return the matching entries of a directory, or [] if it cannot be listed."""
    try:
        return entries(directory, pattern)
    except Unreadable:
        return []


def unreadable(error: OSError, path: Path) -> Unreadable:
    """Return the system's error as an `Unreadable` with a short reason."""
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return Unreadable(f"not offered by this kernel or device: no {path}")
    if error.errno in (errno.EACCES, errno.EPERM):
        return Denied(f"permission denied: run as root to read {path}")
    return Unreadable(f"{path}: {error.strerror or error}")


def attempt(name: str, read: Callable[[], float], unit: str = "1", /, **labels: str) -> Fact:
    """Return a reading with the value of `read()`, or `Absent` with the reason of the `Unreadable` that it raised."""
    try:
        return Reading(name=name, value=read(), unit=unit, labels=labels)
    except Unreadable as error:
        return Absent(name=reading_key(name, labels), reason=str(error), code=error.code)


def line(path: Path, pattern: str) -> str:
    """Return the first group of a regular expression in a file; raise `Unreadable` if no line matches."""
    if found := re.search(pattern, read_text(path), re.MULTILINE):
        return found[1]
    raise Unreadable(f"{path} has no line of the form {pattern}")


def percent(path: Path) -> float:
    """Return a file's percentage as a ratio."""
    if (number := read_count(path)) > 100:
        raise Unreadable(f"{path} holds {number}, not a percentage")
    return number / 100


def aer(root: Path, bus_id: str) -> Iterator[Fact]:
    """Yield the PCI Express errors of a function by severity, since boot or since the device appeared on the bus.

    They are the kernel's own totals (Documentation/ABI/testing/sysfs-bus-pci-devices-aer_stats).
    """
    function = root / "bus/pci/devices" / bus_id
    for severity, total in (("correctable", "COR"), ("nonfatal", "NONFATAL"), ("fatal", "FATAL")):
        read = partial(_aer_total, function / f"aer_dev_{severity}", total)
        yield attempt("pcie_aer_errors_total", read, severity=severity)


def _aer_total(path: Path, name: str) -> int:
    return int(line(path, rf"^TOTAL_ERR_{name}[ \t]+([0-9]{{1,20}})$"))


def pcie(root: Path, bus_id: str) -> Iterator[Fact]:
    """Yield generation and width of a function's link: the present ones, and the highest that device and port allow."""
    function = root / "bus/pci/devices" / bus_id
    for name, measure, file in (("generation", _generation, "link_speed"), ("width", _width, "link_width")):
        yield attempt(f"pcie_{name}", partial(measure, function / f"current_{file}"))
        yield attempt(f"pcie_{name}_max", partial(_both, measure, function, f"max_{file}"))


def _both(measure: Callable[[Path], int], function: Path, name: str) -> int:
    """Return the smaller of the limits of a function and of its port: a narrow slot is not a fault of the device."""
    own = measure(function / name)
    try:
        return min(own, measure(function.resolve().parent / name))
    except Unreadable:  # a function without a port above it, or a port that does not give its limits
        return own


def _generation(path: Path) -> int:
    text = read_text(path)
    generation = _GENERATIONS.get(text.partition(" GT/s")[0]) if " GT/s" in text else None
    if generation is None:
        raise Unreadable(f"not a speed of PCI Express: {text[:40]!r}")
    return generation


def _width(path: Path) -> int:
    lanes = read_int(path)
    if lanes not in _WIDTHS:
        raise Unreadable(f"not a width of PCI Express: {lanes}")
    return lanes


def hwmon(root: Path, device_path: Path | str) -> Iterator[Fact]:
    """Yield temperatures, their thresholds, fans and power from a device's own hwmon chips.

    `device_path` is the device's directory below `root`, e.g. "bus/pci/devices/0000:65:00.0". A sensor's name is the
    chip's label ("edge"), or "temp1" without one; its thresholds are "edge_crit" and "edge_max".
    """
    reason = "no hwmon chip of the device gives it"
    found = set()
    try:
        for chip in entries(root / device_path / "hwmon", "hwmon*"):
            for fact in _chip(chip, with_power="power_watts" not in found):
                found.add(fact.name.partition("{")[0])
                yield fact
    except Unreadable as error:
        reason = str(error)
    for name in ("temperature_celsius", "temperature_threshold_celsius", "fan_rpm", "power_watts"):
        if name not in found:
            yield Absent(name=name, reason=reason)


def _chip(chip: Path, *, with_power: bool) -> Iterator[Fact]:
    for path, sensor in inputs(chip, "temp"):
        yield attempt("temperature_celsius", partial(celsius, path), "celsius", sensor=sensor)
        yield from thresholds(path, sensor, "crit", "max")
    for path, fan in inputs(chip, "fan"):
        yield attempt("fan_rpm", partial(rpm, path), fan=fan)
    # A chip gives average power, momentary power, or both; the first rail is the whole device.
    power = next((path for path in (chip / "power1_average", chip / "power1_input") if path.exists()), None)
    if with_power and power is not None:
        yield attempt("power_watts", lambda: read_count(power) * 1e-6, "watts")


def thresholds(path: Path, sensor: str, *limits: str) -> Iterator[Fact]:
    """Yield a reading for each threshold in `limits` for which a file exists beside the sensor's input file."""
    for limit in limits:
        file = path.with_name(path.name.replace("_input", f"_{limit}"))
        if file != path and file.exists():
            name = f"{sensor}_{limit}"
            yield attempt("temperature_threshold_celsius", partial(celsius, file), "celsius", threshold=name)


def inputs(chip: Path, kind: str) -> Iterator[tuple[Path, str]]:
    """Yield (file, label) for the `<kind>N_input` files of a hwmon chip; the label is `<kind>N` if it is not unique.

    Raises `Unreadable` if the chip cannot be listed.
    """
    paths = entries(chip, f"{kind}[0-9]*_input")
    stems = [path.name.removesuffix("_input") for path in paths]
    names = [(" ".join(optional_text(chip / f"{stem}_label").split())[:40], stem) for stem in stems]
    yield from zip(paths, unique(names), strict=True)


def unique(names: Sequence[tuple[str, str]]) -> list[str]:
    """Return the label of each (label, file name) pair, followed by the file name if the label is not unique."""
    labels = [label for label, _ in names]
    return [label if label and labels.count(label) == 1 else f"{label} {file}".strip() for label, file in names]


def celsius(path: Path) -> float:
    """Return the temperature in a file of millidegrees, in degrees Celsius.

    Raises `Unreadable` if the chip reports a fault of the sensor, and for temperatures that no silicon survives: chips
    give them for unconnected sensors and for thresholds that are not set, e.g. NVMe 65261.85.
    """
    _no_fault(path)
    degrees = read_int(path) / 1000
    if not -60 <= degrees <= 150:
        raise Unreadable(f"{path} gives {degrees:g} degrees: not connected or not set")
    return degrees


def rpm(path: Path) -> int:
    """Return a fan's revolutions per minute; raise `Unreadable` if the chip reports a fault of the fan."""
    _no_fault(path)
    return read_count(path)


def _no_fault(path: Path) -> None:
    if path.name.endswith("_input"):
        try:
            fault = read_int(path.with_name(path.name.replace("_input", "_fault")))
        except Unreadable:
            return  # most chips have no such file
        if fault:
            raise Unreadable(f"{path}: the chip reports a fault of this sensor")
