"""Measure which injected faults are found, how soon, and with how many false alarms, by canaryd and by other tools.

    python -m benchmarks.detection [--injections 6000] [--campaigns 40] [--seed 1]

- Every injection corrupts one result (or one operand, or one unit on the way) of an exact product. The C library's
  memcmp decides whether the result changed. Then canaryd compares it with the golden bit for bit, and each tool of
  `benchmarks/rivals.py` judges the same tensors. A fault that changed no bit of the result cannot be found in it; such
  faults are counted separately, with their reasons.
- `benchmarks/other_faults.py`: faults in canaryd's own gather and comparator, and in the memory.
- `benchmarks/time_to_detect.py`: intermittent faults of one core, found through the judge.

Everything runs on the CPU, in one thread. ai-chip-integrity takes part if it is installed (`pip install
ai-chip-integrity`).
"""

from __future__ import annotations

import sys
import time
from collections import Counter, defaultdict

from benchmarks import common, detection_report, injections, other_faults, rivals, time_to_detect
from benchmarks.detection_report import Row
from canaryd.worker.numeric.seeds import derive
from canaryd.worker.numeric.tensors import host_same_bits, same_bits, strict_switches, torch

CANARYD = "canaryd"
OTHERS = 30
"""Number of injections into products for each injection of one of the other faults (ours)."""
CLEAN = 5
"""Number of injections per clean result that every rule judges; no rule may call it wrong (ours)."""


def judge(
    rules: dict[str, rivals.Rule], trial: injections.Trial, struck: injections.Struck, form: str
) -> dict[str, bool]:
    """Return rule → whether it finds the result wrong. Rules that do not support the format are missing."""
    said = {name: rule(trial, struck, form) for name, rule in rules.items()}
    said[CANARYD] = not same_bits(struck.result, trial.problem.golden)
    return {name: found for name, found in said.items() if found is not None}


def run(count: int, seed: int) -> dict[tuple[str, str], Row]:
    """Inject at least one fault per class and format; return (fault class, format) → counts."""
    rows: dict[tuple[str, str], Row] = defaultdict(Row)
    rules = rivals.rules()
    total = sum(share for share, _ in injections.FAULTS.values())
    sources = injections.sources(seed)
    for form, trials in sources.items():
        for fault, (share, strike) in injections.FAULTS.items():
            row = rows[fault, form]
            draw = injections.draws(derive(seed, f"{form} {fault}"))
            for number in range(max(1, -(-count * share // (total * len(sources))))):
                trial = next(trials)
                if number % CLEAN == 0:
                    said = judge(rules, trial, injections.Struck(trial.clean, trial.clean), form)
                    row.clean.update(said.keys())
                    row.alarms.update(name for name, wrong in said.items() if wrong)
                struck = strike(trial, draw)
                row.injected += 1
                if host_same_bits(struck.result, trial.clean):
                    row.unobserved[injections.why_unobserved(trial, struck)] += 1
                    continue
                row.changed += 1
                said = judge(rules, trial, struck, form)
                row.judged.update(said.keys())
                row.found.update(name for name, wrong in said.items() if wrong)
    return dict(rows)


def summary(rows: dict[tuple[str, str], Row], by: int) -> dict[str, Row]:
    """Return the sums of the rows by fault class (`by` 0) or by format (1); the last entry "all" is the total."""
    sums: dict[str, Row] = defaultdict(Row)
    for key, row in rows.items():
        sums[key[by]].add(row)
        sums["all"].add(row)
    sums["all"] = sums.pop("all")
    return dict(sums)


def _plain(counts: Row | other_faults.Part) -> dict[str, object]:
    return {name: dict(value) if isinstance(value, Counter) else value for name, value in vars(counts).items()}


def main() -> None:
    """Run and write the report; exit with 1 if canaryd missed a changed bit or raised a false alarm."""
    parser = common.options(__doc__)
    parser.add_argument("--injections", type=int, default=6000, help="faults to inject (default: %(default)s)")
    parser.add_argument("--campaigns", type=int, default=40, help="campaigns per rate (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)  # the products are tiny: a pool of threads costs five times the work
    began = time.monotonic()
    facts = common.machine() | {"ai-chip-integrity": rivals.chip_integrity_version() or "not installed"}
    with strict_switches():
        rows = run(options.injections, options.seed)
        others = other_faults.run(options.injections // OTHERS, options.seed)
        campaigns = time_to_detect.run(options.campaigns, options.seed)
    facts["took"] = f"{(time.monotonic() - began) / 60:.0f} min"
    by_fault = summary(rows, 0)
    body = detection_report.report([CANARYD, *rivals.rules()], by_fault, summary(rows, 1), others, campaigns)
    data = {
        "injections": options.injections,
        "seed": options.seed,
        "rows": [{"fault": fault, "format": form, **_plain(row)} for (fault, form), row in rows.items()],
        "others": {name: _plain(part) for name, part in others.items()},
        "campaigns": [c.to_json() for c in campaigns],
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "detection.svg").write_text(detection_report.plot(by_fault, [CANARYD, *rivals.rules()], campaigns))
    common.write(options.out, "detection", "Detection of injected faults", facts, body, data)
    missed = by_fault["all"].changed - by_fault["all"].found[CANARYD]
    missed += sum(others[name].changed - others[name].found[CANARYD] for name in other_faults.STRIKES)
    missed += sum(c.missed + c.wrongly_named for c in campaigns)
    if missed or by_fault["all"].alarms[CANARYD] or any(c.false_alarms for c in campaigns):
        sys.exit(1)


if __name__ == "__main__":
    main()
