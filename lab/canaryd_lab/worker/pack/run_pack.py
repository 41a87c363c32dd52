"""Run a golden pack and write its results. Needs Python 3.8 or newer and numpy, or onnxruntime; no canaryd.

    python run_pack.py -o results.json [--runs 20] [--onnxruntime [PROVIDER]]

Exit status: 0 all results right, 2 at least one wrong, 3 nothing was run, 64 it could not be started.
`canaryd pack verify results.json --pack DIR` judges the file.
"""

import argparse
import hashlib
import json
import platform
import sys
import time
from pathlib import Path


def stop(why):
    """End the program with exit status 64 after printing a reason."""
    sys.stderr.write(why + "\n")
    sys.exit(64)


try:
    import numpy as np
except ImportError:
    stop("run_pack: numpy is missing in " + sys.executable + "; type: python -m pip install numpy")

HERE = Path(__file__).resolve().parent
KEPT = 64
"""Maximum number of wrong elements that are listed for a case; their total number is given too."""
STORED = {"float64": "<f8", "float32": "<f4", "float16": "<f2", "bfloat16": "<u2", "int8": "|i1", "int32": "<i4"}
BITS = {1: "|u1", 2: "<u2", 4: "<u4", 8: "<u8"}


class Damaged(Exception):
    """A file of the pack is not the file that the manifest describes."""


def canonical(document):
    """Return a document as the bytes that its digest covers: names sorted, no spaces, UTF-8."""
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode("utf-8")


def load(part):
    """Return one array of the pack; raise Damaged if its file differs from the manifest."""
    data = (HERE / part["file"]).read_bytes()
    if hashlib.sha256(data).hexdigest() != part["sha256"]:
        raise Damaged(part["file"] + " is damaged: copy the pack again")
    return np.frombuffer(data, STORED[part["dtype"]]).reshape(part["shape"])


def numpy_product(case):
    """Return a function without arguments that computes the product of a case with numpy."""
    a, b = (load(part) for part in case["operands"])
    if case["source"] == "bfloat16":  # numpy has none: the upper half of a float32
        a, b = ((x.astype("<u4") << 16).view("<f4") for x in (a, b))
        return lambda: rounded_to_bfloat16(a @ b)
    if case["source"] == "float16":
        a, b = a.astype("<f4"), b.astype("<f4")
        return lambda: (a @ b).astype("<f2")
    if case["source"] == "int8":
        a, b = a.astype("<i4"), b.astype("<i4")
    return lambda: a @ b


