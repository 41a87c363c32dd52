"""Compute recorded cases from fresh uploads: their bits, their errors compared with the bounds, their kernel names."""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from canaryd.facts import (
    FINGERPRINT,
    TRIALS,
    Comparison,
    Doubt,
    Evidence,
    Exactness,
    Place,
    Reading,
    Recording,
    Skipped,
    Subject,
    reading_key,
)
from canaryd.probe import Absent, Fact
from canaryd.worker.numeric import cases as numeric_cases
from canaryd.worker.numeric import error_bounds, evidence, verify
from canaryd.worker.numeric.characterised import is_characterised
from canaryd.worker.numeric.errors import is_refusal
from canaryd.worker.numeric.integers import combine
from canaryd.worker.numeric.launches import Launches
from canaryd.worker.numeric.seeds import derive
from canaryd.worker.numeric.serving_kernels import MAKER, Kernel
from canaryd.worker.numeric.session import Session
from canaryd.worker.numeric.tensors import (
    bytes_of,
    form_of,
    host_same_bits,
    on_core,
    synchronize,
    timed,
    torch,
    torch_device,
)

GRID = 8
"""Number of tiles along both axes of a result, viewed as a matrix whose columns are the last axis. A recording has the
mean of each tile."""
STEP = {"cpu": 64, "other": 512}
"""Alignment in bytes of torch's allocations, on the CPU and elsewhere. A fresh upload starts at a multiple of this."""
OFFSETS = 16
"""Number of different start addresses of an upload, one `STEP` apart."""


@dataclass(frozen=True)
class NotRun:
    """A case that was not run, and the reason."""

    kernel: Kernel
    reason: str
    is_late: bool = False
    """True if the device supports the case and only the time ran out; False if the device refused it."""


class Made:
    """The operands and error bounds of a case, made on a host core, and statistics of the results so far."""

    def __init__(self, kernel: Kernel, core: int) -> None:
        self.kernel = kernel
        self.core = core  # of the host, which made it
        self.operands = kernel.build(kernel.seed)
        self.prompt = fingerprint(*self.operands)
        self.bounded: error_bounds.Bounded | None = None
        """Known once a result has shown its format."""
        self.seconds: list[float] = []
        self.ratios: list[float | None] = []
        """Largest error over its bound, per float32 result; None where one was not finite."""
        self.digests: set[str] = set()
        self.clean = self.broken = 0


