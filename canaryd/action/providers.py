"""The providers of `canaryd report --for`: a table, and a function for each that fills in what it takes."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from canaryd.action.handover import BLANK, Blank, Filled, Handover, Json, Perishable, perishable
from canaryd.dossier.advice import OTHER_VENDOR, VENDOR_STEPS
from canaryd.dossier.perishable import BUG_REPORT
from canaryd.facts import beginning, printable

LONGEST = 500
"""Characters of a description; no provider states a limit."""
AZURE = "https://management.azure.com/subscriptions/{subscriptionId}/providers/Microsoft.Impact/workloadImpacts"
AZURE_VERSION = "2025-01-01-preview"
MISSING = ("gpu-lost", "device-vanished", "keeps-vanishing")
"""Rules about a device that is gone."""
REASON = "CanarydHardwareFault"
MAKERS = {"cuda": "NVIDIA", "rocm": "AMD", "xpu": "Intel", "npu": "Huawei"}


class Provider(NamedTuple):
    """Somebody who takes reports."""

    title: str
    fill: Callable[[Handover], Filled]
    suspicion: bool = False
    """Whether it takes a suspicion too."""
    physical: bool = False
    """Whether it must be told which physical part it is."""


def azure(case: Handover) -> Filled:
    """Return Azure's Guest Health Reporting: a workload impact, which takes the machine out for repair."""
    document, machine = case.document, case.machine
    identity, lead = document["identity"], case.lead
    gone = any(rule in MISSING for rule in lead["rules"])
    # No category is about wrong results: this one asks a person to look.
    category = "ManualInvestigation" if case.wrong else "HpcMissingGpu" if gone else "HpcGenericFailure"
    details = {
        "PhysicalHostName": machine.physical_host or f"{BLANK}HOST",
        "Manufacturer": MAKERS.get(identity["backend"], ""),
        "SerialNumber": identity["serial"],
        "ModelNumber": identity["model"],
        "Location": identity["detail"].get("bus_id", ""),
    }
    body = {
        "properties": {
            "startDateTime": _utc(lead["since"]),
            "impactCategory": f"Resource.Hpc.Unhealthy.{category}",
            "impactDescription": _told(document),
            "impactedResourceId": machine.resource_id or f"{BLANK}RESOURCE_ID",
            "additionalProperties": {key: value for key, value in details.items() if value},
        }
    }
    name = f"canaryd-{hashlib.sha256(json.dumps(body).encode()).hexdigest()[:16]}-{int(document['generated'])}"
    where = "the node that hosts this machine, before it reboots: the key PhysicalHostName of Hyper-V's pool 3"
    how = "the machine's resource id: az vm show --query id --output tsv --resource-group GROUP --name NAME"
    blanks = [] if machine.physical_host else [Blank("HOST", where)]
    blanks += [] if machine.resource_id else [Blank("RESOURCE_ID", how)]
    url = f"{AZURE}/{name}?api-version={AZURE_VERSION}"
    return Filled(
        command=("az", "rest", "--method", "put", "--url", url, "--body"),
        body=body,
        blanks=tuple(blanks),
        notes=("az puts your subscription into the address; it must be on the allow list of Guest Health Reporting.",),
        evidence=(Perishable("physical host name", machine.physical_host, f"Write down {where}"),),
    )


def gcp(case: Handover) -> Filled:
    """Return Google's report of a faulty host."""
    document, machine = case.document, case.machine
    gpu = document["identity"]["backend"] in ("cuda", "rocm")
    kind = "SILENT_DATA_CORRUPTION" if case.wrong else "UNRECOVERABLE_GPU_ERROR" if gpu else "BEHAVIOR_UNSPECIFIED"
    said = _told(document).translate({ord(","): ";", ord("="): ":"})  # these separate the parts of the option
    name = (machine.node or document["identity"]["host"]).partition(".")[0]
    command = ["gcloud", "compute", "instances", "report-host-as-faulty", name]
    command += [f"--fault-reasons=behavior={kind},description={said}", "--disruption-schedule=IMMEDIATE"]
    command.append(f"--zone={machine.zone or f'{BLANK}ZONE'}")
    return Filled(
        command=tuple(command),
        blanks=() if machine.zone else (Blank("ZONE", f"the zone of {name}: gcloud compute instances list"),),
        notes=(
            "It stops this instance at once: drain it before. FUTURE instead of IMMEDIATE lets you choose the time.",
            "Google takes it for instances with a reservation alone.",
        ),
    )


