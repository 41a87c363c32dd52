"""`canaryd report --for`: each provider's published shape, what is named first, and what is refused."""

from __future__ import annotations

import json
import re
import shlex
import time
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest

from canaryd.action import handover, machine
from canaryd.action.machine import Machine
from canaryd.action.providers import PROVIDERS
from canaryd.dossier.perishable import BUG_REPORT
from canaryd.model import Cause, Finding, State
from canaryd.store.store import Store
from tests.command import canaryd
from tests.dossier.conftest import store as store  # noqa: PLC0414  a fixture
from tests.dossier.made import GPU, HOUR, NOW, PEER, PROCESSOR, SERIAL, UUID, run, verdict, written
from tests.worker.telemetry.trees import plant

PUBLISHED = Path(__file__).parent / "published"
VM = "/subscriptions/0f0f/resourceGroups/serving/providers/Microsoft.Compute/virtualMachines/node-12"
KNOWN = Machine(node="node-12.c.project.internal", zone="us-west2-c", resource_id=VM, physical_host="GGBB90904476")


def made(store, tmp_path, here=KNOWN, **changed):
    """Write the dossier of the faulty GPU, and return it as a case."""
    if changed:
        store.set_verdict(verdict(**changed))
    path, document, _ = written(store, tmp_path)
    return handover.Handover(document=document, place=str(path), machine=here)


