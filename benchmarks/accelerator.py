"""Ask an accelerator what no machine without one can answer, in slices of a few minutes, most telling first.

Slice 1: `check --level standard` with the share of the time in which the device was busy; the kernels of each class of
products; the tests of graphs. Slice 2: products verified by comparison and by digests of their rows; FP8, FP4 and
grouped products. Slice 3: `check` beside a server that holds 95 % of the memory; the exact canary through an engine.
Every step writes its own files while it runs, and its line of `steps.jsonl` when it ends, so a cut loses the step that
it hits and no other. What is missing here is skipped, with the reason.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import common
from canaryd.probe import LEVELS

ENGINES = ("vllm",)
"""Engines that `benchmarks.engines` starts on a GPU; it says what is not installed."""
HELD = 0.95
"""Share of a device's memory that the imitation of a server holds."""
SAMPLES = 200
"""Milliseconds between two looks at how busy the device is."""
GRACE = 10.0
"""Seconds in which a step may end by itself after it was asked to."""
FORMATS = (
    *("float8_e4m3fn>bfloat16", "float8_e4m3fn>float32", "float8_e4m3fn-rowwise>bfloat16"),
    *("float8_e4m3fn-1x128>bfloat16", "float8_e4m3fn-128x128>bfloat16", "float8_e4m3fn-mxfp8>bfloat16"),
    *("float4_e2m1fn-mxfp4>bfloat16", "float4_e2m1fn-nvfp4>bfloat16", "bfloat16-grouped"),
)
"""Cases of `exact_matmul` that a version of canaryd may lack."""
SERVER = f"""
import json, sys, time, torch
device = sys.argv[1]
free, total = torch.cuda.mem_get_info(device)
held = torch.empty(max(0, int({HELD} * total) - (total - free)), dtype=torch.uint8, device=device)
a = torch.randn(2048, 2048, device=device, dtype=torch.float16)
print(json.dumps({{"held": held.nbytes, "total": total}}), flush=True)
while True:
    times, end = [], time.monotonic() + 1.0
    while time.monotonic() < end:
        begun = time.perf_counter()
        for _ in range(20):
            a @ a
        torch.cuda.synchronize(device)
        times.append(time.perf_counter() - begun)
    times.sort()
    p50, p99 = (times[len(times) * part // 100] for part in (50, 99))
    print(json.dumps({{"at": time.time(), "requests": len(times), "p50": p50, "p99": p99}}), flush=True)
"""
"""Program that imitates a server on the device `argv[1]`: it prints what it holds, then latencies of each second."""


@dataclass(frozen=True)
class Bench:
    """The device, the directory of the results, and the level of the whole check."""

    device: str
    out: Path
    work: Path
    """Directory for what is of no use afterwards: canaryd's record, and parts of a characterisation."""
    level: str

    @property
    def torch_name(self) -> str:
        """The device as torch calls it; "" where it is no device of CUDA or ROCm."""
        backend, _, number = self.device.partition(":")
        return f"cuda:{number or 0}" if backend in ("cuda", "rocm") else ""

    def canaryd(self, *words: str) -> list[str]:
        """Return a command of canaryd with a record of its own."""
        return [
            sys.executable,
            "-m",
            "canaryd",
            *words,
            "--device",
            self.device,
            "--state-dir",
            str(self.work / "state"),
        ]

    def run(
        self, name: str, argv: list[str], seconds: float, *, grace: float = GRACE, **environment: str
    ) -> dict[str, Any]:
        """Run a command with its output in files of the directory; return its exit status and duration.

        After `seconds` it is asked to end, and killed if it has not after `grace`.
        """
        begun, out, err = time.monotonic(), self.out / f"{name}.out", self.out / f"{name}.err"
        with out.open("wb") as stdout, err.open("wb") as stderr:
            child = subprocess.Popen(
                argv, cwd=common.ROOT, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, start_new_session=True,
                env=os.environ | environment,
            )  # fmt: skip
            try:
                for how in (signal.SIGTERM, signal.SIGKILL):
                    try:
                        child.wait(seconds)
                    except subprocess.TimeoutExpired:
                        os.killpg(child.pid, how)
                    seconds = grace
            finally:
                if child.poll() is None:  # this program is asked to end
                    os.killpg(child.pid, signal.SIGKILL)
                status = child.wait()
        return {"exit": status, "seconds": round(time.monotonic() - begun, 1), "files": [out.name, err.name]}


