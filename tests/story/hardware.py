"""Simulated devices and servers: what a worker would compute on them and read from them."""

from __future__ import annotations

import hashlib
import itertools
import math
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from canaryd.facts import (
    Comparison,
    Doubt,
    Evidence,
    Exactness,
    Place,
    Reading,
    Recording,
    Skipped,
    Subject,
    WrongMemory,
)
from canaryd.judge.wrong import WIDTH
from canaryd.model import Device, Outcome, Run
from canaryd.supervisor.protocol import RunRequest
from tests.places import line, place
from tests.story.catalogue import (
    ANSWER,
    ANSWERED,
    ANSWERS,
    ASKED,
    CASES,
    COLUMNS,
    DAY,
    KERNELS,
    LINKS,
    MEMORY,
    OUTCOMES,
    PATTERNS,
    RECORDED,
    REPEATS,
    ROWS,
    SELFTEST,
    SERVED,
    SHAPE,
    START,
    TILES,
    WORDS,
)
from tests.story.format import Fault, Names, Noise, Part, Story, listed, numbered


def _digest(*words: object) -> str:
    return hashlib.blake2b(repr(words).encode(), digest_size=8).hexdigest()


@dataclass
class Chip:
    """What a device is and how it is just now."""

    name: str
    part: Part
    index: int
    uuid: str
    bus_id: str
    stack: dict[str, str]
    kernel: str
    present: bool
    speed: float
    card: str = ""
    heat: float = 0.0
    lost: bool = False
    counters: dict[str, float] = field(default_factory=dict)
    readings: dict[str, float] = field(default_factory=dict)

    @property
    def device(self) -> Device:
        """It as an inventory finds it."""
        bus = {"bus_id": self.bus_id} if self.part.backend == "cuda" else {}
        return Device(
            uuid=self.uuid,
            backend=self.part.backend,
            index=self.index,
            model=self.part.model,
            weak_identity=self.part.weak_identity,
            instruction_sets=self.part.instruction_sets,
            detail={**bus, "driver": self.stack.get("driver", ""), "cores": str(self.part.cores)},
            torch_index=self.index if self.part.reached and self.part.backend != "cpu" and not self.card else None,
            card=self.card,
        )


@dataclass
class Server:
    """A model server as it is just now."""

    parts: tuple[str, ...]
    clients: int = 0
    """How many others it serves."""
    links: dict[str, str] = field(default_factory=dict)
    """Links of its chain that are others than in the beginning."""
    started: float = START
    """When it was started last, in seconds since the epoch."""
    launch: int = 0
    """How often it was started again."""