def rounded_to_bfloat16(values):
    """Return the bits of float32 values rounded to bfloat16, to nearest even."""
    raw = np.ascontiguousarray(values, "<f4").view("<u4").astype("<u8")
    narrow = (raw + 0x7FFF + ((raw >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FFF, narrow).astype("<u2")


class OnnxRuntime:
    """Runs the graphs of the pack through one execution provider."""

    def __init__(self, provider):
        """Load onnxruntime; exit if it is missing or lacks the provider."""
        try:
            import onnxruntime  # noqa: PLC0415  only where it is asked for
        except ImportError:
            stop("run_pack: onnxruntime is missing; type: python -m pip install onnxruntime")
        self.ort, self.provider, self.proven = onnxruntime, provider, True
        if provider not in onnxruntime.get_available_providers():
            offered = ", ".join(onnxruntime.get_available_providers())
            stop("run_pack: no provider " + provider + " here; name one of " + offered)

    def product(self, case):
        """Return a function without arguments that computes a case; raise ValueError if the provider cannot run it."""
        if case["graph"] is None:
            raise ValueError("the pack has no ONNX graph for this format")
        part = case["graph"]
        data = (HERE / part["file"]).read_bytes()
        if hashlib.sha256(data).hexdigest() != part["sha256"]:
            raise Damaged(part["file"] + " is damaged: copy the pack again")
        options = self.ort.SessionOptions()
        options.log_severity_level = 4
        options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
        both = [(self.provider, {"use_tf32": "0"} if self.provider == "CUDAExecutionProvider" else {})]
        if self.provider != "CPUExecutionProvider":
            both.append(("CPUExecutionProvider", {}))
        try:
            session = self.ort.InferenceSession(data, options, providers=both)
        except Exception as error:
            if type(error).__name__ not in ("NotImplemented", "InvalidGraph"):
                raise
            raise ValueError("no kernel for it: " + str(error).splitlines()[0][:120]) from error
        self._place(session)
        given = dict(zip("ab", (load(each) for each in case["operands"])))
        return lambda: session.run(["c"], given)[0]

    def _place(self, session):
        """Raise ValueError if a node ran on another provider; note it if nothing proves where the nodes ran."""
        if not hasattr(session, "get_provider_graph_assignment_info"):
            self.proven = False
            return
        ran = {part.ep_name for part in session.get_provider_graph_assignment_info() if list(part.get_nodes())}
        if not ran:
            self.proven = False
        elif ran != {self.provider}:
            raise ValueError(self.provider + " did not take it: it ran on " + ", ".join(sorted(ran)))


def run(case, compute, runs):
    """Compute a case `runs` times and compare each result bit for bit; return the case's entry in the result file."""
    expected = load(case["expected"])
    kind = BITS[expected.dtype.itemsize]
    want = expected.view(kind).reshape(-1)
    first, wrong_runs, found, total = None, 0, [], 0
    for _ in range(runs):
        got = np.ascontiguousarray(compute(), expected.dtype)
        bits = got.view(kind).reshape(-1)
        places = np.nonzero(bits != want)[0]
        if first is None or (len(places) and not wrong_runs):
            first = hashlib.sha256(got.tobytes()).hexdigest()
            found = [[int(i), "%x" % int(want[i]), "%x" % int(bits[i])] for i in places[:KEPT]]
            total = len(places)
        wrong_runs += bool(len(places))
    return {
        "name": case["name"],
        "status": "wrong" if wrong_runs else "right",
        "runs": runs,
        "wrong_runs": wrong_runs,
        "digest": first,
        "wrong_elements": total,
        "elements": found,
    }


def processor():
    """Return the system's name for its processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def main():
    """Run every case and write the result file."""
    parser = argparse.ArgumentParser(description="Run a golden pack.")
    parser.add_argument("-o", dest="out", type=Path, default=Path("results.json"), help="default: results.json")
    parser.add_argument("--runs", type=int, default=20, help="results of each case (default: 20)")
    parser.add_argument("--onnxruntime", nargs="?", const="CPUExecutionProvider", metavar="PROVIDER")
    options = parser.parse_args()
    if options.runs < 1:
        stop("run_pack: --runs %d: wanted 1 or more" % options.runs)
    manifest = json.loads((HERE / "pack.json").read_text(encoding="utf-8"))
    onnx = OnnxRuntime(options.onnxruntime) if options.onnxruntime else None
    cases = []
    for case in manifest["cases"]:
        try:
            cases.append(run(case, onnx.product(case) if onnx else numpy_product(case), options.runs))
        except ValueError as error:
            cases.append({"name": case["name"], "status": "skipped", "reason": str(error)})
    document = {
        "schema": "canaryd.pack-result/1",
        "pack": manifest["id"],
        "runner": "run_pack.py " + manifest["canaryd"],
        "runtime": ("onnxruntime " + onnx.ort.__version__ if onnx else "numpy " + np.__version__),
        "device": onnx.provider + " on " + processor() if onnx else processor(),
        "placement": "proven" if onnx is None or onnx.proven else "not proven",
        "demonstration": "",
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "cases": cases,
    }
    document["digest"] = hashlib.sha256(canonical(document)).hexdigest()
    options.out.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    count = {word: sum(c["status"] == word for c in cases) for word in ("wrong", "right", "skipped")}
    verdict = "WRONG RESULTS" if count["wrong"] else "ALL RIGHT" if count["right"] else "NOT TESTED"
    sys.stdout.write(
        "%s  %s\n%d cases right, %d wrong, %d skipped; written to %s\n"
        % (verdict, document["device"], count["right"], count["wrong"], count["skipped"], options.out)
    )
    return 2 if count["wrong"] else 0 if count["right"] else 3


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (OSError, Damaged) as error:
        stop("run_pack: %s" % error)
