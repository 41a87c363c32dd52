"""A process that reads NVIDIA's telemetry through the stand-in for its library."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from canaryd.codec import from_json, to_json
from canaryd.facts import Reading
from canaryd.model import Device
from canaryd.probe import Absent
from tests.nvml_stand_in import StandIn
from tests.worker.telemetry.trees import checked

ROOT = Path(__file__).resolve().parents[3]
PATIENCE = 20.0
AGENT = """
import json, sys
from canaryd.codec import from_json, to_json
from canaryd.model import Device
from canaryd.worker.telemetry import nvidia
from canaryd.worker.telemetry.interface import DeviceLost, Unavailable
for line in sys.stdin:
    what, *rest = json.loads(line)
    try:
        if what == "devices":
            answer = {"devices": to_json(nvidia.devices(*rest)), "problems": nvidia.problems()}
        elif what == "read":
            facts = nvidia.read(from_json(Device, rest[0]), *rest[1:])
            answer = {"facts": [[type(fact).__name__, to_json(fact)] for fact in facts]}
        else:
            answer = {"closed": nvidia.close()}
    except Unavailable as error:
        answer = {"unavailable": str(error)} | ({"lost": True} if isinstance(error, DeviceLost) else {})
    except ValueError as error:
        answer = {"wrong": str(error)}
    print(json.dumps(answer), flush=True)
"""
NOT_SUPPORTED = "not supported by this device"


class Agent:
    """A process that asks canaryd.worker.telemetry.nvidia what it is told to."""

    def __init__(self, machine: StandIn | None, **extra: str) -> None:
        env = {k: v for k, v in os.environ.items() if k != "LD_LIBRARY_PATH"}
        self.popen = subprocess.Popen(
            [sys.executable, "-c", AGENT],
            cwd=ROOT,
            env=env | dict(machine.environment if machine else {}) | extra,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        self.popen.stdin.close()
        self.popen.wait(PATIENCE)
        self.popen.stdout.close()

    def ask(self, *request) -> dict:
        self.popen.stdin.write(json.dumps(request) + "\n")
        self.popen.stdin.flush()
        return json.loads(self.popen.stdout.readline())

    def inventory(self, settings: dict | None = None) -> tuple[list[Device], list[str]]:
        answer = self.ask("devices", settings or {})
        return [from_json(Device, d) for d in answer["devices"]], answer["problems"]

    def read(self, device: Device, settings: dict | None = None, memory: Path | str = "") -> tuple[dict, dict]:
        """Return readings by key and absences by name; each was held against READINGS."""
        answer = self.ask("read", to_json(device), settings or {}, str(memory))
        assert "facts" in answer, answer
        return checked(from_json({"Reading": Reading, "Absent": Absent}[kind], data) for kind, data in answer["facts"])

    def lost(self, device: Device) -> bool:
        """Return whether a device that cannot be read counts as lost."""
        return "lost" in self.ask("read", to_json(device), {})

    def refused(self, device: Device) -> str:
        return self.ask("read", to_json(device), {})["unavailable"]


def gpu(machine: StandIn, number: int, **fields) -> Device:
    """Return a GPU as the inventory gives it, without having asked."""
    fields = {"detail": {"bus_id": f"0000:1{number:x}:00.0"}} | fields
    return Device(uuid=machine.uuids[number], backend="cuda", index=number, model="NVIDIA H200", **fields)


def say(machine: StandIn, number: int | str, values: dict) -> None:
    for key, value in values.items():
        machine.set(number, key, value)
