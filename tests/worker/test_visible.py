"""A worker sees the device that it tests, and no other: variables, contexts, waits and questions on a stand-in."""

import functools

import pytest

from canaryd.model import Device, Outcome
from canaryd.probe import ProbeSpec
from canaryd.supervisor.protocol import RunRequest, WorkerSpec
from canaryd.supervisor.series import Series
from canaryd.worker.visible import narrowed
from probes.exact_matmul import SPEC as MATMUL
from tests.cards_stand_in import Cards
from tests.command import ROOT

pytestmark = pytest.mark.torch
GPU = Device(uuid="GPU-aa11", backend="cuda", index=2, torch_index=1, model="H100")
WEAK = Device(uuid="GPU-at-host-0000:41:00.0", backend="cuda", index=1, torch_index=1, model="H100", weak_identity=True)
MIG = Device(uuid="MIG-bb22", backend="cuda", index=3, torch_index=0, model="H100 MIG", parent="GPU-cc33",
             detail={"gpu_instance_id": "7", "compute_instance_id": "0"})  # fmt: skip
AMD = Device(uuid="GPU-77", backend="rocm", index=1, torch_index=1, model="MI300X")
MAX = Device(uuid="XPU-1", backend="xpu", index=1, torch_index=1, model="Max 1550")
NPU = Device(uuid="NPU-1", backend="npu", index=1, torch_index=1, model="910B")
CPU = Device(uuid="CPU-1", backend="cpu", index=0, torch_index=0, model="EPYC")


@pytest.mark.parametrize(
    ("device", "before", "after"),
    [
        (GPU, {}, {"CUDA_VISIBLE_DEVICES": "GPU-aa11"}),
        (GPU, {"CUDA_VISIBLE_DEVICES": "0,2"}, {"CUDA_VISIBLE_DEVICES": "GPU-aa11"}),
        (WEAK, {}, {"CUDA_VISIBLE_DEVICES": "1"}),
        (WEAK, {"CUDA_VISIBLE_DEVICES": "4, 6"}, {"CUDA_VISIBLE_DEVICES": "6"}),
        (WEAK, {"CUDA_VISIBLE_DEVICES": "4"}, {"CUDA_VISIBLE_DEVICES": "-1"}),
        (MIG, {}, {"CUDA_VISIBLE_DEVICES": "MIG-bb22"}),
        (MIG, {"CUDA_VISIBLE_DEVICES": "1,3"}, {"CUDA_VISIBLE_DEVICES": "MIG-bb22"}),
        (MIG, {"CUDA_VISIBLE_DEVICES": "GPU-cc"}, {"CUDA_VISIBLE_DEVICES": "MIG-bb22"}),
        (MIG, {"CUDA_VISIBLE_DEVICES": "MIG-GPU-cc33/7/0"}, {"CUDA_VISIBLE_DEVICES": "MIG-bb22"}),
        (MIG, {"CUDA_VISIBLE_DEVICES": "MIG-bb22"}, {"CUDA_VISIBLE_DEVICES": "MIG-bb22"}),
        (MIG, {"CUDA_VISIBLE_DEVICES": "MIG-dd44"}, {"CUDA_VISIBLE_DEVICES": "-1"}),
        (MIG, {"CUDA_VISIBLE_DEVICES": ""}, {"CUDA_VISIBLE_DEVICES": "-1"}),
        (AMD, {}, {"ROCR_VISIBLE_DEVICES": "1"}),
        (AMD, {"ROCR_VISIBLE_DEVICES": "5,GPU-77"}, {"ROCR_VISIBLE_DEVICES": "GPU-77"}),
        (AMD, {"HIP_VISIBLE_DEVICES": "3,5"}, {"HIP_VISIBLE_DEVICES": "0", "ROCR_VISIBLE_DEVICES": "5"}),
        (AMD, {"CUDA_VISIBLE_DEVICES": "3,5"}, {"HIP_VISIBLE_DEVICES": "0", "ROCR_VISIBLE_DEVICES": "5"}),
        (
            AMD,
            {"HIP_VISIBLE_DEVICES": "0,2", "ROCR_VISIBLE_DEVICES": "4,5,6"},
            {"HIP_VISIBLE_DEVICES": "0", "ROCR_VISIBLE_DEVICES": "6"},
        ),
        (AMD, {"HIP_VISIBLE_DEVICES": "GPU-00,GPU-77"}, {"HIP_VISIBLE_DEVICES": "GPU-77"}),
        (MAX, {}, {"ZE_AFFINITY_MASK": "1"}),
        (MAX, {"ZE_AFFINITY_MASK": "0.0,0.1"}, {"ZE_AFFINITY_MASK": "0.1"}),
        (
            MAX,
            {"ONEAPI_DEVICE_SELECTOR": "level_zero:2,3"},
            {"ONEAPI_DEVICE_SELECTOR": "level_zero:0", "ZE_AFFINITY_MASK": "3"},
        ),
        (MAX, {"ONEAPI_DEVICE_SELECTOR": "*:gpu"}, {}),
        (NPU, {"ASCEND_RT_VISIBLE_DEVICES": "6,7"}, {"ASCEND_RT_VISIBLE_DEVICES": "7"}),
        (CPU, {}, {"CUDA_VISIBLE_DEVICES": "-1", "HIP_VISIBLE_DEVICES": "-1"}),
    ],
)
def test_the_variables_name_one_device(device, before, after):
    """By uuid where the runtime knows uuids, else by its place in what the operator allows; what is barred stays so."""
    assert narrowed(device, before) == after


