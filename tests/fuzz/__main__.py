"""Runs fuzz targets: `python -m tests.fuzz --help`. Guided by coverage with atheris; docs/testing.md says how."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
REGRESSIONS = HERE / "regressions"
TARGETS = sorted(path.stem for path in (HERE / "targets").glob("*.py"))
MOST_MEMORY = 2048
"""MiB resident above which an input counts as a finding."""
HANGS = 120
"""Seconds of the clock after which an input counts as hung; the targets themselves measure processor time."""
PATIENCE = 100
"""Times as long as its processor time a target may take by the clock: it runs at the lowest priority."""
LONGEST = 8192
"""Bytes of an input; targets repeat parts of one up to a megabyte themselves (material.stretched)."""


def main() -> int:
    """Run the targets one after the other, each in a process of its own; 1 where one has found something."""
    parser = argparse.ArgumentParser(prog="scripts/fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(TARGETS)}; default: all")
    parser.add_argument("--seconds", type=int, default=600, help="processor time for each target (600)")
    parser.add_argument(
        "--out", type=Path, help="where corpora, findings, logs and summary.tsv go; default: a fresh one"
    )
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    unknown = sorted(set(options.targets) - set(TARGETS))
    if unknown:
        parser.error(f"{unknown[0]}: no target; there are {', '.join(TARGETS)}")
    out = (options.out or Path(tempfile.mkdtemp(prefix="canaryd-fuzz-"))).resolve()
    if options.inside:
        fuzz(options.targets[0], out / options.targets[0], options.seconds)
    if importlib.util.find_spec("atheris") is None:
        print("atheris is not installed in this interpreter: use scripts/fuzz, or pip install atheris", file=sys.stderr)
        return 2
    found = []
    for name in options.targets or TARGETS:
        found += [] if campaign(name, out, options.seconds) else [name]
        report(out, options.seconds)
    print(f"findings: {', '.join(found) or 'none'}; {out / 'summary.tsv'}, {out / 'fuzz.md'}")
    return int(bool(found))


def campaign(name: str, out: Path, seconds: int) -> bool:
    """Fuzz one target in a process of its own, log it, and add a line to summary.tsv; return whether it was clean."""
    module = importlib.import_module(f"tests.fuzz.targets.{name}")
    corpus = out / name / "corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    for number, data in enumerate(seeds(module, name)):
        (corpus / f"seed-{number:04d}").write_bytes(data)
    begun, before = time.monotonic(), _spent()
    log = out / name / "log"
    with log.open("wb") as stream:
        argv = [sys.executable, "-m", "tests.fuzz", name, "--inside", "--seconds", str(seconds), "--out", str(out)]
        done = subprocess.run(argv, cwd=ROOT, stdout=stream, stderr=subprocess.STDOUT, check=False)
    clock, spent = time.monotonic() - begun, _spent() - before
    text = log.read_text(errors="replace")
    runs = re.findall(r"stat::number_of_executed_units: +(\d+)", text) or re.findall(r"^#(\d+)\t", text, re.MULTILINE)
    covered = re.findall(r"cov: (\d+) ft: (\d+)", text)
    clean = done.returncode == 0
    told = re.findall(r"^(\w+(?:Error|Exception): .*|==\d+== ERROR: .*)$", text, re.MULTILINE)
    said = "" if clean else next(iter(told), f"status {done.returncode}")
    edges, features = covered[-1] if covered else ("0", "0")
    fields = (
        name,
        f"{spent:.0f}",
        f"{clock:.0f}",
        runs[-1] if runs else "0",
        edges,
        features,
        "clean" if clean else "FOUND",
        said[:200],
    )
    summary = out / "summary.tsv"
    if not summary.exists():
        summary.write_text(
            "target\tprocessor seconds\tclock seconds\texecutions\tedges\tfeatures\tresult\tfirst line\n"
        )
    with summary.open("a") as stream:
        stream.write("\t".join(fields) + "\n")
    print("  ".join(fields), flush=True)
    return clean


def _spent() -> float:
    """Processor time of all children so far, in seconds."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def report(out: Path, seconds: int) -> None:
    """Write what summary.tsv says as benchmarks/results/fuzz.md has it: the newest campaign of each target."""
    head, *rows = [line.split("\t") for line in (out / "summary.tsv").read_text().splitlines()]
    newest = {row[0]: row for row in rows}
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, check=False)
    version = importlib.metadata.version("atheris")
    short = [name for name in TARGETS if name not in newest or float(newest[name][1]) < seconds]
    about = (
        f"`scripts/fuzz --seconds {seconds}` at {commit.stdout.decode().strip() or 'an unknown commit'},"
        f" {time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime())}; Python {platform.python_version()}, atheris {version},"
        f" {os.cpu_count()} cores ({platform.machine()}), lowest priority. Edges and features are libFuzzer's, of"
        " canaryd's own code. [What is fuzzed, and what must hold](../../docs/testing.md)."
    )
    lines = [
        "# Fuzzing",
        "",
        about,
        "",
        f"Targets that have not run {seconds} s of processor time: {', '.join(short) or 'none'}.",
        f"Targets with a finding: {', '.join(n for n, row in newest.items() if row[6] != 'clean') or 'none'}.",
        "",
        "| " + " | ".join(head[:7]) + " |",
        "|" + "---|" * 7,
        *("| " + " | ".join(row[:7]) + " |" for row in newest.values()),
    ]
    (out / "fuzz.md").write_text("\n".join(lines) + "\n")


def seeds(module: object, name: str) -> list[bytes]:
    """Return what a target begins with: its seeds, and every input that once was a finding."""
    kept = sorted((REGRESSIONS / name).glob("*"))
    return [*module.seeds(), *(file.read_bytes() for file in kept)]  # type: ignore[attr-defined]


def fuzz(name: str, place: Path, seconds: int) -> None:
    """Fuzz one target in this process, which ends with it."""
    import atheris

    with atheris.instrument_imports(include=["canaryd"]):
        module = importlib.import_module(f"tests.fuzz.targets.{name}")
    sys.setrecursionlimit(1000)
    os.chdir(place)
    findings = place / "findings"
    findings.mkdir(exist_ok=True)
    flags = [
        *(
            f"-max_total_time={PATIENCE * seconds}",
            f"-timeout={HANGS}",
            f"-rss_limit_mb={MOST_MEMORY}",
            f"-max_len={LONGEST}",
        ),
        *(f"-artifact_prefix={findings}/", "-print_final_stats=1", "-detect_leaks=0"),
    ]
    threading.Thread(target=_end_after, args=(seconds,), daemon=True).start()
    atheris.Setup([sys.argv[0], *flags, str(place / "corpus")], module.target)
    atheris.Fuzz()


def _end_after(seconds: float) -> None:
    while time.process_time() < seconds:
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGUSR1)  # libFuzzer ends gracefully: statistics, status 0


if __name__ == "__main__":
    sys.exit(main())
