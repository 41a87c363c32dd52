"""Write fixed products of `exact_matmul` as a golden pack (docs/lab.md); results must have the shipped digests."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from canaryd import __version__
from canaryd.codec import canonical
from canaryd.facts import Exactness
from canaryd.probe import Skip
from canaryd.worker.numeric import stack
from canaryd.worker.numeric.integers import digest
from canaryd.worker.numeric.operands import Problem
from canaryd.worker.numeric.reproducer import exhibit
from canaryd.worker.numeric.tensors import bytes_of, need_torch
from canaryd.worker.numeric.verify import FIXED_SEED
from canaryd_lab.worker.pack import graph, wasm

SCHEMA = "canaryd.pack/1"
HERE = Path(__file__).parent
LICENSE = """SPDX-License-Identifier: Apache-2.0

This pack is part of canaryd: https://github.com/canaryd/canaryd
Its licence: https://www.apache.org/licenses/LICENSE-2.0
"""
CONTENTS = ("dense", "full", "permute", "cancel", "scaled", "band")
FORMATS = {
    "float32": ("fixed24", CONTENTS),
    "float64": ("fixed53", ("dense", "full", "cancel")),
    "float16": ("fixed11", CONTENTS),
    "bfloat16": ("fixed8", CONTENTS),
    "int8>int32": ("fixed", ("narrow", "wide")),
}
"""Format → (kind, contents). The format itself can hold all partial sums, so even a narrow accumulator rounds none.
float64 has only three contents, so that the pack stays below 5 MiB (ours)."""
NEEDS = {
    **{f: [f"products and sums that {f} holds are not rounded"] for f in ("float32", "float64", "float16", "bfloat16")},
    "int8": ["products of int8 are added in 32 bits or more, without saturation of pairs where the content is wide"],
}
"""Format of the operands → what a runtime must guarantee. It must also use no Strassen-like algorithm and change no
format."""


def names() -> Iterator[str]:
    """Yield the names of a pack's cases, which are fixed cases of `exact_matmul`."""
    for form, (kind, contents) in FORMATS.items():
        yield from (f"{form}/{content}/{kind}/nt@96x80x256" for content in contents)


def answer(arguments: Mapping[str, Any], progress: Callable[[float, str], None]) -> dict[str, Any]:
    """Write a pack into a new directory, completely or not at all; return its "id", "cases" and "bytes".

    Raises `Skip` if a golden made here does not have its digest in `goldens`, `ValueError` if writing fails.
    """
    need_torch()
    if sys.byteorder != "little":
        raise Skip("this host stores numbers with the highest byte first, and a pack has them the other way")
    directory = Path(arguments["directory"])
    fresh = directory.with_name(f".{directory.name}.{os.getpid()}")
    try:
        fresh.mkdir()
        manifest = _write(fresh, arguments, progress)
        fresh.rename(directory)
    except OSError as error:
        raise ValueError(f"{directory}: not written: {error.strerror}") from None
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    size = sum(file.stat().st_size for file in directory.iterdir())
    return {"id": manifest["id"], "cases": len(manifest["cases"]), "bytes": size}


def _write(out: Path, arguments: Mapping[str, Any], progress: Callable[[float, str], None]) -> dict[str, Any]:
    cases = []
    wanted = list(names())
    for number, name in enumerate(wanted):
        progress(number / len(wanted), name)
        problem = exhibit("exact_matmul", name, FIXED_SEED, stack.cpu()).problem
        shipped = arguments["goldens"].get(name, "")
        if digest(problem.golden) != shipped:
            raise Skip(f"{name}: made here it has digest {digest(problem.golden)}; canaryd ships {shipped or 'none'}")
        cases.append(_case(out, name, problem, shipped))
    manifest: dict[str, Any] = {
        "schema": SCHEMA,
        "canaryd": __version__,
        "license": "Apache-2.0",
        "byte_order": "little",
        "order": "rows",
        "cases": cases,
    }
    manifest["id"] = hashlib.sha256(canonical(manifest)).hexdigest()
    (out / "pack.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    (out / "index.html").write_text(_page(out, manifest), encoding="utf-8")
    (out / "run_pack.py").write_bytes((HERE / "run_pack.py").read_bytes())
    (out / "LICENSE").write_text(LICENSE, encoding="utf-8")
    return manifest


def _page(out: Path, manifest: Mapping[str, Any]) -> str:
    """Return one HTML page with everything: manifest, operands, expected results and the WebAssembly module."""
    files = [part["file"] for case in manifest["cases"] for part in (*case["operands"], case["expected"])]
    data = {name: base64.b64encode((out / name).read_bytes()).decode() for name in files}
    inside = {"manifest": manifest, "wasm": base64.b64encode(wasm.module()).decode(), "data": data}
    return (HERE / "page.html").read_text(encoding="utf-8").replace("/*PACK*/null", json.dumps(inside), 1)


def _case(out: Path, name: str, problem: Problem, shipped: str) -> dict[str, Any]:
    if problem.exactness is not Exactness.UNIVERSAL:
        raise Skip(f"{name}: its result is rounded, and not every runtime promises how")
    label = name.partition("/")[0]
    source, _, target = label.partition(">")
    target = target or source
    stem = name.partition("@")[0].replace("/", "-").replace(">", "-")
    a, b = problem.operands
    (M, K), N = a.shape, b.shape[1]
    model = graph.product(source, target, M, N, K)
    return {
        "name": name,
        "operation": "matmul",
        "source": source,
        "target": target,
        "exactness": problem.exactness.value,
        "needs": NEEDS[source],
        "operands": [_array(out, f"{stem}-{letter}.bin", tensor) for letter, tensor in zip("ab", (a, b), strict=True)],
        "expected": _array(out, f"{stem}-c.bin", problem.golden),
        "golden": shipped,
        "graph": None if model is None else _file(out, f"matmul-{label.replace('>', '-')}.onnx", model),
    }


def _array(out: Path, name: str, tensor: Any) -> dict[str, Any]:
    form = str(tensor.dtype).removeprefix("torch.")
    return {**_file(out, name, bytes_of(tensor)), "dtype": form, "shape": list(tensor.shape)}


def _file(out: Path, name: str, data: bytes) -> dict[str, Any]:
    (out / name).write_bytes(data)
    return {"file": name, "sha256": hashlib.sha256(data).hexdigest()}