SMALL = """
from canaryd.probe import ProbeSpec, Reading
from canaryd.worker.toolkit import torch, upload

SPEC = ProbeSpec(name="small", summary="Uses a device")


def run(ctx):
    upload((torch.ones(4),), ctx.device)
    yield Reading(name="trials", value=1, unit="1")
"""


def computed(
    cards: Cards,
    device: Device,
    *,
    only: bool = True,
    probe: str = "",
    cases: tuple[str, ...] = ("float32/permute/square/nn",),
    **more,
):
    """Return a short run on a device: of a probe of canaryd's, or of one that only uploads."""
    small = cards.directory / "small.py"
    small.write_text(SMALL)
    request = RunRequest(
        probe_path=ROOT / f"probes/{probe}.py" if probe else small,
        spec=MATMUL if probe else ProbeSpec(name="small", summary="Uses a device"),
        device=device,
        level="quick",
        seed=1,
        cases=cases if probe else (),
        budget=0.1,
    )
    spec = WorkerSpec(env={**cards.environment, **more}, only=device if only else None)
    with Series(spec, grace=0.5) as series:
        return series.run(request, 60.0)


@pytest.fixture(scope="module")
def listed(tmp_path_factory):
    """The devices of a machine by its cards, each machine listed once; listing opens no context."""

    @functools.cache
    def devices(count, divided=()):
        cards = Cards(tmp_path_factory.mktemp("cards"), count, divided)
        found = cards.devices()
        assert cards.contexts() == {}
        return found

    return devices


@pytest.mark.parametrize("count", [2, *(pytest.param(count, marks=pytest.mark.slow) for count in (1, 8))])
def test_no_context_is_opened_on_another_device(tmp_path, listed, count):
    """Listing opens none; a run opens one, on its own device, where the device is number 0.

    A worker ends by waiting for its device, also where the probe did not: a kernel that is killed may disturb others.
    """
    cards = Cards(tmp_path, count)
    devices = listed(count)
    assert [d.torch_index for d in devices] == list(range(count))
    for device in devices[-2:]:
        cards.forget()
        run = computed(cards, device)
        assert run.outcome is Outcome.COMPLETED, run.detail
        assert [what for _, what, _ in cards.log()] == ["context", "upload", "synchronize"]
        assert list(cards.contexts().values()) == [{device.uuid}]


@pytest.mark.parametrize(
    ("probe", "cases"),
    [
        ("exact_matmul", ("float32/permute/square/nn",)),
        ("recorded_kernels", ("gemm/float32/decode1",)),
        *(
            pytest.param(*rest, marks=pytest.mark.slow)
            for rest in (
                ("exact_attention", ("float32/onehot/prefill/math",)),
                ("exact_canary", ("float32/decode/b1/eager",)),
                ("exact_integer", ()),
            )
        ),
    ],
)
def test_waits_events_and_questions_name_the_device(tmp_path, listed, probe, cases):
    """Where a worker sees all cards, as one whose runtime cannot be narrowed, it still touches no other than its own.

    The card tells how long it worked, by its own events: one that says a quarter of a millisecond between two is
    charged that.
    """
    cards = Cards(tmp_path, 2)
    cards.set(1, "event_ms", 0.25)
    device = listed(2)[1]
    run = computed(cards, device, only=False, probe=probe, cases=cases)
    assert run.outcome is Outcome.COMPLETED, run.detail
    done = {what for _, what, _ in cards.log()}
    assert "synchronize" in done
    assert "upload" in done or probe == "recorded_kernels"  # which copies into memory that it has
    told = {r.name: r.value for r in run.readings if not r.labels}
    pairs = told["device_seconds"] / 0.00025
    assert pairs == pytest.approx(round(pairs))
    assert 1 <= round(pairs) <= 4 * told.get("trials", 40) + told.get("gathers", 0)
    assert 0.0 < told["host_seconds"] < run.seconds
    assert list(cards.contexts().values()) == [{device.uuid}]


def test_each_instance_of_a_divided_card_is_tested_as_itself(tmp_path, listed):
    """CUDA shows a process one instance; each worker sees its own, and an undivided card beside them is another."""
    cards = Cards(tmp_path, 2, divided=[0])
    devices = listed(2, (0,))
    assert len(devices) == 2  # CUDA hides the undivided card where it finds an instance first
    for device in devices:
        cards.forget()
        run = computed(cards, device)
        assert run.outcome is Outcome.COMPLETED, run.detail
        assert list(cards.contexts().values()) == [{device.uuid}]


def test_an_operators_restriction_stands(tmp_path, listed):
    """An instance that CUDA_VISIBLE_DEVICES excludes is not used, and nothing in its place."""
    cards = Cards(tmp_path, 2, divided=[0])
    first, second = listed(2, (0,))
    run = computed(cards, second, CUDA_VISIBLE_DEVICES=first.uuid)
    assert run.outcome is Outcome.SKIPPED
    assert "is not visible" in run.detail
    assert cards.contexts() == {}


def test_a_card_that_another_process_holds_is_left_alone(tmp_path, listed):
    """In exclusive mode the other card is tested all the same, and the one that is held is listed."""
    cards = Cards(tmp_path, 2)
    held, free = listed(2)
    cards.set(0, "exclusive", True)
    cards.hold(0)
    assert cards.devices() == [held, free]
    assert computed(cards, held).outcome is Outcome.SKIPPED
    assert computed(cards, free).outcome is Outcome.COMPLETED