@contextlib.contextmanager
def busy(bench: Bench) -> Iterator[dict[str, Any]]:
    """Let nvidia-smi write how busy the device is, to busy.csv; yield a dictionary with the means after the block."""
    found: dict[str, Any] = {}
    tool = shutil.which("nvidia-smi") if bench.device.startswith("cuda") else None
    if tool is None:
        found["busy"] = "not measured: no nvidia-smi for this device"
        yield found
        return
    path, index = bench.out / "busy.csv", bench.device.partition(":")[2] or "0"
    fields = "utilization.gpu,power.draw,clocks.sm,memory.used"
    argv = [tool, f"--query-gpu={fields}", "--format=csv,noheader,nounits", f"--loop-ms={SAMPLES}", f"--id={index}"]
    with path.open("wb") as csv:
        child = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=csv, stderr=subprocess.STDOUT)
        try:
            yield found
        finally:
            child.terminate()
            child.wait()
    rows = [line.split(", ") for line in path.read_text().splitlines()]
    whole = [[float(value) for value in row] for row in rows if len(row) == 4 and row[0].isdigit()]
    found["samples"] = len(whole)
    if whole:
        means = [sum(column) / len(whole) for column in zip(*whole, strict=True)]
        found |= dict(
            zip(("busy_percent", "watts", "megahertz", "mebibytes"), (round(m, 1) for m in means), strict=True)
        )


