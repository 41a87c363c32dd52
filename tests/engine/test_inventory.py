"""The inventory: one list out of two witnesses, and what changed."""

from dataclasses import replace

import pytest

from canaryd.config.settings import Config
from canaryd.engine.inventory import changes, merge, remembered
from canaryd.judge.slower import Day
from canaryd.model import UNDRIVEN, UNSEEN, Cause, Device, State, Verdict
from canaryd.store.devices import DeviceRecord
from canaryd.store.store import Store
from canaryd.supervisor.protocol import Description, Listing, Reach

NOW = 1_790_000_000.0
HEX = "5f1c0d6e-1111-2222-3333-444455556666"
CPU = Device(uuid="CPU-1", backend="cpu", index=0, model="EPYC", torch_index=0, detail={"microcode": "0x1"})
SEEN = Device(
    uuid=f"GPU-{HEX}", backend="cuda", index=3, model="NVIDIA H100", detail={"serial": "165", "bus_id": "0000:65:00.0"}
)
TORCH = Device(
    uuid=f"GPU-{HEX}",
    backend="cuda",
    index=0,
    model="H100",
    torch_index=0,
    detail={"bus_id": "00000000:65:00.0", "capability": "9.0"},
)


def described(*devices, torch="2.13.0", **stack):
    return Description(torch=torch, devices=devices, stack={"torch": torch or "", **stack})


def listing(unavailable=None, facts=None, **devices):
    found = {name: tuple(each) for name, each in devices.items()}
    return Listing(devices=found, unavailable=unavailable or {}, facts=facts or {})


def test_what_both_see_is_one_device():
    """The vendor's index and identity, torch's number, and the facts of both."""
    found = merge(described(CPU, TORCH), listing(nvidia=[SEEN]), {})
    gpu = next(d for d in found.devices if d.backend == "cuda")
    assert (gpu.uuid, gpu.index, gpu.model, gpu.torch_index) == (SEEN.uuid, 3, "NVIDIA H100", 0)
    assert gpu.detail["serial"] == "165"
    assert gpu.detail["capability"] == "9.0"
    assert len(found.devices) == 2


def test_what_torch_does_not_reach_is_there_all_the_same():
    """A torch without CUDA hides no device from the inventory."""
    found = merge(described(CPU), listing(nvidia=[SEEN]), {})
    assert [d.torch_index for d in found.devices if d.backend == "cuda"] == [None]


def test_why_torch_does_not_show_a_gpu_goes_with_it_and_no_further():
    """In torch's own words; once it shows the GPU, nothing of that is left, and neither is an event."""
    why = "Error 802: system not yet initialized"
    hidden = merge(described(CPU, no_cuda=why), listing(nvidia=[SEEN]), {})
    gpu = next(d for d in hidden.devices if d.backend == "cuda")
    assert gpu.detail[UNSEEN] == why
    known = {d.uuid: d for d in hidden.devices}
    found = merge(described(CPU, TORCH), listing(nvidia=[SEEN]), known, known.keys())
    assert not any(UNSEEN in d.detail for d in found.devices)
    assert [e.name for e in changes(known, known.keys(), found.devices, (), NOW)] == []
    other = merge(described(CPU, no_cuda="another"), listing(nvidia=[SEEN]), known, known.keys())
    assert changes(known, known.keys(), other.devices, (), NOW) == []


@pytest.mark.parametrize("backend", ["rocm", "xpu"])
def test_a_device_whose_place_torch_does_not_tell_is_listed_once(backend):
    """Older torches tell no place of AMD's devices, newer ones a uuid but none of Intel's: all were there twice."""
    kernels = [
        Device(uuid=f"K-{n}", backend=backend, index=n, model="MI300X", detail={"bus_id": f"0000:{n}5:00.0"})
        for n in range(2)
    ]
    seen = [Device(uuid=f"T-{n}", backend=backend, index=n, model="MI300X", torch_index=n) for n in range(2)]
    found = merge(described(CPU, *seen), listing({}, **{"amd" if backend == "rocm" else "intel": kernels}), {})
    cards = [d for d in found.devices if d.backend == backend]
    assert [(d.uuid, d.torch_index, d.detail["bus_id"]) for d in cards] == [
        ("T-0", 0, "0000:05:00.0"),
        ("T-1", 1, "0000:15:00.0"),
    ]


@pytest.mark.parametrize("shown", ["GPU-0", SEEN.uuid])
def test_instances_are_reached_one_at_a_time(shown):
    """CUDA shows a process one instance, by its own uuid or its GPU's; each is first in a worker of its own.

    The divided GPU is not reached.
    """
    parts = [
        replace(SEEN, uuid=f"MIG-{n}", parent=SEEN.uuid, detail={**SEEN.detail, "instance": str(n)}) for n in range(2)
    ]
    torch = replace(TORCH, uuid=shown, torch_index=0)
    found = merge(described(CPU, torch), listing(nvidia=[SEEN, *parts]), {})
    reached = {d.uuid: d.torch_index for d in found.devices if d.backend == "cuda"}
    assert reached == {SEEN.uuid: None, "MIG-0": 0, "MIG-1": 0}
    assert [d.name for d in found.devices if d.parent] == ["cuda:3.0", "cuda:3.1"]


