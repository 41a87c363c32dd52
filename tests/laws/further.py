"""Stories that are told here alone: they are too long for the contract, or show nothing but a law."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tests.story.catalogue import EXACT, NVIDIA
from tests.story.format import Expectation, Fault, Happening, Machine, Part, Story

ANYTHING = (Expectation(device="*", never="harness"),)
"""A story must expect something."""
CPU = Part(name="cpu", backend="cpu", model="EPYC 9654")
TELEMETRY = (EXACT, NVIDIA)


def _story(
    name: str,
    text: str,
    gpus: int,
    rounds: int,
    period: str = "30m",
    *,
    faults: Sequence[Fault] = (),
    events: Sequence[Happening] = (),
    probes: Sequence[str] = (EXACT,),
) -> Story:
    """Return a story of one machine with so many GPUs and a processor."""
    machine = Machine(devices=(Part(name="gpu", count=gpus), CPU))
    return Story(
        name=name,
        text=text,
        hosts=(machine,),
        rounds=rounds,
        period=period,
        faults=tuple(faults),
        events=tuple(events),
        probes=tuple(probes),
        expect=ANYTHING,
    )


def _xids(*rounds: int, xid: int, devices: Sequence[str], text: str = "") -> list[Happening]:
    """Return an Xid on devices in each of these rounds, with a reboot in the round after it."""
    logged = [Happening(at=at, do="xid", device=tuple(devices), xid=xid, text=text) for at in rounds]
    return [*logged, *(Happening(at=at + 1, do="reboot") for at in rounds)]


ALL = tuple(f"gpu{n}" for n in range(4))
BUG = "float32/wide/square/tn"
FURTHER: Mapping[str, Story] = {
    story.name: story
    for story in (
        _story(
            "bug-of-two-of-three",
            "Two of three GPUs share a bug, with the same wrong bits, for four hours.",
            3,
            10,
            faults=[Fault(kind="exact", device=("gpu0", "gpu1"), case=BUG, after=2, same="bug")],
        ),
        _story(
            "stuck-for-days",
            "One GPU has a stuck bit for three days.",
            2,
            48,
            "90m",
            faults=[Fault(kind="exact", device="gpu1", after=4, bits=(17,), row=3, column=40)],
        ),
        _story(
            "power-dip",
            "A power dip gives all four GPUs Xid 95 in one second; a reboot, and all compute right.",
            4,
            16,
            "6h",
            events=_xids(6, xid=95, devices=ALL, text="Uncontained ECC error."),
            probes=TELEMETRY,
        ),
        _story(
            "two-power-dips",
            "The same Xid 119 comes on all four GPUs in one second, twice in two weeks.",
            4,
            24,
            "12h",
            events=_xids(4, 16, xid=119, devices=ALL, text="Timeout after 6s of waiting for RPC response"),
            probes=TELEMETRY,
        ),
        _story(
            "six-of-eight-after-a-fabric-error",
            "Six of eight GPUs report Xid 94 within a second, when the fabric between them fails.",
            8,
            12,
            "6h",
            events=_xids(5, xid=94, devices=tuple(f"gpu{n}" for n in range(6)), text="Contained ECC error."),
            probes=TELEMETRY,
        ),
        _story(
            "storm-that-stalls-polls",
            "Corrected errors of one GPU storm, and half of the polls of its driver fail meanwhile.",
            2,
            30,
            faults=[Fault(kind="errored", device="gpu1", probe=NVIDIA, probability=0.5, after=8)],
            events=[
                Happening(
                    at=8,
                    do="counters",
                    device="gpu1",
                    counters={"ecc_errors_total{kind=corrected,location=dram}": 4000},
                    rounds=22,
                )
            ],
            probes=TELEMETRY,
        ),
        _story(
            "race-of-unequal-rates",
            "An upgrade brings a race that strikes one of two GPUs six times as often as the other.",
            2,
            60,
            faults=[
                Fault(kind="upload", device="gpu0", probability=0.12, stack={"driver": "590.10"}),
                Fault(kind="upload", device="gpu1", probability=0.02, stack={"driver": "590.10"}),
            ],
            events=[Happening(at=20, do="stack", device=("gpu0", "gpu1"), stack={"driver": "590.10"})],
        ),
        _story(
            "second-card-breaks",
            "One GPU of four has a stuck bit, and hours later another one is wrong now and then.",
            4,
            24,
            faults=[
                Fault(kind="exact", device="gpu0", bits=(9,), row=5, after=4),
                Fault(kind="upload", device="gpu2", probability=0.1, after=12),
            ],
        ),
        _story(
            "unrelated-library",
            "Both GPUs are wrong since an upgrade; then a library changes that no product uses.",
            2,
            24,
            faults=[Fault(kind="upload", device=("gpu0", "gpu1"), probability=0.2, stack={"driver": "590.10"})],
            events=[
                Happening(at=4, do="stack", device=("gpu0", "gpu1"), stack={"driver": "590.10"}),
                Happening(at=14, do="stack", device=("gpu0", "gpu1"), stack={"tokenizer": "2"}),
            ],
        ),
    )
}
BLAMELESS = {
    "bug-of-two-of-three",
    "power-dip",
    "two-power-dips",
    "six-of-eight-after-a-fabric-error",
    "race-of-unequal-rates",
    "unrelated-library",
}
"""Stories in which no device is broken."""
