"""What a finding points to, and what its remedy reaches: for every rule from cause, company and kind of signal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from canaryd.judge.case import Case
from canaryd.judge.findings import DEPARTED
from canaryd.judge.incidents import WRONG
from canaryd.judge.laws import POWER_AND_PCIE
from canaryd.judge.telemetry.signals import is_in_hive
from canaryd.model import Cause, Device, Finding, Part, Remedy, Shown, State, Suspect, Whose

IN_DOUBT = ("host-in-doubt", "golden-in-doubt")
"""Rules by which the host's CPU is in doubt beside an accelerator."""
BLAMELESS = (Cause.NONE, Cause.HARNESS)
ANY_PART = (*POWER_AND_PCIE, Part.FABRIC, Part.DRIVER)
"""The shared parts that may be at fault where `PARTS` says nothing else."""
PARTS: Mapping[str, tuple[Part, ...]] = {
    **dict.fromkeys(WRONG, (Part.MEMORY, *POWER_AND_PCIE, Part.DRIVER)),
    "gpu-lost": (*POWER_AND_PCIE, Part.COOLING),
    "keeps-vanishing": (*POWER_AND_PCIE, Part.DRIVER),
    "pcie-aer": POWER_AND_PCIE,
    "vendor-selftest": (Part.SUPPLY, Part.COOLING, Part.DRIVER),
}
"""Rule → the shared parts that can give such trouble to several devices."""
BEFORE_AMPERE = ("pascal", "volta", "turing")
"""Architectures whose GPUs are reset together if NVLinks connect them (nvidia-smi(1), --gpu-reset)."""


def pointed(case: Case, finding: Finding) -> Finding:
    """Return the finding with its subject, the shared parts that may be at fault, and what its remedy reaches."""
    subject, device = _subject(case, finding), case.device
    others, parts = set[str](), tuple[Part, ...]()
    if subject is Whose.SHARED:
        others, parts = {*finding.shared_by, *_beside(finding)}, finding.parts or PARTS.get(finding.rule, ANY_PART)
        parts = tuple(p for part in parts if (p := _of_vendor(part, device)))
    elif subject is Whose.HOST:
        others = {other.name for uuid, other in case.devices.items() if _errs_with_the_host(case, uuid)}
    shared_by = _in_order({*others, device.name}) if others else ()
    found = replace(finding, subject=subject, parts=parts, shared_by=shared_by)
    return replace(found, reach=_reach(case, found))


def _of_vendor(part: Part, device: Device) -> Part | None:
    """Return the part under its vendor's name; None for a fabric that a device cannot have."""
    return {"cuda": Part.FABRIC, "rocm": Part.HIVE}.get(device.backend) if part is Part.FABRIC else part


def _in_order(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(names, key=lambda name: (len(name), name)))


def _subject(case: Case, finding: Finding) -> Whose | None:
    if not case.device.is_hardware or finding.rule == DEPARTED:
        return Whose.ENDPOINT
    if _is_hosts(case, finding):
        return Whose.HOST
    if finding.cause in BLAMELESS:
        return None
    if finding.cause is Cause.SOFTWARE:
        return Whose.SOFTWARE
    if finding.cause is Cause.HARDWARE and finding.subject is not None:  # it was asked who else had it
        return Whose.DEVICE
    is_shared = _beside(finding) or (finding.parts and finding.subject is None)
    return Whose.SHARED if is_shared else finding.subject or Whose.DEVICE


def _is_hosts(case: Case, finding: Finding) -> bool:
    """Return whether it is the host's. A processor's is, unless the host would be another explanation beside it."""
    if case.is_cpu:
        return finding.cause not in BLAMELESS and not any(rival.what is Suspect.HOST for rival in finding.rivals)
    return finding.rule in IN_DOUBT or (_is_open(finding) and _errs_with_the_host(case, case.device.uuid))


def _is_open(finding: Finding) -> bool:
    """Return whether a finding is about wrong results whose cause is not known."""
    return finding.rule in WRONG and finding.cause is Cause.UNDETERMINED


def _errs_with_the_host(case: Case, uuid: str) -> bool:
    return any(case.host_in_doubt(mismatch.run) for mismatch in case.node.missed[uuid])


def _beside(finding: Finding) -> Iterable[str]:
    """Return the names of the devices whose wrong results began with these."""
    together = (r.by for r in finding.rivals if r.shown is Shown.TOGETHER and not r.rejected and _is_open(finding))
    return {name for names in together for name in names}


def _reach(case: Case, found: Finding) -> tuple[str, ...]:
    """Return the names of all devices that the remedy reaches, or () if there is nothing to do."""
    device, is_faulty = case.device, found.state is State.FAULTY
    if not (found.action or is_faulty):
        return ()
    remedy = Remedy.DRIVER if found.subject is Whose.SOFTWARE and found.rule in WRONG else found.remedy
    # A processor goes out of service with its node.
    remedy = Remedy.REBOOT if case.is_cpu and is_faulty else remedy
    others = (o for o in case.devices.values() if remedy and o.is_hardware and _goes_with(device, o, found, remedy))
    return _in_order({device.name, *(other.name for other in others)})


def _goes_with(device: Device, other: Device, found: Finding, remedy: Remedy) -> bool:
    """Return whether a remedy for a device reaches another one of its host."""
    if remedy is Remedy.REBOOT or other.part == device.part:
        return other.is_whole or remedy is not Remedy.REBOOT
    alike = (remedy is Remedy.DRIVER or Part.FABRIC in found.parts) and other.backend == device.backend
    both = alike or any(all(map(is_so, (device, other))) for is_so in (is_in_hive, _is_linked))
    return other.name in found.shared_by or (both and other.is_whole)


def _is_linked(device: Device) -> bool:
    return device.detail.get("architecture") in BEFORE_AMPERE and device.detail.get("nvlinks", "0") != "0"
