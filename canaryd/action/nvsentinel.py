"""Tell NVSentinel what becomes of this node's devices: `python3 -m canaryd.action.nvsentinel`, a process of its own.

It asks the gate as `canaryd gate` does, and sends a `HealthEvent` over NVSentinel's Unix socket where a device's level
changes (docs/enforcement.md). What NVSentinel does with it, and for how many nodes at a time, is set there.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Union

from canaryd.action.kubernetes import PATIENCE, ApiError
from canaryd.action.watch import Turns, asking, node_name, options
from canaryd.facts import beginning, printable
from canaryd.files import write_whole
from canaryd.judge.phrases import count
from canaryd.model import Cause, State, is_served
from canaryd.report import gate

AGENT, CHECK = "canaryd", "CanarydNumerics"
"""What NVSentinel's rules match on: who sends, and what was checked."""
CALL = "/datamodels.PlatformConnector/HealthEventOccurredV1"
SOCKET = "unix:///var/run/nvsentinel/nvsentinel.sock"
LONGEST = 512
"""Largest number of characters of a message: half of what NVSentinel's default keeps of a node's condition."""
SOUND = (State.HEALTHY, State.DEGRADED)
Value = Union[int, str, "Message"]
Message = Mapping[int, Union[Value, Sequence["Message"]]]
"""A message of protobuf: number of a field → its value, or the values of a repeated one."""


class Action(enum.IntEnum):
    """NVSentinel's `RecommendedAction`, as far as it is used."""

    NONE, CONTACT_SUPPORT, RUN_FIELDDIAG = 0, 5, 6


class Strategy(enum.IntEnum):
    """NVSentinel's `ProcessingStrategy`: act on an event, or keep it and do nothing."""

    EXECUTE_REMEDIATION, STORE_ONLY = 1, 2


class Told(str, enum.Enum):
    """What an event says about a device."""

    HEALTHY, SUSPECT, FATAL = "healthy", "suspect", "fatal"
    """Suspect: also a fault of something else than the hardware. NVSentinel keeps it and does nothing."""


class Transition(NamedTuple):
    """A device whose level changed."""

    device: str
    """`Device.uuid`."""
    name: str
    level: Told
    before: Told | None
    """What NVSentinel was told last; None if that is not known."""
    message: str

    def event(self, node: str, now: float) -> Message:
        """Return the `HealthEvent`. One that clears has the strategy of the event that it clears.

        NVSentinel separates what a node's condition says about several devices by ";": behind one nothing would clear.
        """
        fatal, gpu = self.level is Told.FATAL, not self.device.startswith("CPU-")
        stored = Told.SUSPECT in (self.level, self.before) and not fatal
        action = Action.RUN_FIELDDIAG if gpu else Action.CONTACT_SUPPORT
        return {
            1: 1,  # version
            2: AGENT,
            3: "GPU" if gpu else "CPU",  # componentClass
            4: CHECK,
            5: fatal,  # isFatal
            6: self.level is Told.HEALTHY,  # isHealthy
            7: beginning(printable(self.message).replace(";", ","), LONGEST),
            8: action if fatal else Action.NONE,  # recommendedAction
            10: [{1: "GPU_UUID" if gpu else "CPU", 2: self.device}],  # entitiesImpacted: type, value
            12: {1: int(now)},  # generatedTimestamp: seconds
            13: node,
            16: Strategy.STORE_ONLY if stored else Strategy.EXECUTE_REMEDIATION,
        }


def encoded(message: Message) -> bytes:
    """Return a message in protobuf's encoding, in which a number that is missing is 0."""
    parts: list[bytes] = []
    for number, value in message.items():
        repeated: Sequence[Value] = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
        for each in repeated:
            if isinstance(each, int):
                parts += [_varint(number << 3), _varint(each)] if each else []
            else:
                data = each.encode() if isinstance(each, str) else encoded(each)
                parts += [_varint(number << 3 | 2), _varint(len(data)), data]
    return b"".join(parts)