def test_an_undriven_function_stands_in_for_its_device():
    """A GPU on the bus that neither driver nor torch shows is listed, with the reason; no other is listed twice."""
    place = Device(
        uuid="PCI-0000:65:00.0",
        backend="cuda",
        index=0,
        model="NVIDIA device 2335",
        detail={"bus_id": "0000:65:00.0", UNDRIVEN: "yes"},
    )
    found = merge(described(CPU), listing({"nvidia": "no driver is loaded"}, host=[place]), {})
    assert [d.detail.get(UNDRIVEN) for d in found.devices] == [None, "no driver is loaded"]
    assert len(merge(described(CPU, TORCH), listing(nvidia=[SEEN], host=[place]), {}).devices) == 2
    # A known device that is silent now is missed under its own name.
    silent = (described(CPU), listing(nvidia=[], host=[place]), {SEEN.uuid: SEEN})
    assert len(merge(*silent, {SEEN.uuid}).devices) == 1
    # When it has been missed, what is in its place now is another board, which nobody drives.
    assert len(merge(*silent).devices) == 2


def test_who_was_not_asked_is_not_gone():
    """Only a backend that somebody could be asked about can have lost a device."""
    assert "cuda" not in merge(described(CPU), listing(nvidia=[]), {}).uncertain
    assert "cuda" in merge(described(CPU), listing({"nvidia": "hung"}), {}).uncertain
    assert "cuda" not in merge(described(CPU, TORCH), listing({"nvidia": "hung"}), {}).uncertain
    hung = Listing(unavailable={"nvidia": "hung"}, failing={"nvidia": "hung"})
    assert "cuda" in merge(described(CPU, TORCH), hung, {}).uncertain
    assert "cuda" in merge(described(CPU, torch=None), listing(), {}).uncertain
    assert "cuda" not in merge(described(CPU), listing(), {}).uncertain
    assert "cpu" not in merge(described(CPU), listing(), {}).uncertain
    assert "cpu" in merge(described(torch=None), listing(nvidia=[SEEN]), {}).uncertain


def test_changes_have_before_and_after():
    """A new driver, a new slot, a new and a lost device are events; a first look and a reboot are none."""
    after = replace(SEEN, detail={"serial": "165", "bus_id": "0000:66:00.0", "driver": "580.2", "boot_id": "b"})
    before = replace(SEEN, detail={**SEEN.detail, "driver": "570.1", "boot_id": "a"})
    new = replace(SEEN, uuid="GPU-new")
    lost = DeviceRecord(device=CPU, first_seen=0.0, last_seen=NOW - 900, present=True)
    events = changes({SEEN.uuid: before}, {SEEN.uuid}, [after, new], [lost], NOW)
    told = [(e.device, e.name, e.before, e.after) for e in events]
    assert told == [
        (SEEN.uuid, "bus_id", "0000:65:00.0", "0000:66:00.0"),
        (SEEN.uuid, "driver", "570.1", "580.2"),
        ("GPU-new", "device", "", "found"),
        (CPU.uuid, "device", "found", "gone"),
    ]
    assert all(e.kind == "change" and e.last == NOW for e in events)
    assert [NOW - e.first for e in events] == [0, 0, 0, 900]  # lost at some time since it was last seen
    assert changes({}, (), [after, new], [], NOW) == []
    (back,) = changes({SEEN.uuid: SEEN}, (), [SEEN], [], NOW)
    assert (back.name, back.before, back.after) == ("device", "gone", "found")


def through(name, **fields):
    """A device of another runtime."""
    given = {"uuid": f"{name}-x", "backend": name, "index": 0, "model": "m", **fields}
    return Device(**given)


@pytest.mark.parametrize(
    ("detail", "card"),
    [
        ({"bus_id": "00000000:65:00.0"}, SEEN.uuid),
        ({"gpu_uuid": f"GPU-{HEX.upper()}"}, SEEN.uuid),
        ({"bus_id": "0000:66:00.0"}, ""),
        ({}, ""),
    ],
)
def test_another_runtimes_device_belongs_to_a_card_where_that_can_be_told(detail, card):
    """By PCI address or uuid, however they are spelt; otherwise the identity is weak and says why."""
    runtimes = {"onnx": Reach(devices=(through("onnx-cuda", detail=detail),))}
    found = merge(described(CPU, TORCH), listing(nvidia=[SEEN]), {}, (), runtimes)
    (device,) = (d for d in found.devices if d.runtime == "onnx")
    assert device.card == card
    assert device.physical == (card or device.uuid)
    assert device.weak_identity is not bool(card)
    assert ("card" in device.detail) is not bool(card)
    assert len(found.devices) == 3


def test_a_runtime_that_could_not_be_asked_makes_its_devices_uncertain():
    """Its known devices have not vanished: nobody could look."""
    known = {d.uuid: d for d in (CPU, through("mlx-cpu"), through("onnx-cpu"))}
    runtimes = {"mlx": Reach(problem="cannot import mlx"), "onnx": Reach()}
    assert "mlx-cpu" in merge(described(CPU), listing(), known, (), runtimes).uncertain
    assert "onnx-cpu" not in merge(described(CPU), listing(), known, (), runtimes).uncertain


@pytest.mark.parametrize("state", [State.SUSPECT, State.FAULTY])
def test_a_faulty_instance_is_known_as_long_as_its_gpu_is_there(tmp_path, state):
    """The silicon that it was a part of is still in service; a suspicion ends with the watch."""
    day = 86_400.0
    gone = replace(SEEN, uuid="MIG-1", parent=SEEN.uuid)
    verdict = Verdict(device="MIG-1", state=state, cause=Cause.HARDWARE, findings=(), decided=NOW, since=NOW)
    with Store.open(tmp_path / "state") as store:
        for device in (SEEN, gone):
            store.see_device(device, NOW)
        (record,) = (r for r in store.devices() if r.device.uuid == "MIG-1")
        for n in range(1, 40):
            store.add_day(Day(device=SEEN.uuid, day=int(NOW // day) + n, levels=(), tested=("exact_matmul",)))

        def is_known(days):
            return remembered(record, store, {SEEN.uuid}, Config(), NOW + days * day, verdict=verdict)

        assert is_known(20)
        assert is_known(39) == (state is State.FAULTY)