def shares(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return for each run of a check: probe, results, and the share of its time that it says its device worked."""
    runs = [run for device in document["devices"] for run in device["runs"]]
    return [
        {
            "probe": run["probe"], "trials": run["trials"], "wrong": run["wrong_trials"], "seconds": run["seconds"],
            "device_share": round((run["device_seconds"] or 0.0) / max(run["seconds"], 1e-9), 4),
            "flops_per_second": (run["operations"] or 0.0) / max(run["seconds"], 1e-9),
        }
        for run in runs
    ]  # fmt: skip


def check(bench: Bench, seconds: float) -> dict[str, Any]:
    """Check the whole device, and measure how busy it is meanwhile."""
    with busy(bench) as found:
        done = bench.run("check", bench.canaryd("check", "--level", bench.level, "--json"), seconds)
    with contextlib.suppress(ValueError, KeyError):
        found["runs"] = shares(json.loads((bench.out / "check.out").read_text()))
    return {**done, **found}


def kernels(bench: Bench, seconds: float) -> dict[str, Any]:
    """Name the kernel of each class of products."""
    argv = bench.canaryd("characterise", "--part", "kernels", "--minutes", f"{seconds / 60:.2f}", "--json")
    return bench.run("kernels", [*argv, "--resume", str(bench.work / "kernels")], seconds + GRACE)


def graphs(bench: Bench, seconds: float) -> dict[str, Any]:
    """Run the tests of graphs that need a GPU, and of formats where this version has them."""
    names = ("test_repeating", "test_launches", "test_scaled", "test_grouped", "test_timed")
    files = [str(p) for n in names if (p := common.ROOT / f"tests/worker/numeric/{n}.py").exists()]
    argv = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", "-ra", "-v", *files]
    return bench.run("gpu-tests-graphs", argv, seconds, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")


def verified(bench: Bench, seconds: float) -> dict[str, Any]:
    """Measure products verified by comparison and by digest, of 4096 rows and columns, K 4096 and 10240."""
    if not bench.device.startswith("cuda"):
        return {"skipped": f"{bench.device}: of accelerators, benchmarks.verified_gemm measures those of CUDA alone"}
    words = ("--device", "cuda", "--dtype", "bfloat16", "--sizes", "4096", "--depth", "4096", "10240", "--pairs", "10")
    argv = [sys.executable, "-m", "benchmarks.verified_gemm", "--out", str(bench.out), *words]
    return bench.run("verified_gemm", argv, seconds)


def formats(bench: Bench, seconds: float) -> dict[str, Any]:
    """Check FP8, FP4 and grouped products; the document says what was skipped, and why."""
    cases = [word for case in FORMATS for word in ("--case", case)]
    argv = bench.canaryd("check", "--level", "standard", "--probe", "exact_matmul", "--json", *cases)
    done = bench.run("formats", argv, seconds)
    with contextlib.suppress(ValueError, KeyError):
        document = json.loads((bench.out / "formats.out").read_text())
        left_out = {s["case"]: s["reason"] for device in document["devices"] for s in device["skipped"]}
        done |= {"runs": shares(document), "skipped_cases": left_out}
    return done


def beside(bench: Bench, seconds: float) -> dict[str, Any]:
    """Check a device of which another process holds 95 % of the memory; that process must live on."""
    if not bench.torch_name:
        return {"skipped": f"{bench.device}: only of CUDA and ROCm devices the memory is filled"}
    path = bench.out / "server.jsonl"
    with path.open("wb") as rows, (bench.out / "server.err").open("wb") as errors:
        server = subprocess.Popen(
            [sys.executable, "-c", SERVER, bench.torch_name], stdin=subprocess.DEVNULL, stdout=rows, stderr=errors
        )
        try:
            time.sleep(15.0)  # it starts, and some seconds of its latencies alone
            begun = time.time()
            done = bench.run("check-beside", bench.canaryd("check", "--level", "quick", "--json"), seconds - 20.0)
            done |= {"check_began": begun, "server_lives": server.poll() is None}
        finally:
            server.kill()
            server.wait()
    lines = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    for name, is_beside in (("p99_alone", False), ("p99_beside", True)):
        done[name] = max((row["p99"] for row in lines[1:] if (row["at"] > begun) is is_beside), default=None)
    return {**done, "held": lines[:1]}


def engine(bench: Bench, seconds: float) -> dict[str, Any]:
    """Serve the exact canary through every engine that is installed here, and compare every answer."""
    words = ("--only", "served", "--engines", *ENGINES, "--served", "1", "--level", "quick")
    argv = [sys.executable, "-m", "benchmarks.engines", "--out", str(bench.out), *words]
    done = bench.run("engines", [*argv, "--minutes", f"{seconds / 60:.2f}"], seconds + GRACE)
    with contextlib.suppress(OSError, ValueError, KeyError):
        data = json.loads((bench.out / "engines-served.json").read_text())
        done |= {"served": data["served"], "not run": data["not run"]}
    return done


@dataclass(frozen=True)
class Step:
    """One question: the slice that it belongs to, the seconds that it may take, and the function that asks it."""

    slice: int
    seconds: float
    ask: Callable[[Bench, float], dict[str, Any]]


STEPS = (
    Step(1, 280, check),
    Step(1, 60, kernels),
    Step(1, 120, graphs),
    Step(2, 240, verified),
    Step(2, 220, formats),
    Step(3, 150, beside),
    Step(3, 300, engine),
)


def main() -> None:
    """Take the steps of one slice; exit with 1 if a step failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("device", help="as canaryd calls it: cuda:0")
    parser.add_argument("out", type=Path, help="folder for the results")
    parser.add_argument("--slice", type=int, required=True, choices=sorted({step.slice for step in STEPS}))
    parser.add_argument("--minutes", type=float, default=8.0, help="for the whole slice (default: %(default)s)")
    parser.add_argument("--level", choices=LEVELS, default="standard", help="of the whole check")
    words = parser.parse_args()
    words.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory() as work:
        bench = Bench(words.device, words.out.resolve(), Path(work), words.level)
        failed = take(bench, words.slice, time.monotonic() + 60.0 * words.minutes - GRACE)
    sys.exit(failed)


def take(bench: Bench, number: int, end: float) -> bool:
    """Take the steps of slice `number` until the clock reads `end`; return whether one failed."""
    failed = False
    for step in (step for step in STEPS if step.slice == number):
        name, seconds = step.ask.__name__, min(step.seconds, end - time.monotonic())
        try:
            done = {"skipped": "the minutes are over"} if seconds <= GRACE else step.ask(bench, seconds)
        except Exception as error:  # noqa: BLE001  the next step may still tell something
            done = {"exit": f"{type(error).__name__}: {error}"}
        row = {"slice": step.slice, "step": name, **done}
        with (bench.out / "steps.jsonl").open("a") as lines:
            lines.write(json.dumps(row) + "\n")
            lines.flush()
            os.fsync(lines.fileno())
        print(json.dumps(row), flush=True)
        failed = failed or row.get("exit", 0) != 0 or row.get("server_lives") is False
    return failed


if __name__ == "__main__":
    main()
