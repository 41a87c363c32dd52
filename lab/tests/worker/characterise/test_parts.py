"""Parts in the worker: what raises is noted by its meaning, and the device's failure ends a part."""

from __future__ import annotations

import pytest
from canaryd_lab.observation import Claim, Observation, Seen

from canaryd.codec import from_json, to_json

pytestmark = pytest.mark.torch


def bench(seconds: float = 60.0, drill: str = ""):
    from canaryd_lab.worker.characterise.bench import Bench

    from canaryd.worker.numeric.stack import cpu

    return Bench(cpu(), seconds, drill)


def problem():
    from canaryd_lab.worker.characterise.exactness import product_of

    from canaryd.worker.numeric.operands import build
    from canaryd.worker.numeric.stack import cpu

    return build(product_of(cpu(), "float32", "float32", "dense", "nt", (8, 8, 16, 0)), 1)


def raising(text: str):
    def compute(operands, out):
        raise RuntimeError(text)

    return compute


@pytest.mark.parametrize(
    ("text", "seen", "error"),
    [
        ("'addmm' not implemented for 'Float8'", Seen.REFUSED, ""),
        ("CUDA out of memory. Tried to allocate", Seen.RAISED, "memory"),
        ("the frobnicator is out of tune", Seen.RAISED, "other"),
    ],
)
def test_what_raises_is_noted_by_its_meaning(text, seen, error):
    """A refusal, a lack of memory, and what nobody foresaw are three things."""
    at = bench()
    at.verify("case", problem, raising(text))
    assert [(o.seen, o.error) for o in at.seen] == [(seen, error)]


def test_a_failure_of_the_device_ends_the_part_and_keeps_what_was_seen():
    """Its context is lost: nothing after it would mean anything."""
    from canaryd_lab.worker.characterise.bench import DeviceFailed

    at = bench()
    with pytest.raises(DeviceFailed):
        at.verify("case", problem, raising("CUDA error: an illegal memory access was encountered"))
    assert [(o.seen, o.error) for o in at.seen] == [(Seen.RAISED, "device")]


def test_what_is_not_reached_is_said():
    """No part of a part is left out in silence."""
    at = bench(seconds=1e-9)
    at.verify("case", problem, raising("never called"))
    assert [o.seen for o in at.seen] == [Seen.NOT_REACHED]


@pytest.mark.parametrize("fault", ["flip", "zero", "swap", "nan", "stuck", "consistent"])
def test_every_fault_is_seen_in_a_strict_case(fault):
    """Each of the drill's faults makes a strict observation wrong."""
    from functools import partial

    from canaryd.worker.numeric.products import multiply

    at = bench(drill=fault)
    at.verify("case", problem, partial(multiply, "float32", "float32"))
    assert [o.seen for o in at.seen] == [Seen.WRONG]


def test_nvidia_smi_is_read_under_the_names_of_readings():
    """Units become base units; what the tool does not have is left out."""
    from canaryd_lab.worker.characterise.vendor_tool import parse

    found = parse(["temperature.gpu", "memory.total", "power.draw", "temperature.memory"], "41, 81559, 120.5, [N/A]")
    assert found["temperature_celsius{sensor=core}"]["value"] == 41
    assert found["memory_total_bytes"]["value"] == 81559 * 2**20
    assert found["power_watts"]["value"] == 120.5
    assert len(found) == 3


def test_the_worker_lists_the_parts_of_a_devices_runtime():
    """The list is the plan's half; what calls torch is torch's alone. Observations survive JSON."""
    from canaryd_lab.worker.characterise.parts import answer

    from canaryd.model import Device

    def names(backend):
        device = to_json(Device(uuid="x", backend=backend, index=0, model="m"))
        arguments = {"part": "", "device": device}
        return {p["name"] for p in answer(arguments, lambda _fraction, _text: None)["parts"]}

    common = {"environment", "controls", "width", "exactness/float16"}
    assert common | {"throughput", "memory", "attention/flash_attention"} <= names("cpu")
    assert common | {"attention/fast"} <= names("mlx-cpu")
    assert not {"throughput", "memory", "attention/math"} & names("mlx-cpu")
    one = Observation(name="a", claim=Claim.OPEN, seen=Seen.MEASURED, values={"bits": 3, "share": 0.5, "how": "so"})
    assert from_json(Observation, to_json(one)) == one


def test_a_tool_that_does_not_know_a_field_is_asked_for_the_others(tmp_path, monkeypatch):
    """An older nvidia-smi refuses the whole question because of one field; what it knows is still compared."""
    from canaryd_lab.worker.characterise.bench import Bench
    from canaryd_lab.worker.characterise.vendor_tool import vendor_tool

    from canaryd.model import Device

    script = tmp_path / "nvidia-smi"
    known = '#!/bin/sh\ncase "$*" in *query-gpu=power.draw) echo 70.1;; *) echo "no such field"; exit 2;; esac\n'
    script.write_text(known)
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    at = Bench(Device(uuid="GPU-1", backend="cuda", index=0, model="a card"), 10.0)
    vendor_tool(at)
    assert {key: field["value"] for key, field in at.facts["fields"].items()} == {"power_watts": 70.1}
    assert "temperature.gpu" in at.facts["unknown_to_the_tool"]


def test_without_the_tool_the_part_is_skipped(tmp_path, monkeypatch):
    """With the reason, so that the page can say it."""
    from canaryd_lab.worker.characterise.bench import Bench
    from canaryd_lab.worker.characterise.vendor_tool import vendor_tool

    from canaryd.model import Device
    from canaryd.probe import Skip

    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Skip, match="not installed"):
        vendor_tool(Bench(Device(uuid="GPU-1", backend="cuda", index=0, model="a card"), 10.0))


def test_memory_runs_out_for_this_process_alone(monkeypatch):
    """A GPU that is filled to its end takes the memory of the server beside it: a limit ends the allocations first."""
    from canaryd_lab.worker.characterise import behaviour

    limited, own = [], bench()
    monkeypatch.setattr(own.runtime, "memory", lambda device: (6 << 30, 16 << 30))
    monkeypatch.setattr(own.runtime, "limit_memory", lambda device, size: limited.append(size))
    behaviour.memory(own)
    assert limited == [1 << 30, 16 << 30]
    first, *after = own.seen
    assert (first.claim, first.seen) == (Claim.STRICT, Seen.RIGHT)
    assert first.values["taken_bytes"] <= 1 << 30
    assert [o.seen for o in after] == [Seen.RIGHT]


def test_speed_is_measured_with_operands_without_zeros(monkeypatch):
    """A GPU that multiplies zeros draws less power and runs at higher clocks than one that serves."""
    import torch
    from canaryd_lab.worker.characterise.speed import _speed

    honest, zeros = torch.matmul, []

    def watched(a, b, **more):
        zeros.append(bool((a == 0).any() or (b == 0).any()))
        return honest(a, b, **more)

    monkeypatch.setattr(torch, "matmul", watched)
    at = bench()
    _speed(at, "float32/64", "float32", "float32", 64)
    assert [o.seen for o in at.seen] == [Seen.RIGHT]
    assert not any(zeros)