def nico(case: Handover) -> Filled:
    """Return a health report for NVIDIA's Infra Controller; a suspicion keeps nobody from the machine."""
    document = case.document
    identity = document["identity"]
    alert = {
        "id": "FailedValidationTest",
        "target": identity["uuid"],
        "inAlertSince": _utc(case.lead["since"]),
        "message": _told(document),
        "classifications": ["PreventAllocations", "Hardware"] if case.confirmed else [],
    }
    address = f"$NICO_URL/v2/org/$NICO_ORG/nico/machine/{BLANK}MACHINE_ID/health-report"
    command = ["curl", "--fail-with-body", "--request", "PUT", address]
    command += ["--header", "Authorization: Bearer $NICO_TOKEN", "--header", "Content-Type: application/json", "--data"]
    server = identity["server"].get("product_serial", "") or identity["host"]
    return Filled(
        command=tuple(command),
        body={"source": "canaryd", "mode": "Merge", "successes": [], "alerts": [alert]},
        blanks=(Blank("MACHINE_ID", f"NICo's id of the machine with the serial number {server}"),),
        notes=(
            "NICO_URL, NICO_ORG and NICO_TOKEN are your credentials in the environment.",
            "After the repair remove it: curl --request DELETE on the same address followed by /canaryd",
        ),
    )


def eks(case: Handover) -> Filled:
    """Return the condition of a node that EKS's automatic node repair acts on."""
    document = case.document
    now = _utc(document["generated"])
    condition = {
        "type": "AcceleratedHardwareReady",
        "status": "False",
        "reason": REASON,
        "message": _told(document),
        "lastHeartbeatTime": now,
        "lastTransitionTime": now,
    }
    override = {
        "nodeMonitoringCondition": "AcceleratedHardwareReady",
        "nodeUnhealthyReason": REASON,
        "minRepairWaitTimeMins": 10,
        "repairAction": "Replace",
    }
    node = case.machine.node or document["identity"]["host"]
    command = ("kubectl", "patch", "node", node, "--subresource=status", "--type=strategic", "--patch")
    return Filled(
        command=command,
        body={"status": {"conditions": [condition]}},
        notes=(
            "Automatic repair replaces the node about 10 minutes later: drain it before.",
            f"To choose another action, add to nodeRepairConfigOverrides: {json.dumps(override)}",
            "EKS's own monitoring agent may set the condition back.",
        ),
    )


def vendor(case: Handover) -> Filled:
    """Return the list of what a return to the vendor asks for, with what is done."""
    document = case.document
    identity = document["identity"]
    machine = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in identity["server"].items())
    known = (("Part", identity["model"]), ("Serial number", identity["serial"]), ("UUID", identity["uuid"]))
    firmware = [(name.upper(), identity["detail"].get(name, "")) for name in ("vbios", "driver", "bus_id")]
    lines = [f"{name}: {value}" for name, value in (*known, *firmware, ("Machine", machine)) if value]
    lines += [f"Fault: {_told(document)}", f"[x] Evidence, operands and script to repeat it: {case.place}.tar.gz"]
    if identity["backend"] == "cuda":
        taken = next((each.taken for each in perishable(case) if each.what == "bug report of the driver"), "")
        tests = [f"{t['tool']} {t['test']}: {t['result']}" for t in document["selftests"]]
        lines += [
            f"{_box(taken)} nvidia-bug-report right after the fault: {taken or 'nvidia-bug-report.sh, as root'}",
            f"[ ] nvidia-bug-report again after a power cycle: nvidia-bug-report.sh --output-file after-{BUG_REPORT}",
            f"{_box(tests)} Logs of the diagnostic: {'; '.join(tests) or 'dcgmi diag -r 4, or the Field Diagnostic'}",
            *_eliminated(document),
        ]
    else:
        lines += [f"[ ] {step}" for step in VENDOR_STEPS.get(identity["backend"], OTHER_VENDOR)]
    return Filled(lines=tuple(lines))


def _eliminated(document: Json) -> list[str]:
    """Return NVIDIA's "common system-level causes": software by what canaryd knows, the rest for a person to do."""
    right = [p["name"] for p in document["peers"] if p["same_stack"] and p["same_bytes"] and not p["same_bytes_wrong"]]
    software = f"the same operands are right on {', '.join(right)} with the same software" if right else ""
    return [
        "System-level causes eliminated (write what you did and saw):",
        f"{_box(software)} Software: {software or 'repeat the test on another part with the same software'}",
        "[ ] Reseated the part and its cables, and tested again:",
        "[ ] Swapped it with a sound part of another slot (does the fault follow the part?):",
        "[ ] Power supplies and cooling show no event in the event log of the BMC:",
        "[ ] Firmware and driver are of a supported release:",
    ]


def _box(done: object) -> str:
    return "[x]" if done else "[ ]"


def _told(document: Json) -> str:
    return beginning(printable(document["summary"]), LONGEST)


def _utc(at: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))


PROVIDERS: Mapping[str, Provider] = {
    "azure": Provider("Azure (Guest Health Reporting)", azure),
    "gcp": Provider("Google Cloud (report a host as faulty)", gcp),
    "nico": Provider("NVIDIA Infra Controller (health report)", nico, suspicion=True),
    "eks": Provider("Amazon EKS (node repair)", eks),
    "vendor": Provider("the vendor (return of a part)", vendor, physical=True),
}