class Hardware:
    """One machine of a story: what its workers would find, compute and read."""

    def __init__(self, story: Story, number: int, seed: int) -> None:
        """Make the machine; nothing is started on it."""
        self.story, self.machine, self.seed = story, story.hosts[number], seed
        self.rng = random.Random(f"{seed}/{number}")
        self.drawn: Counter[object] = Counter()
        self.ran_on: dict[str, str] = {}
        """Run → the name of its device."""
        self.now, self.round, self.count = START, 0, 0
        self.fired: dict[int, int] = {}
        self.served: dict[str, Server] = {}
        self.chips: dict[str, Chip] = {}
        self.names: dict[str, str] = {}
        for part in self.machine.devices:
            for name in numbered(part):
                self._place(name, part, number)
        for name, parts in self.machine.servers.items():
            self.names[f"endpoint:{name}"] = f"endpoint:{name}@{number}"
            self.served[f"endpoint:{name}@{number}"] = Server(parts)

    def _place(self, name: str, part: Part, number: int) -> None:
        index = sum(c.part.backend == part.backend for c in self.chips.values())
        salt = (self.story.salt,) if self.story.salt else ()
        uuid = f"{'CPU' if part.backend == 'cpu' else 'GPU'}-{_digest(number, name, *salt)}"
        self.chips[name] = Chip(
            name=name,
            part=part,
            index=index,
            uuid=uuid,
            bus_id=f"0000:{index + 16:02x}:00.0",
            stack=dict(part.stack),
            kernel=part.kernel,
            present=part.present,
            speed=part.speed,
            card=self.chips[part.card].uuid if part.card else "",
        )
        self.names[uuid] = name

    @property
    def cores(self) -> int:
        """How many cores make goldens."""
        return next((c.part.cores for c in self.chips.values() if c.part.backend == "cpu"), 2)

    def of(self, names: Names) -> list[Chip]:
        """Return the named devices of this machine."""
        return [c for n, c in self.chips.items() if names == "*" or n in listed(names, ())]

    def servers(self, names: Names) -> list[Server]:
        """Return the named endpoints of this machine."""
        return [s for n, s in self.served.items() if names == "*" or n in listed(names, ())]

    def temperature(self, chip: Chip, at: float) -> float:
        """Return a device's temperature: warmest at 15:00."""
        daily = chip.part.swing * math.cos(2 * math.pi * ((at % DAY) / DAY - 15 / 24))
        return chip.part.temperature + daily + chip.heat

    def turn(self, *what: object) -> None:
        """Draw from now on for this alone (a device and what it runs), in a story whose devices draw apart."""
        if self.story.apart:
            key = self.round, *what
            self.drawn[key] += 1
            self.rng = random.Random(repr((self.seed, key, self.drawn[key])))

    def _active(self, fault: Fault, name: str, stack: Mapping[str, str], temperature: float) -> bool:
        return (
            (fault.device == "*" or name in listed(fault.device, ()))
            and fault.after <= self.round < fault.until
            and self.fired.get(id(fault), 0) < fault.times
            and temperature > fault.temperature_above
            and fault.stack.items() <= stack.items()
        )

    def _struck(self, fault: Fault, chances: int = 1) -> int:
        """Return in how many of so many chances a fault happens."""
        most = fault.times - self.fired.get(id(fault), 0)
        hits = min(most, _binomial(self.rng, chances, fault.probability))
        self.fired[id(fault)] = self.fired.get(id(fault), 0) + hits
        return hits

    def compute(self, request: RunRequest, lane: str) -> Run:
        """Return what a run of a probe gives on a device as it is now."""
        started, name = self.now, self.names[request.device.uuid]
        self.now += 2.0
        self.count += 1
        accused = self.ran_on.get(request.confirms, request.confirms)
        self.turn(name, request.spec.name, lane, request.cases, request.intensity, accused)
        chip = self.chips.get(name)
        stack = {**chip.stack, **({"instruction_set": lane} if lane else {})} if chip is not None else {}
        heat = self.temperature(chip, started) if chip is not None else 0.0
        probe = request.spec.name
        faults = [
            f
            for f in self.story.faults
            if f.probe in ("", probe)
            and f.instruction_set in ("", lane)
            and (not f.intensity or request.intensity in listed(f.intensity, ()))
            and self._active(f, name, stack, heat)
        ]
        run = Run(
            id=f"{int(started * 1000):012x}-{self.count:06x}",
            device=request.device.uuid,
            probe=probe,
            probe_version=request.spec.version,
            started=started,
            seconds=2.0,
            outcome=Outcome.COMPLETED,
            level=request.level,
            seed=request.seed,
            instruction_set=lane,
            stack=stack,
            environment={"temperature": f"{heat:.0f}"},
            repro=f"canaryd check --probe {probe} --device {request.device.name} --seed {request.seed}",
            drill=request.drill,
            confirms=request.confirms,
            trigger=request.trigger,
            cases=request.cases,
            intensity=request.intensity,
        )
        self.ran_on[run.id] = name
        # A fault of the whole run is one of numeric probes, unless the story names another.
        broken = [f for f in faults if f.kind in OUTCOMES and (f.probe or not request.spec.telemetry)]
        for fault in broken:
            if self._struck(fault):
                return replace(run, outcome=Outcome(fault.kind), detail=f"simulated: {fault.kind}")
        if any(f.kind == "nothing" and not request.spec.telemetry and self._struck(f) for f in faults):
            return replace(run, skipped=(Skipped(case="all", reason="no kernel for this device"),))
        if probe == LINKS:
            return replace(run, comparisons=tuple(self._sent(request)))
        if probe == SERVED:
            return replace(run, comparisons=tuple(self._exact_answers(request, faults)))
        if chip is None:
            return replace(run, **self._answers(request, self.served[name], faults), baselining=request.baselining)
        if request.spec.telemetry:
            if chip.lost:
                return replace(run, outcome=Outcome.ERRORED, detail="GPU is lost: NVML says so")
            return replace(run, readings=tuple(self._telemetry(chip, heat)), stack={})
        if probe == SELFTEST:
            word = "fail" if any(self._struck(f) for f in faults if f.kind == "selftest") else "pass"
            labels = {"tool": "dcgmi", "test": "memory"}
            return replace(run, readings=(Reading(name=SELFTEST, value=word, labels=labels),), stack={})
        if probe == RECORDED:
            found = tuple(self._recordings(request, chip, faults))
            told = tuple(self._times(chip))
            return replace(run, recordings=found, readings=told, baselining=request.baselining)
        told = self._sweep if probe == MEMORY else self._comparisons
        comparisons = tuple(told(request, chip, [f for f in faults if bool(f.cell) is (probe == MEMORY)], lane))
        trials = sum(c.trials for c in comparisons)
        return replace(run, comparisons=comparisons, readings=(Reading(name="trials", value=trials, unit="1"),))

    def _sent(self, request: RunRequest) -> Iterator[Comparison]:
        """Yield what went over every link of a group: between devices, or between the cores of a processor.

        A fault of one device, or with a place, is of all its links; of two devices, of the link between them.
        """
        group = [self.names[d.uuid] for d in (request.device, *request.peers)]
        ends = group if request.peers else [f"core {n}" for n in range(self.cores)]
        for pair in itertools.permutations(range(len(ends)), 2):
            clean = Comparison(
                case="int64/walking/send@64",
                shape="words=64",
                seed=request.seed,
                exactness=Exactness.UNIVERSAL,
                place=Place(unit="link", numbers=pair),
            )
            between = [ends[n] for n in pair]
            faults = [f for f in self.story.faults if f.kind == "link" and f.after <= self.round < f.until]
            for fault in faults:
                named = [fault.place] if fault.place else listed(fault.device, ends)
                if all(n in between for n in named) and self._struck(fault):
                    clean = replace(clean, wrong_trials=1, evidence=self._evidence(fault, clean, ""))
            yield clean

    def _exact_answers(self, request: RunRequest, faults: Sequence[Fault]) -> Iterator[Comparison]:
        """Yield the comparisons of a served exact canary. A fault with bits is wrong in the same way each time."""
        found = []
        for case in (c for c in ASKED if not request.cases or c in request.cases):
            clean = Comparison(case=case, shape="8 prompts", seed=1, exactness=Exactness.UNIVERSAL, trials=ANSWERS)
            for fault in (f for f in faults if f.kind == "exact" and f.case in ("", case)):
                if hits := self._struck(fault, ANSWERS):
                    seen = replace(self._evidence(fault, clean, ""), bits={}, repeats=3, repeats_wrong=3)
                    seen = replace(seen, repeats_alike=3 if fault.bits else 0)
                    clean = replace(clean, wrong_trials=hits, evidence=seen, characterised=not fault.bits)
            found.append(clean)
        proven = any(c.wrong_trials < c.trials for c in found)
        yield from (replace(c, characterised=c.characterised or proven) for c in found)

    def _comparisons(self, request: RunRequest, chip: Chip, faults: Sequence[Fault], lane: str) -> Iterator[Comparison]:
        part = chip.part
        places = ["device"]
        if part.backend == "cpu":
            places = [f"all {part.cores} threads", *(f"core {n}" for n in range(part.cores))]
        sizes = f"@{part.sizes[min(self.round, len(part.sizes) - 1)]}" if part.sizes else ""
        turns = ("", "#1g") if part.graphs <= self.round else ("",)
        asked = {case.partition("#")[0] for case in request.cases}  # what erred in a graph is repeated without one, too
        for name in CASES:
            fresh = ((f"{name}{sizes}{turn}", request.seed, "fresh") for turn in turns)
            for case, seed, which in ((name, 1, "fixed"), *fresh):
                for where in places if not asked or case.partition("#")[0] in asked else ():
                    clean = Comparison(
                        case=case,
                        shape=SHAPE,
                        seed=seed,
                        exactness=Exactness.UNIVERSAL,
                        place=place(where),
                        trials=part.trials,
                        characterised=part.characterised or case in part.rounds_nothing,
                    )
                    mine = [
                        f
                        for f in faults
                        if f.case in ("", case)
                        and f.seed in ("", which)
                        and (f.kind == "golden" or f.place in ("", where))
                    ]
                    yield from self._compared(request, clean, mine, lane)

    def _sweep(self, request: RunRequest, chip: Chip, faults: Sequence[Fault], lane: str) -> Iterator[Comparison]:
        """Yield what the patterns of a sweep of memory find: a fault is a word."""
        for case in (c for c in PATTERNS if not request.cases or c in request.cases):
            clean = Comparison(
                case=case,
                shape=f"words={WORDS}",
                seed=request.seed,
                exactness=Exactness.UNIVERSAL,
                place=place("memory"),
                characterised=chip.part.characterised,
            )
            found = list(self._compared(request, clean, [f for f in faults if f.case in ("", case)], lane))
            for c in found:
                cell = next((f.cell for f in faults), "flipped")
                memory = WrongMemory(cells={cell: 1}, rose=1, fell=0, allocation=8 * WORDS, offset=64, address=1 << 40)
                yield replace(c, evidence=replace(c.evidence, memory=memory, lines={})) if c.evidence else c

    def _compared(
        self, request: RunRequest, clean: Comparison, faults: Sequence[Fault], lane: str
    ) -> Iterator[Comparison]:
        """Yield what one upload gives: a wrong golden is not compared with, a wrong comparator is told beside it."""
        found, wrong = clean, 0
        for fault in faults:
            if fault.kind == "golden":
                maker = f"core {self.rng.randrange(self.cores)}"
                maker = fault.place if fault.place.startswith("cores ") else maker
                if fault.place in ("", maker) and self._struck(fault):
                    evidence = self._evidence(fault, clean, lane)
                    two = maker.startswith("cores ")
                    doubt = Doubt.MADE_TWICE if two else Doubt.ARITHMETIC
                    wrong_golden = replace(clean, subject=Subject.HOST, place=place(maker), doubt=doubt)
                    yield replace(wrong_golden, trials=1, wrong_trials=1, evidence=evidence)
                    return
            if fault.kind == "comparator" and self._struck(fault):
                evidence = replace(self._evidence(fault, clean, lane), wrong=0, first=(), bits={}, lines={})
                yield replace(clean, subject=Subject.COMPARATOR, trials=1, wrong_trials=1, evidence=evidence)
            hits = 0
            if fault.kind == "exact":
                hits = self._struck(fault, clean.trials)
            elif fault.kind == "upload":
                hits = clean.trials * self._struck(fault)
            if hits:
                wrong = min(clean.trials, wrong + hits)
                found = replace(clean, wrong_trials=wrong, evidence=self._evidence(fault, clean, lane))
        if request.drill and clean.case == CASES[0]:
            drilled = Fault(kind="exact", bits=(3,), row=1, column=1)
            found = replace(clean, wrong_trials=clean.trials, evidence=self._evidence(drilled, clean, lane))
        yield found

    def _evidence(self, fault: Fault, comparison: Comparison, lane: str) -> Evidence:
        """Return one wrong element, shaped as `canaryd.worker.numeric.evidence.collect` shapes it."""
        rng = self.rng
        if fault.same:
            rng = random.Random(_digest(fault.same, comparison.case, comparison.seed, lane))
        row = rng.randrange(ROWS) if fault.row is None else fault.row
        column = rng.randrange(COLUMNS) if fault.column is None else fault.column
        bits = fault.bits or tuple(sorted(rng.sample(range(32), rng.choice((1, 2, 2, 3)))))
        width = WIDTH.get(comparison.case.partition("/")[0], 32)
        bits = tuple(sorted({bit % width for bit in bits}))
        digits = width // 4
        golden = int(_digest(comparison.case, comparison.seed, row, column)[:digits], 16)
        observed = golden ^ sum(1 << bit for bit in bits)
        lines = {"row": line(row), "column": line(column)}
        flipped = f"only bit {bits[0]} is flipped" if len(bits) == 1 else f"bits {', '.join(map(str, bits))} flipped"
        return Evidence(
            wrong=1,
            total=ROWS * COLUMNS,
            first=(((row, column), f"0x{golden:0{digits}x}", f"0x{observed:0{digits}x}"),),
            bits={str(bit): 1 for bit in bits},
            zeroed=int(observed == 0),
            nonfinite=0,
            lines=lines,
            pattern=f"element [{row}, {column}]: {flipped}",
        )

    def _recordings(self, request: RunRequest, chip: Chip, faults: Sequence[Fault]) -> Iterator[Recording]:
        chain = {"dtype": "bfloat16", "kernel": chip.kernel}
        for case in (c for c in KERNELS if not request.cases or c in request.cases):
            noise = next((n for n in self.story.noise if n.case == case), Noise(case=case))
            source = _digest(chip.part.model, sorted(chip.stack.items()), sorted(chain.items()), case)
            right = random.Random(source)
            tiles = [right.gauss(0.0, 1.0) for _ in range(TILES)]
            for _ in range(REPEATS if request.baselining else 1):
                values = list(tiles)
                mode = self.rng.choices(range(len(noise.modes)), noise.modes)[0]
                if mode:
                    values[mode % TILES] += 1e-3 * mode
                if noise.nondeterministic:
                    values = [v + self.rng.gauss(0.0, noise.sigma) for v in values]
                for fault in faults:
                    if fault.kind == "recorded" and fault.case in ("", case) and self._struck(fault):
                        # Without bits it is another departure each time; with bits always the same one.
                        whose = fault.same or (chip.name if self.story.apart else chip.uuid)
                        own = random.Random(_digest(whose, case, fault.bits))
                        values[(own if fault.bits else self.rng).randrange(TILES)] += (
                            own if fault.bits else self.rng
                        ).uniform(0.2, 0.4)
                yield Recording(case=case, digest=_digest(source, values), chain=chain, values=tuple(values))

    def _times(self, chip: Chip) -> Iterator[Reading]:
        for case in KERNELS:
            seconds = 1e-3 / chip.speed * math.exp(self.rng.gauss(0.0, 0.01))
            yield Reading(name="kernel_seconds", value=seconds, unit="seconds", labels={"case": case})

    def _answers(self, request: RunRequest, server: Server, faults: Sequence[Fault]) -> dict[str, Any]:
        """Return recordings and readings of an endpoint: the usual words, unless a fault has it say others."""
        software = self.chips[server.parts[0]].stack.get("server", "vllm 0.31")
        chain = {"checkpoint": "c0ffee", "prompt": "9a3f", "server": software, "client": "1", **server.links}
        condition = ("loaded" if server.clients else "idle") if self.machine.gauges else ""
        cases = [ANSWER, *(f"completions/question{n}/fresh" for n in range(1, self.machine.questions))]
        times = self.machine.answers if request.baselining else 1
        found = [
            self._answer(
                case,
                chain,
                "loaded" if self.machine.batches and 2 * number > times else condition,
                faults,
                server.launch if self.machine.tunes else 0,
            )
            for number in range(times)
            for case in cases
            if not request.cases or case in request.cases
        ]
        told: list[Reading] = []
        if self.machine.starts:
            told.append(Reading(name="endpoint_start_time_seconds", value=server.started, unit="seconds"))
        if self.machine.repeats:
            told.append(Reading(name="endpoint_repeats", value=self.machine.repeats))
        return {"recordings": tuple(found), "readings": tuple(told)}

    def _answer(
        self, case: str, chain: Mapping[str, str], condition: str, faults: Sequence[Fault], tuned: int
    ) -> Recording:
        noise = next((n for n in self.story.noise if n.case == case), Noise(case=case))
        tokens, right = ANSWERED, (case, sorted(chain.items()))
        values = [-0.1 - 0.01 * (int(_digest(t, right)[:4], 16) % 9) for t in tokens]
        mode = self.rng.choices(range(len(noise.modes)), noise.modes)[0]
        values[-1] -= 1e-3 * mode
        values = [v - 5e-7 * tuned for v in values]
        if self.machine.batches and condition == "loaded":
            values = [v - 1e-3 * self.rng.random() for v in values]
        for fault in (f for f in faults if f.case in ("", case)):
            if fault.kind == "recorded" and self._struck(fault):
                values[2] -= 0.3 + (0.0 if fault.bits else self.rng.random())
                tokens = tokens if self.machine.logprobs else (*tokens[:2], "was", *tokens[3:])
            if fault.kind == "garbage" and self._struck(fault):
                tokens = ("!",) * len(tokens)
        said = Recording(
            case=case,
            digest=_digest(tokens),
            chain=chain,
            condition=condition,
            text=" ".join(tokens),
            finish="length",
        )
        if not self.machine.logprobs:
            return said
        digest, margins = _digest(tokens, values), (2.0,) * len(tokens)
        return replace(said, digest=digest, tokens=tokens, values=tuple(values), margins=margins)

    def _telemetry(self, chip: Chip, heat: float) -> Iterator[Reading]:
        if chip.part.backend == "cpu":
            yield Reading(name="load_average", value=1.0, unit="1")
            base = {"machine_check_exceptions_total": 0.0}
        else:
            yield Reading(name="temperature_celsius", value=heat, unit="celsius", labels={"sensor": "core"})
            chip.counters["energy_joules_total"] = chip.counters.get("energy_joules_total", 0.0) + 500 * 1800.0
            base = {
                "ecc_errors_total{kind=corrected,location=dram}": 0.0,
                "ecc_errors_total{kind=uncorrected,location=dram}": 0.0,
                "throttle_seconds_total{reason=hw_thermal}": 0.0,
                "row_remap_pending": 0.0,
                "row_remap_failed": 0.0,
                "persistence_mode": 1.0,
            }
        for key, value in {**base, **chip.counters, **chip.readings}.items():
            if not math.isnan(value):
                yield _reading(key, value)


def _reading(key: str, value: float) -> Reading:
    name, _, inside = key.removesuffix("}").partition("{")
    labels = dict(pair.split("=", 1) for pair in inside.split(",") if pair)
    return Reading(name=name, value=value, unit="1", labels=labels)


def _binomial(rng: random.Random, trials: int, probability: float) -> int:
    """Return successes among trials: by gaps, so that a million trials at one in a million cost a few steps."""
    if probability >= 1.0:
        return trials
    if probability <= 0.0:
        return 0
    hits, at = 0, 0
    while True:
        at += int(math.log(1.0 - rng.random()) / math.log1p(-probability)) + 1
        if at > trials:
            return hits
        hits += 1
