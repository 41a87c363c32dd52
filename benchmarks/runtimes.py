"""Run the fixed goldens with every runtime on this host's processor: a table of the goldens that each one gave exactly.

Each column is a process with a worker's environment: a runtime with one instruction set. For torch a cell names the
library that computed, as MKL and oneDNN log it ("own": neither of them). numpy and the two columns of Chromium compute
a golden pack (docs/lab.md), which has some of the products only; canaryd judges their result files. A cell counts the
fixed cases whose result equals the golden that the host makes from integers and whose digest ships with canaryd.
"none": no kernel. The last row is a control: a result with one bit flipped must be found wrong.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from canaryd_lab.compare import pack
from canaryd_lab.worker.pack import export

from benchmarks import common
from benchmarks.clean_runs import of_runtime
from canaryd.model import RUNTIMES, TORCH, Device
from canaryd.worker.numeric import faults
from canaryd.worker.numeric.cases import Case
from canaryd.worker.numeric.errors import is_refusal
from canaryd.worker.numeric.integers import digest
from canaryd.worker.numeric.stack import int8_pairs_saturate
from canaryd.worker.numeric.tensors import host_same_bits, torch
from canaryd.worker.numeric.verify import FIXED_SEED
from canaryd.worker.runtime import interface
from probes import exact_attention, exact_integer, exact_matmul
from tests import browser

PROBES = {"product": exact_matmul, "attention": exact_attention, "integer": exact_integer}
CONTROL = "one bit flipped on purpose: found"
VERBOSE = {"MKL_VERBOSE": "1", "ONEDNN_VERBOSE": "1"}
"""Environment variables with which both libraries print a line for each call (oneMKL and oneDNN developer guides)."""
LIBRARIES = {
    "MKL": re.compile(r"^MKL_VERBOSE [A-Z]*GEMM", re.MULTILINE),
    "oneDNN": re.compile(r"^onednn_verbose,.*exec,cpu,(?:matmul|inner_product)", re.MULTILINE),
}
WITHOUT_ONEDNN = "oneDNN off"


def cases(device: Device) -> Iterator[tuple[str, Case, str]]:
    """Yield (row of the table, case, shipped digest) for every fixed case of a device."""
    for family, probe in PROBES.items():
        shipped = json.loads(probe.GOLDEN.read_text())
        for case in probe.fixed_cases(device):
            if not ("int32/wide" in case.name and int8_pairs_saturate()):
                form = case.name.split("/")[1 if family == "integer" else 0]
                yield f"{family} {form}", case, shipped[case.name]


def printed(work: Callable[[], Any]) -> tuple[Any, str]:
    """Return (result of `work`, text that libraries wrote to standard output during `work`)."""
    sys.stdout.flush()
    library, held = ctypes.CDLL(None), os.dup(1)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 1)
        try:
            result = work()
            library.fflush(None)
        finally:
            os.dup2(held, 1)
            os.close(held)
        file.seek(0)
        return result, file.read().decode(errors="replace")


def serve(name: str, instruction_set: str) -> None:
    """Run all cases of one column; print a line of JSON for each case, then one for the software."""
    device = of_runtime(name)
    runtime = interface.of(device)
    without = instruction_set == WITHOUT_ONEDNN
    with runtime.strict(device), torch.backends.mkldnn.flags(enabled=False) if without else nullcontext():
        flipped: set[str] = set()
        for row, case, shipped in cases(device):
            problem = case.build(FIXED_SEED)
            try:
                operands = runtime.upload(problem.operands, device)
                result, log = printed(lambda: case.compute(operands, None))  # noqa: B023  called here
            except Exception as error:
                if not is_refusal(error):
                    raise
                continue
            seen = runtime.download(result)
            right = host_same_bits(seen, problem.golden) and digest(seen) == shipped
            by = [library for library, line in LIBRARIES.items() if line.search(log)] if name == TORCH else []
            by = by or (["own"] if name == TORCH and row.startswith("product") else [])
            print(json.dumps({"row": row, "case": case.name, "right": right, "by": by}), flush=True)
            if row not in flipped:
                flipped.add(row)
                bad = runtime.download(runtime.changed(result, faults.FAULTS["flip"].change, FIXED_SEED))
                print(json.dumps({"row": CONTROL, "right": not host_same_bits(bad, problem.golden)}), flush=True)
    print(json.dumps({"stack": runtime.stack(device, instruction_set)}), flush=True)


class Column:
    """One column of the table: row → whether each case was right, row → libraries that computed it; the software."""

    def __init__(self) -> None:
        """Begin without any case."""
        self.rows: dict[str, list[bool]] = defaultdict(list)
        self.by: dict[str, list[str]] = defaultdict(list)
        self.stack: dict[str, Any] = {}

    def cell(self, row: str) -> str:
        """Return the text of the cell in a row, e.g. "3 of 3, MKL", or "none"."""
        found = self.rows.get(row, [])
        by = f", {' and '.join(sorted(set(self.by[row])))}" if self.by[row] else ""
        return f"{sum(found)} of {len(found)}{by}" if found else "none"


def column(python: str, runtime: str, instruction_set: str) -> Column:
    """Run `serve` in a process and return its column. Raises `RuntimeError` if the process fails."""
    argv = [python, "-m", "benchmarks.runtimes", "--serve", runtime, "--instruction-set", instruction_set]
    env = common.worker_environment("native" if instruction_set == WITHOUT_ONEDNN else instruction_set)
    env |= VERBOSE if runtime == TORCH else {}
    done = subprocess.run(argv, cwd=common.ROOT, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{runtime} under {python}: {(done.stderr.strip().splitlines() or ['no reason'])[-1]}")
    found = Column()
    for line in (json.loads(text) for text in done.stdout.splitlines() if text.startswith("{")):
        if "stack" in line:
            found.stack = line["stack"]
        else:
            found.rows[line["row"]].append(line["right"])
            found.by[line["row"]] += line.get("by", [])
    return found


def judged(results: Path, directory: Path, software: str) -> Column:
    """Return the column for a result file of a pack, as `canaryd pack verify` judges it."""
    document, found = json.loads(results.read_text()), Column()
    verdict = pack.judge(results, directory)
    wrong = {case["name"] for case in verdict.wrong}
    for case in document["cases"]:
        if case["status"] != "skipped":
            found.rows[f"product {case['name'].partition('/')[0]}"].append(case["name"] not in wrong)
    found.stack = {"runtime": document["runtime"], "device": document["device"], "software": software}
    return found


def packed(python: str) -> dict[str, Column]:
    """Return name → column for a golden pack: numpy, Chromium with WebAssembly, Chromium with WebGPU in software."""
    with tempfile.TemporaryDirectory() as folder:
        there = Path(folder)
        made, page = there / "pack", there / "pack" / "index.html"
        export.answer({"directory": str(made), "goldens": json.loads(exact_matmul.GOLDEN.read_text())}, lambda *_: None)
        subprocess.run([python, made / "run_pack.py", "-o", there / "numpy.json"], capture_output=True, check=True)
        chromium = subprocess.run([browser.program(), "--version"], capture_output=True, text=True, check=True)
        software = chromium.stdout.strip()
        _, wasm = browser.browse(f"{page.as_uri()}#run&unit=wasm", there / "wasm", *browser.PROCESSOR)
        _, webgpu = browser.by_webgpu(page, there / "webgpu")
        columns = {
            "numpy": judged(there / "numpy.json", made, "numpy"),
            "Chromium WebAssembly": judged(wasm, made, software),
            "Chromium WebGPU (SwiftShader)": judged(webgpu, made, software),
        }
        if not columns["Chromium WebGPU (SwiftShader)"].stack["runtime"].startswith("WebGPU"):
            raise RuntimeError("this Chromium has no WebGPU in software: the page took WebAssembly")
        _, bad = browser.browse(f"{page.as_uri()}#run&unit=wasm&fault=flip", there / "bad", *browser.PROCESSOR)
        _, worse = browser.by_webgpu(page, there / "worse", "#run&fault=flip")
        for name, results in (("WebAssembly", bad), ("WebGPU (SwiftShader)", worse)):
            shown = [case for case in json.loads(results.read_text())["cases"] if case["status"] == "wrong"]
            columns[f"Chromium {name}"].rows[CONTROL].append(len(shown) == 1)
        return columns


def main() -> None:
    """Run every column and write the report; exit with 1 unless all cases were right and all controls were found."""
    parser = common.options(__doc__)
    for name in RUNTIMES:
        parser.add_argument(f"--{name}", default=sys.executable, metavar="PYTHON", help="its Python, else this one")
    parser.add_argument("--serve", choices=RUNTIMES, help=argparse.SUPPRESS)
    parser.add_argument("--instruction-set", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve, arguments.instruction_set)
        return
    sets = {TORCH: (*of_runtime(TORCH).instruction_sets, WITHOUT_ONEDNN), "mlx": ("strict", "tf32")}
    columns = {
        f"{runtime} {name}".strip(): column(getattr(arguments, runtime), runtime, name)
        for runtime in RUNTIMES
        for name in sets.get(runtime, ("",))
    }
    columns |= packed(arguments.onnx)  # its numpy is ONNX Runtime's
    names = list(dict.fromkeys(row for each in columns.values() for row in each.rows if row != CONTROL))
    table = [[row, *(each.cell(row) for each in columns.values())] for row in [*names, CONTROL]]
    clean = all(all(found) for each in columns.values() for found in each.rows.values())
    total = sum(len(found) for each in columns.values() for row, found in each.rows.items() if row != CONTROL)
    text = f"{total} results of fixed goldens, {'all right' if clean else 'NOT ALL RIGHT'}.\n\n"
    versions = {name: each.stack for name, each in columns.items()}
    common.write(
        arguments.out,
        "runtimes",
        "The same fixed goldens through every runtime",
        common.machine(),
        text + common.table(["fixed goldens", *columns], table),
        {
            "clean": clean,
            "results": total,
            "columns": {name: each.rows for name, each in columns.items()},
            "libraries": {
                name: {row: sorted(set(by)) for row, by in each.by.items() if by} for name, each in columns.items()
            },
            "stacks": versions,
        },
    )
    sys.exit(0 if clean else 1)


if __name__ == "__main__":
    main()
