"""What a finding points to, what several devices may share, and what its remedy reaches."""

import json
from dataclasses import replace

import pytest

from canaryd.codec import from_json, to_json
from canaryd.config.settings import TelemetryConfig
from canaryd.model import Cause, Finding, Part, State, Verdict, Whose
from tests.judge.made import CPU, GPU, HOUR, OTHER_FIRST, SERVERS, THIRD, TWIN, ask, finding, fresh, run, wrong
from tests.judge.telemetry.made import UE, event, reset, sign, xid

GPUS = GPU, TWIN, THIRD
NAMES = tuple(device.name for device in GPUS)
PEERS = tuple((device, [fresh(of=device)]) for device in (TWIN, THIRD, CPU))
LOST = sign(xid(79)), sign(xid(79), beside={TWIN.name: [xid(79)]})


def told(rule, signs, of=GPU, peers=PEERS):
    """Return the finding of a rule on a device whose numbers are right."""
    return finding(ask(fresh(of=of), of=of, peers=peers, signs=replace(signs, device=of)), rule)


def test_who_else_had_it_makes_the_subject():
    """One device that is lost alone is the subject, and its reboot takes the host; two point to what they share."""
    alone, together = (told("gpu-lost", signs) for signs in LOST)
    assert (alone.subject, alone.parts, alone.shared_by) == (Whose.DEVICE, (), ())
    assert together.subject is Whose.SHARED
    assert Part.SUPPLY in together.parts
    assert Part.FABRIC not in together.parts
    assert together.shared_by == NAMES[:2]
    assert {alone.reach, together.reach} == {("cpu:0", *NAMES)}


@pytest.mark.parametrize("code", [74, 149])
def test_an_error_of_nvlink_on_several_devices_points_to_the_fabric_and_its_reset_takes_all_of_it(code):
    """On one device alone it is that device's, and so is the reset."""
    found = told("xid", sign(xid(code), beside={TWIN.name: [xid(code)]}))
    assert (found.subject, found.parts, found.reach) == (Whose.SHARED, (Part.FABRIC,), NAMES)
    found = told("xid", sign(xid(code)))
    assert (found.subject, found.parts, found.reach) == (Whose.DEVICE, (), NAMES[:1])


@pytest.mark.parametrize(
    ("code", "parts"),
    [
        (64, [Part.DRIVER]),
        (119, [Part.DRIVER]),
        (136, [Part.FABRIC]),
        (54, [Part.SUPPLY]),
        (167, [Part.SUPPLY, Part.RISER, Part.SWITCH]),
        (46, [Part.SUPPLY, Part.RISER, Part.SWITCH, Part.FABRIC, Part.DRIVER]),
    ],
)
def test_an_xid_of_several_devices_points_to_the_shared_parts_that_it_is_about(code, parts):
    """Each GPU replaces rows of its own memory: no supply or riser makes several fail at that."""
    found = told("xid", sign(xid(code), beside={TWIN.name: [xid(code)]}))
    assert (found.subject, found.parts, found.shared_by) == (Whose.SHARED, tuple(parts), NAMES[:2])
    alone = told("xid", sign(xid(code)))
    assert (alone.subject in (Whose.DEVICE, None), alone.parts) == (True, ())


def test_a_fatal_error_of_a_switch_points_to_the_fabric():
    """Whichever device tells it: switches and GPUs are reset together."""
    found = told("event-reported", sign(event("sxid", "fatal", code=20034, fields={"severity": "fatal"})))
    assert (found.subject, found.parts, found.reach) == (Whose.SHARED, (Part.FABRIC,), NAMES)


def test_a_fault_of_the_fabric_on_several_devices_is_the_fabrics():
    """On one it is that device's: its own links are part of the fabric."""
    degraded, healthy = (sign(only={"fabric_fault{fault=degraded_bandwidth}": value}) for value in (1, 0))
    found = told("fabric-fault", replace(degraded, reporting={TWIN.name: degraded, THIRD.name: healthy}))
    assert (found.subject, found.parts, found.shared_by) == (Whose.SHARED, (Part.FABRIC,), NAMES[:2])
    found = told("fabric-fault", replace(degraded, reporting={TWIN.name: healthy}))
    assert (found.subject, found.parts, found.shared_by) == (Whose.DEVICE, (), ())