def _varint(number: int) -> bytes:
    low, rest = number & 0x7F, number >> 7
    return bytes([low | 0x80]) + _varint(rest) if rest else bytes([low])


def send(socket: str, events: Sequence[Message]) -> None:
    """Send events in one call. Raises `ApiError`."""
    try:
        import grpc
    except ImportError as error:
        raise ApiError("grpcio is missing: pip install 'canaryd[nvsentinel]'") from error
    with grpc.insecure_channel(socket) as channel:
        try:
            channel.unary_unary(CALL)(encoded({1: 1, 2: events}), timeout=PATIENCE)
        except grpc.RpcError as error:
            raise ApiError(f"{socket}: {error.code().name} {error.details()}") from error


@dataclass(kw_only=True)
class Emitter(Turns):
    """The events of one node."""

    node: str
    socket: str
    memory: Path
    """A file with what was told about each device: neither a restart nor a new pod tells it again."""
    levels: dict[str, Told | None] | None = field(init=False)
    """Device → what was told, or None where that is not known: then it is told once that it is healthy and proven."""

    def __post_init__(self) -> None:
        try:
            kept = json.loads(self.memory.read_bytes())
            self.levels = {device: Told(level) if level else None for device, level in kept.items()}
        except (OSError, ValueError, AttributeError):
            self.levels = None

    def act(self, answer: gate.Answer, silence: str, now: float) -> Iterator[str]:
        """Send the changes since the last answer, and yield a line for each."""
        changes = list(self._changes(answer))
        if silence:
            yield from (f"would send: {each.name} {each.level.value} (log only: {silence})" for each in changes)
            return
        if not changes:
            return
        send(self.socket, [each.event(self.node, now) for each in changes])
        self.levels = (self.levels or {}) | {each.device: each.level for each in changes}
        yield from (f"sent: {each.level.value}: {each.message}" for each in changes)
        try:
            write_whole(self.memory, json.dumps(self.levels).encode())
        except OSError as error:
            yield f"{self.memory} cannot be written: {error.strerror}; after a restart events are sent again"

    def _changes(self, answer: gate.Answer) -> Iterator[Transition]:
        items = {item.device: item for item in answer.devices if not is_served(item.device)}
        if self.levels is None and items:
            self.levels = dict.fromkeys(items)
        told = self.levels or {}
        for device, item in items.items():
            before = told.get(device, Told.HEALTHY)
            if (level := _level(item, before)) and level is not before:
                yield Transition(device, item.name, level, before, str(item))
        gone = [device for device, before in told.items() if device not in items and before is not Told.HEALTHY]
        for device in gone if answer.decision == gate.PASS else ():
            message = f"{device} is gone; {count(len(items), 'device')} here, healthy and proven"
            yield Transition(device, device, Told.HEALTHY, told[device], message)


def _level(item: gate.Item, before: Told | None) -> Told | None:
    """Return the level after an answer. Only a proof ends a fatal one, and what is unknown changes nothing."""
    if (item.state, item.cause) == (State.FAULTY, Cause.HARDWARE):
        return Told.FATAL
    if item.state in SOUND and (item.decision == gate.PASS or before is Told.SUSPECT):
        return Told.HEALTHY
    if item.state in (State.SUSPECT, State.FAULTY) and before is not Told.FATAL:
        return Told.SUSPECT
    return before


def main(words: Sequence[str] | None = None) -> None:
    """Send the events of this node, for ever."""
    parser = options("nvsentinel", "Tell NVSentinel what becomes of this node's devices.")
    parser.add_argument("--socket", default=SOCKET, metavar="ADDRESS", help="of the platform connector")
    parser.add_argument("--memory", type=Path, required=True, metavar="FILE", help="what was told; keep it")
    given = parser.parse_args(words)
    node = node_name(parser)
    Emitter(node=node, ask=asking(given.config), socket=given.socket, memory=given.memory).run(given.every)


if __name__ == "__main__":
    main()