def checked(provider: str, value: object) -> None:
    schema = json.loads((PUBLISHED / f"{provider}.schema.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(value)


def command(provider: str, case) -> list[str]:
    """Return the words that a shell makes of the command, which is all that is no comment."""
    text = handover.text(PROVIDERS[provider].title, case, PROVIDERS[provider].fill(case))
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert len(lines) == 1
    return shlex.split(lines[0])


@pytest.mark.parametrize("told", ["[]", '{"v1": "x", "ds": {"meta_data": {"imds": {"compute": null}}}}', '{"ds": 3}'])
def test_a_file_of_another_shape_tells_nothing(tmp_path, told):
    """cloud-init's file is written by others."""
    path = tmp_path / machine.CLOUD_INIT
    path.parent.mkdir(parents=True)
    path.write_text(told)
    assert machine.read(tmp_path, {}) == Machine()


@pytest.mark.parametrize("here", [KNOWN, Machine()], ids=["known", "blank"])
def test_each_command_has_the_published_shape(store, tmp_path, here):
    """Also where facts are missing: a blank stands for each, is named in the comments, and nothing else is left."""
    case = made(store, tmp_path, here)
    words = {name: command(name, case) for name in ("azure", "gcp", "nico", "eks")}
    body = json.loads(words["azure"][-1])
    checked("azure", {"url": words["azure"][words["azure"].index("--url") + 1], "body": body})
    assert body["properties"]["impactCategory"].endswith(".ManualInvestigation")
    assert body["properties"]["additionalProperties"]["SerialNumber"] == SERIAL
    checked("gcp", words["gcp"])
    assert "behavior=SILENT_DATA_CORRUPTION" in words["gcp"][5]
    (address,) = [word for word in words["nico"] if "/v2/" in word]
    checked("nico", {"url": address, "body": json.loads(words["nico"][-1])})
    assert json.loads(words["nico"][-1])["alerts"][0]["classifications"] == ["PreventAllocations", "Hardware"]
    checked("eks", json.loads(words["eks"][-1]))
    for name, typed in words.items():
        form = PROVIDERS[name].fill(case)
        left = set(re.findall(rf"{handover.BLANK}(\w+)", " ".join(typed)))
        assert left == {blank.word for blank in form.blanks}
        assert left <= {"MACHINE_ID"} or here == Machine()


def test_a_device_that_is_gone_is_missing_and_not_silently_wrong(store, tmp_path):
    """The categories follow the incident."""
    lost = Finding(rule="gpu-lost", state=State.FAULTY, cause=Cause.HARDWARE, message="lost again", since=NOW - HOUR)
    case = made(store, tmp_path, findings=(lost,))
    properties = json.loads(command("azure", case)[-1])["properties"]
    assert (properties["impactCategory"].rpartition(".")[2], properties["startDateTime"]) == (
        "HpcMissingGpu",
        time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(NOW - HOUR)),
    )
    assert "behavior=UNRECOVERABLE_GPU_ERROR" in command("gcp", case)[5]


def test_the_list_for_the_vendor_has_all_that_a_return_asks_for(store, tmp_path):
    """What is done is marked, with its evidence; the rest is to do."""
    case = made(store, tmp_path)
    text = handover.text("the vendor", case, PROVIDERS["vendor"].fill(case))
    for asked in json.loads((PUBLISHED / "vendor.json").read_text())["asked"]:
        assert asked in text
    assert SERIAL in text
    assert f"[x] Evidence, operands and script to repeat it: {case.place}.tar.gz" in text
    assert "[x] Software: the same operands are right on cuda:4 with the same software" in text
    assert "[ ] nvidia-bug-report right after the fault: nvidia-bug-report.sh, as root" in text
    has = {**case.document, "contents": [{"file": BUG_REPORT, "what": ""}]}
    took = handover.text(
        "the vendor", replace(case, document=has), PROVIDERS["vendor"].fill(replace(case, document=has))
    )
    assert f"[x] nvidia-bug-report right after the fault: in the dossier, {case.place}/{BUG_REPORT}" in took


def test_what_a_reboot_destroys_comes_first(store, tmp_path):
    """With where it is, or how to take it; Azure's physical host too."""
    plant(tmp_path / "root", {"sys/fs/pstore/dmesg-erst-1": "Oops"})
    case = made(store, tmp_path, Machine())
    lines = handover.text("Azure", case, PROVIDERS["azure"].fill(case)).splitlines()
    said = lines[2 : lines.index("# Fill in what canaryd cannot know:")]
    assert [line.partition(":")[0] for line in said] == [
        "# - physical host name",
        "# - bug report of the driver",
        "# - lines of the kernel log",
        "# - event log of the BMC",
        "# - error records of the firmware (CPER)",
    ]
    assert f"in the dossier, {case.place}/log.txt" in said[2]
    assert "NOT TAKEN: this machine has no /dev/ipmi0" in said[3]
    assert "As root: ipmitool sel elist > bmc-sel.txt" in said[3]
    assert f"in the dossier, {case.place}/records" in said[4]
    assert (Path(case.place) / "records/sys/fs/pstore/dmesg-erst-1").read_text() == "Oops\n"


@pytest.mark.parametrize(
    ("state", "cause", "missing"),
    [
        (State.SUSPECT, Cause.HARDWARE, "a confirmed fault"),
        (State.FAULTY, Cause.UNDETERMINED, "evidence that the hardware is its cause"),
        (State.FAULTY, Cause.SOFTWARE, "evidence that the hardware is its cause"),
        (State.HEALTHY, Cause.NONE, "a confirmed fault, evidence that the hardware is its cause"),
        (State.UNKNOWN, Cause.UNDETERMINED, "a confirmed fault, evidence that the hardware is its cause"),
    ],
)
def test_what_is_no_confirmed_fault_of_the_hardware_is_refused(store, tmp_path, state, cause, missing):
    """By every provider but the one that takes suspicion, which keeps nobody from the machine."""
    document = made(store, tmp_path).document
    told = {**document, "verdict": {**document["verdict"], "state": state.value, "cause": cause.value}}
    for name, provider in PROVIDERS.items():
        why = handover.refusal(provider.title, told, suspicion=provider.suspicion, physical=provider.physical)
        taken = name == "nico" and state in (State.SUSPECT, State.FAULTY) and cause is not Cause.SOFTWARE
        assert bool(why) is not taken
        expected = missing.partition(", evidence")[0] if provider.suspicion else missing
        assert taken or f"Missing: {expected}" in why
    if state is State.SUSPECT:
        suspected = PROVIDERS["nico"].fill(handover.Handover(document=told, place="", machine=KNOWN))
        assert suspected.body["alerts"][0]["classifications"] == []


def test_a_virtual_processor_is_reported_to_the_cloud_and_not_to_its_vendor(store, tmp_path):
    """The cloud asks for the machine; a vendor for the part, which nobody can name."""
    store.see_device(PROCESSOR, NOW - HOUR)
    store.set_verdict(verdict(device=PROCESSOR.uuid))
    _, document, _ = written(store, tmp_path, device=PROCESSOR)
    why = {n: handover.refusal(n, document, suspicion=p.suspicion, physical=p.physical) for n, p in PROVIDERS.items()}
    assert {name for name, text in why.items() if text} == {"vendor"}
    assert "its identity is weak" in why["vendor"]


def test_facts_are_read_where_their_place_is_documented(tmp_path):
    """cloud-init's file, Hyper-V's pool, the firmware's records; of another shape or absent, nothing is known."""
    assert machine.read(tmp_path, {}) == Machine()
    files = {
        machine.CLOUD_INIT: json.dumps(
            {
                "v1": {"local_hostname": "node-12", "availability_zone": "us-west2-c"},
                "ds": {"meta_data": {"imds": {"compute": {"resourceId": VM}}}},
            }
        ).encode(),
        machine.KVP_POOL: b"".join(
            text.encode().ljust(size, b"\0")
            for key, value in (("VirtualMachineName", "vm"), ("PhysicalHostName", "GGBB90904476"))
            for text, size in ((key, 512), (value, 2048))
        ),
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    assert machine.read(tmp_path, {}) == replace(KNOWN, node="node-12")
    assert machine.read(tmp_path, {"NODE_NAME": "gpu-7", "CLOUDSDK_COMPUTE_ZONE": "a-b1-c"}).node == "gpu-7"
    (tmp_path / machine.CLOUD_INIT).write_text("[]")
    assert machine.read(tmp_path, {}).resource_id == ""


def test_the_command_prints_the_form_after_it_took_the_evidence(tmp_path):
    """The dossier is written first; a suspect device gets none, and exit status 3."""
    (tmp_path / "none.yaml").touch()
    now = time.time()
    with Store.open(tmp_path / "state") as store:
        for device in (GPU, replace(GPU, uuid=PEER, index=4, torch_index=4)):
            store.see_device(device, now - HOUR)
        store.add_run(run(1, wrong=1, started=now - 600))
        store.set_verdict(verdict(decided=now - 60, since=now - 600))
        store.set_verdict(verdict(device=PEER, state=State.SUSPECT, decided=now - 60, since=now - 600))
    common = ("-o", tmp_path / "out", "--config", tmp_path / "none.yaml", "--state-dir", tmp_path / "state")
    answer = canaryd("report", UUID, "--for", "eks", *common)
    assert answer.code == 0, answer
    (archive,) = (tmp_path / "out").glob("*.tar.gz")
    assert f"attach: {archive}" in answer.err
    (typed,) = [line for line in answer.out.splitlines() if not line.startswith("#")]
    checked("eks", json.loads(shlex.split(typed)[-1]))
    refused = canaryd("report", PEER, "--for", "gcp", *common)
    assert (refused.code, refused.out) == (3, "")
    assert "Missing: a confirmed fault" in refused.err
    assert len(list((tmp_path / "out").glob("*.tar.gz"))) == 1
    for option in ("--redact", "--drill"):
        assert canaryd("report", UUID, "--for", "gcp", option, *common).code == 64