def test_one_link_of_one_device_acquits_nobody():
    """Nobody was asked who else had it: a link that is down, or an error that the configuration grades low."""
    down = sign(
        event("flag", "nvlink_up{link=3}", 60, before="1", after="0", reading="nvlink_up", labels={"link": "3"})
    )
    assert told("nvlink-down", down).subject is Whose.DEVICE
    low = replace(sign(xid(74)), policy=TelemetryConfig(xids={"74": "application"}))
    assert told("xid", low).subject is not Whose.SHARED


def test_what_is_called_hardware_is_not_called_shared():
    """The operator graded the Xid as a reason to return the device: that holds even if other devices had it too."""
    signs = replace(sign(xid(31), beside={TWIN.name: [xid(31)]}), policy=TelemetryConfig(xids={"31": "rma"}))
    found = told("xid", signs)
    assert (found.state, found.cause, found.subject) == (State.FAULTY, Cause.HARDWARE, Whose.DEVICE)


def test_a_reset_takes_the_hive_and_what_old_nvlinks_connect():
    """Else it takes the device alone, and nobody who is of another kind."""
    broken = sign(event("counter", UE, reading="ecc_errors_total", labels={"kind": "uncorrected", "location": "dram"}))
    for changes, count in (
        ({"detail": {"architecture": "hopper", "nvlinks": "18"}}, 1),
        ({"detail": {"architecture": "volta", "nvlinks": "6"}}, 3),
        ({"detail": {"architecture": "volta", "nvlinks": "0"}}, 1),
        ({"backend": "rocm", "model": "AMD Instinct MI300X"}, 3),
        ({"backend": "rocm", "model": "AMD Radeon PRO W7900"}, 1),
    ):
        one, *others = (replace(gpu, **changes) for gpu in GPUS)
        peers = [(other, [fresh(of=other)]) for other in (*others, CPU)]
        found = told("uncorrected-error", broken, of=one, peers=peers)
        assert found.reach == tuple(gpu.name for gpu in (one, *others))[:count]
    together = replace(broken, beside={"rocm:1": broken.events})
    of = replace(GPU, backend="rocm")
    assert Part.HIVE in told("uncorrected-error", together, of=of).parts


def test_after_its_reset_the_rest_reaches_the_device_alone():
    """What is left is an exact test."""
    found = told("xid", sign(xid(119, 300), reset(60)))
    assert (found.subject, found.reach) == (Whose.DEVICE, NAMES[:1])


def test_wrong_results_of_several_devices_point_to_what_they_share():
    """Of one beside clean ones they point to it; of a server to the server."""
    own = [run(HOUR - n, wrong(seed=n)) for n in range(4)]
    theirs = [run(HOUR - n, wrong(seed=50 + n, first=OTHER_FIRST), of=TWIN) for n in range(4)]
    peers = [(TWIN, theirs), (THIRD, [fresh(of=THIRD)])]
    found = finding(ask(*own, fresh(), peers=peers), "exact-mismatch")
    assert (found.subject, found.shared_by) == (Whose.SHARED, NAMES[:2])
    assert Part.MEMORY in found.parts
    clean = [(peer, [fresh(of=peer)]) for peer in (TWIN, THIRD)]
    assert finding(ask(*own, fresh(), peers=clean), "exact-mismatch").subject is Whose.DEVICE
    served = ask(run(60, wrong(), of=SERVERS[0]), of=SERVERS[0])
    assert {found.subject for found in served.findings} == {Whose.ENDPOINT}


def test_a_finding_of_an_older_release_has_no_subject():
    """It is read as it was written."""
    verdict = ask(fresh(), peers=PEERS, signs=LOST[1])
    stored = json.loads(json.dumps(to_json(verdict, sparse=True)))
    assert from_json(Verdict, stored) == verdict
    for found in stored["findings"]:
        for name in ("subject", "parts", "shared_by", "remedy", "reach"):
            found.pop(name, None)
    assert {(f.subject, f.reach) for f in from_json(Verdict, stored).findings} == {(None, ())}
    assert Finding.__dataclass_fields__["subject"].default is None