class Recorder:
    """Computes recorded cases on one device during one run, and collects their results."""

    def __init__(self, session: Session, settings: str) -> None:
        self.session = session
        self.settings = settings
        """Fingerprint of the switches."""
        self._made: dict[str, Made] = {}
        self._not_run: dict[str, NotRun] = {}
        """By case."""
        self._launches = Launches(session)

    def missed(self, kernel: Kernel) -> None:
        """Note that a case was not run because the time ran out."""
        self._not_run[kernel.name] = NotRun(kernel, self.session.ctx.late(kernel.name).reason, is_late=True)

    def refused(self, kernel: Kernel) -> bool:
        """Return whether a case was not run, because the device does not support it or the time ran out."""
        return kernel.name in self._not_run

    def record(self, kernel: Kernel, turn: int) -> Iterator[Recording | Comparison]:
        """Compute a case once from a new upload; yield a recording, and a comparison if an error bound is broken.

        No recording is yielded if an earlier one had the same bits, except while a baseline is learnt.
        """
        made = self._made.get(kernel.name)
        if made is None:
            maker = self.session.makers(kernel.name, self._place(kernel, turn))[0]
            with on_core(maker):
                made = Made(kernel, maker)
        try:
            result = self._compute(made, turn)
        except Exception as error:
            if kernel.name in self._made or not is_refusal(error):
                raise
            self._not_run[kernel.name] = NotRun(kernel, numeric_cases.why_refused(self.session.ctx.device, error))
            return
        self._made[kernel.name] = made
        with on_core(made.core):
            found, ratio = self._judge(made, result)
            if result.dtype is torch.float32:
                made.ratios.append(ratio)
            recording = self._recording(made, result)
        # One recording per distinct result is enough, except while a baseline is learnt, which counts them.
        if self.session.ctx.baselining or recording.digest not in made.digests:
            yield recording
        made.digests.add(recording.digest)
        if found is None:
            made.clean += 1
        else:
            made.broken += 1
            yield self._broken(made, found, turn)

    def summary(self) -> Iterator[Fact]:
        """Yield the comparisons without errors, the cases that were not run, and readings of each kind of kernel."""
        for made in self._made.values():
            if made.clean:
                yield self._comparison(made, trials=made.clean)
        yield from self._skipped()
        self._launches.keep()
        if why := self._launches.unnamed:
            yield Absent(name="kernels", reason=why)
        yield self._fingerprint()
        yield Reading(name=TRIALS, value=sum(m.clean + m.broken for m in self._made.values()), unit="1")
        yield from self.session.times()
        kernels = [*(made.kernel for made in self._made.values()), *(case.kernel for case in self._not_run.values())]
        for kind in dict.fromkeys(kernel.kind for kernel in kernels):
            yield from self._readings(kind)

    def _place(self, kernel: Kernel, turn: int) -> int | None:
        """Return the core on which a CPU computes the case, another one for each turn; None for other devices.

        The core must not change the bits. The number of threads that share a sum can, so no case uses all cores.
        """
        ctx = self.session.ctx
        if ctx.device.backend != "cpu":
            return None
        cores = self.session.cores
        return cores[(derive(ctx.seed, f"core of {kernel.name}") + turn) % len(cores)]

    def _upload(self, made: Made, turn: int) -> tuple[Any, ...]:
        device = torch_device(self.session.ctx.device)
        step, fresh = STEP["cpu" if device.type == "cpu" else "other"], []
        for number, tensor in enumerate(made.operands):
            seed = derive(self.session.ctx.seed, f"offset {turn} {number} of {made.kernel.name}")
            offset = seed % OFFSETS * step
            raw = torch.empty(offset + tensor.nbytes, dtype=torch.uint8, device=device)
            fresh.append(raw[offset:].view(tensor.dtype).view(tensor.shape).copy_(tensor))
        return tuple(fresh)

    def _compute(self, made: Made, turn: int) -> Any:
        """Return a result as a host tensor; the first call of a case runs twice, because loading kernels takes time."""
        ctx, kernel = self.session.ctx, made.kernel
        with on_core(self._place(kernel, turn)), self.session.on_device():
            operands = self._upload(made, turn)
            self.session.injector.before(kernel.name, operands, 0)
            if not made.seconds:
                kernel.compute(*operands)
            call, wait = partial(kernel.compute, *operands), partial(synchronize, ctx.device)
            result, seconds = timed(ctx.device, call, wait)
        made.seconds.append(seconds)
        self.session.injector.after(kernel.name, result)
        self._launches.ask(kernel.name, lambda: kernel.compute(*operands))
        return result.cpu()

    def _judge(self, made: Made, result: Any) -> tuple[Evidence | None, float | None]:
        """Return (evidence if a bound is broken, else None; largest error / bound, None if a result is not finite)."""
        form = form_of(result.dtype)
        if made.bounded is None:
            made.bounded = made.kernel.judged(made.operands, form)
        reference, tolerance = made.bounded
        ratio = (result.to(torch.float64) - reference).abs() / tolerance
        largest = float(ratio.max())  # of values with a NaN among them: NaN
        if largest <= 1.0:
            return None, largest
        expected = reference.to(form.dtype)
        return evidence.collect(expected, torch.where(ratio <= 1.0, expected, result)), (
            largest if bool(torch.isfinite(ratio).all()) else None
        )

    def _recording(self, made: Made, result: Any) -> Recording:
        kernel = made.kernel
        chain = {"dtype": kernel.dtype, "prompt": made.prompt, "settings": self.settings, "client": MAKER}
        if names := self._launches.known.get(kernel.name):
            chain["kernel"] = names
        return Recording(case=kernel.name, digest=fingerprint(result), chain=chain, values=tiles(result))

    def _broken(self, made: Made, found: Evidence, turn: int) -> Comparison:
        """Return the comparison for a broken bound; it accuses the host if a second core makes other inputs."""
        assert made.bounded is not None
        first = self._compute(made, turn)
        second = self.session.makers(made.kernel.name, made.core, self._place(made.kernel, turn))[0]
        with on_core(second):
            twin = Made(made.kernel, second)
            bounded = made.kernel.judged(twin.operands, form_of(first.dtype))
        pairs = zip((*made.operands, *made.bounded), (*twin.operands, *bounded), strict=True)
        if not all(host_same_bits(a, b) for a, b in pairs):
            text = "this host computed operands and reference twice and got two results"
            doubt = self._comparison(made, wrong=1, found=evidence.collect_nothing(made.bounded[0], text))
            place = self.session.place_of_makers(made.core, second)
            return replace(doubt, subject=Subject.HOST, place=place, doubt=Doubt.MADE_TWICE)
        again = [first, *(self._compute(made, turn) for _ in range(verify.FRESH_UPLOADS - 1))]
        count = sum(1 for result in again if self._judge(made, result)[0])
        found = replace(found, repeats=len(again), repeats_wrong=count)
        place = self.session.place_of(self._place(made.kernel, turn))
        return replace(self._comparison(made, wrong=1, found=found), place=place)

    def _comparison(self, made: Made, *, trials: int = 1, wrong: int = 0, found: Evidence | None = None) -> Comparison:
        kernel, device = made.kernel, self.session.ctx.device
        return Comparison(
            case=kernel.name,
            shape=kernel.name.partition("@")[2],
            seed=verify.FIXED_SEED,
            exactness=Exactness.MARGIN,
            place=Place(unit="device" if device.backend != "cpu" else ""),
            trials=trials,
            wrong_trials=wrong,
            evidence=found,
            characterised=is_characterised(device, "float32"),
        )

    def _fingerprint(self) -> Reading | Absent:
        """Return one integer for the bits of all cases that this device supports, or the reason why there is none.

        Identical devices with equal settings must get equal fingerprints. There is none if the bits of a case vary
        within a run: leaving the case out in only some runs would make their fingerprints differ.
        """
        varied = [m.kernel.name for m in self._made.values() if len(m.digests) > 1]
        if self.session.ctx.cases or not self._made or any(case.is_late for case in self._not_run.values()):
            why = "not all cases of this device were run, so the fingerprint would differ from complete runs"
            return Absent(name=FINGERPRINT, reason=why)
        if varied:
            why = f"bits vary: {varied[0]} gave more than one result, as did {len(varied)} cases in all"
            return Absent(name=FINGERPRINT, reason=why)
        digests = [(name, digest) for name, made in self._made.items() for digest in made.digests]
        return Reading(name=FINGERPRINT, value=combine(digests), unit="1")

    def _skipped(self) -> Iterator[Skipped]:
        """Yield the cases that were not run; one entry stands for a whole format or kernel if none of its cases ran."""
        groups: dict[tuple[str, str, bool], list[str]] = {}
        for case in self._not_run.values():
            groups.setdefault((_group(case.kernel.name), case.reason, case.is_late), []).append(case.kernel.name)
        ran = {_group(name) for name in self._made}
        for (group, reason, late), names in groups.items():
            whole = group not in ran and len([1 for other, *_ in groups if other == group]) == 1
            yield from (Skipped(case=name, reason=reason, late=late) for name in ([group] if whole else names))

    def _readings(self, kind: str) -> Iterator[Reading | Absent]:
        """Yield two readings of one kind of kernel: its largest ratio of error to bound, and the time of a call.

        The time is the mean of the cases' medians. The ratio is of float32 results only: one rounding to 16 bits uses
        the whole bound in every healthy run.
        """
        labels = {"kind": kind}
        mine = [m for m in self._made.values() if m.kernel.kind == kind]
        late = any(case.is_late for case in self._not_run.values() if case.kernel.kind == kind)
        if late or not mine or self.session.ctx.cases:
            why = "not all cases of this kind were run, so its {} would not be comparable"
            yield Absent(name=reading_key("recorded_error_ratio", labels), reason=why.format("largest error"))
            yield Absent(name=reading_key("kernel_seconds", labels), reason=why.format("mean"))
            return
        ratios = [ratio for m in mine for ratio in m.ratios]
        finite = [ratio for ratio in ratios if ratio is not None]
        if finite and len(finite) == len(ratios):
            yield Reading(name="recorded_error_ratio", value=max(finite), unit="1", labels=labels)
        else:
            why = "a result is not finite" if ratios else "no case of this kind has a float32 result"
            yield Absent(name=reading_key("recorded_error_ratio", labels), reason=why)
        mean = statistics.fmean(statistics.median(m.seconds) for m in mine)
        yield Reading(name="kernel_seconds", value=mean, unit="seconds", labels=labels)


def _group(name: str) -> str:
    """Return the first parts of a case's name: kind and format; for attention: kind, kernel and format."""
    parts = name.partition("@")[0].split("/")
    return "/".join(parts[: 3 if parts[0] == "sdpa" else 2])


def fingerprint(*tensors: Any) -> str:
    """Return a digest, 16 hex digits, of the bytes of contiguous host tensors (SHA-256, which hardware speeds up)."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
        found.update(bytes_of(tensor))
    return found.hexdigest()[:16]


def tiles(result: Any) -> tuple[float | None, ...]:
    """Return the means of `GRID` x `GRID` tiles of a host tensor, row by row; None for a mean that is not finite."""
    matrix = result.to(torch.float64).reshape(-1, result.shape[-1])
    rows, columns = (min(GRID, size) for size in matrix.shape)
    means = [float(t.mean()) for row in matrix.tensor_split(rows, 0) for t in row.tensor_split(columns, 1)]
    return tuple(mean if math.isfinite(mean) else None for mean in means)
