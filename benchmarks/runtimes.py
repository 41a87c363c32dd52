"""Runs the fixed goldens through every runtime on this host's processor: one table of what each met bit for bit.

Each column is a process of its own in a worker's environment: a runtime under one instruction set. torch takes its
oneDNN, MKL and native kernels as it chooses. A cell counts the fixed cases whose result equals the golden that the host
makes from integers and whose digest ships with canaryd. "none": the runtime has no kernel. The last row is a control: a
result with one bit flipped must be found wrong in every format.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from benchmarks import common
from benchmarks.clean_runs import of_runtime
from canaryd.model import RUNTIMES, TORCH, Device
from canaryd.worker.numeric import faults
from canaryd.worker.numeric.cases import Case
from canaryd.worker.numeric.errors import is_refusal
from canaryd.worker.numeric.integers import digest
from canaryd.worker.numeric.stack import int8_pairs_saturate
from canaryd.worker.numeric.tensors import host_same_bits
from canaryd.worker.numeric.verify import FIXED_SEED
from canaryd.worker.runtime import interface
from probes import exact_attention, exact_integer, exact_matmul

PROBES = {"product": exact_matmul, "attention": exact_attention, "integer": exact_integer}
CONTROL = "one bit flipped on purpose: found"


def cases(device: Device) -> Iterator[tuple[str, Case, str]]:
    """Yield the row, the case and the shipped digest of every fixed case of a device."""
    for family, probe in PROBES.items():
        shipped = json.loads(probe.GOLDEN.read_text())
        for case in probe.fixed_cases(device):
            if not ("int32/wide" in case.name and int8_pairs_saturate()):
                form = case.name.split("/")[1 if family == "integer" else 0]
                yield f"{family} {form}", case, shipped[case.name]


def serve(name: str, instruction_set: str) -> None:
    """Be one process: print the stack, then each case with what became of it, as lines of JSON."""
    device = of_runtime(name)
    runtime = interface.of(device)
    with runtime.strict(device):
        flipped: set[str] = set()
        for row, case, shipped in cases(device):
            problem = case.build(FIXED_SEED)
            try:
                result = case.compute(runtime.upload(problem.operands, device), None)
            except Exception as error:
                if not is_refusal(error):
                    raise
                continue
            seen = runtime.download(result)
            right = host_same_bits(seen, problem.golden) and digest(seen) == shipped
            print(json.dumps({"row": row, "case": case.name, "right": right}), flush=True)
            if row not in flipped:
                flipped.add(row)
                bad = runtime.download(runtime.changed(result, faults.FAULTS["flip"].change, FIXED_SEED))
                print(json.dumps({"row": CONTROL, "right": not host_same_bits(bad, problem.golden)}), flush=True)
    print(json.dumps({"stack": runtime.stack(device, instruction_set)}), flush=True)


def column(python: str, runtime: str, instruction_set: str) -> tuple[dict[str, list[bool]], dict[str, Any]]:
    """Run one process; return row → whether each case was right, and the stack. Raises `RuntimeError` if it fails."""
    argv = [python, "-m", "benchmarks.runtimes", "--serve", runtime, "--instruction-set", instruction_set]
    env = common.worker_environment(instruction_set)
    done = subprocess.run(argv, cwd=common.ROOT, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{runtime} under {python}: {(done.stderr.strip().splitlines() or ['no reason'])[-1]}")
    rows: dict[str, list[bool]] = defaultdict(list)
    stack: dict[str, Any] = {}
    for line in map(json.loads, done.stdout.splitlines()):
        if "stack" in line:
            stack = line["stack"]
        else:
            rows[line["row"]].append(line["right"])
    return rows, stack


def main() -> None:
    """Run every column, write the table; end with 1 unless everything was right and every control was found."""
    parser = common.options(__doc__)
    for name in RUNTIMES:
        parser.add_argument(f"--{name}", default=sys.executable, metavar="PYTHON", help="its Python, else this one")
    parser.add_argument("--serve", choices=RUNTIMES, help=argparse.SUPPRESS)
    parser.add_argument("--instruction-set", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve, arguments.instruction_set)
        return
    sets = {TORCH: of_runtime(TORCH).instruction_sets, "mlx": ("strict", "tf32")}
    columns = {
        f"{runtime} {name}".strip(): column(getattr(arguments, runtime), runtime, name)
        for runtime in RUNTIMES
        for name in sets.get(runtime, ("",))
    }
    names = list(dict.fromkeys(row for rows, _ in columns.values() for row in rows if row != CONTROL))
    table = [[row, *(_cell(rows.get(row, [])) for rows, _ in columns.values())] for row in [*names, CONTROL]]
    clean = all(all(found) for rows, _ in columns.values() for found in rows.values())
    total = sum(len(found) for rows, _ in columns.values() for row, found in rows.items() if row != CONTROL)
    text = f"{total} results of fixed goldens, {'all right' if clean else 'NOT ALL RIGHT'}.\n\n"
    versions = {name: stack for name, (_, stack) in columns.items()}
    common.write(
        arguments.out,
        "runtimes",
        "The same fixed goldens through every runtime",
        common.machine(),
        text + common.table(["fixed goldens", *columns], table),
        {
            "clean": clean,
            "results": total,
            "columns": {n: rows for n, (rows, _) in columns.items()},
            "stacks": versions,
        },
    )
    sys.exit(0 if clean else 1)


def _cell(found: list[bool]) -> str:
    return f"{sum(found)} of {len(found)}" if found else "none"


if __name__ == "__main__":
    main()
