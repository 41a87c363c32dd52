"""Measure the size of the source: `weigh.py` prints the figures, `--check` fails if one grew, `--write` lowers them.

tools/weight.json holds the largest allowed value of each figure. A commit that makes a figure smaller writes the new
figures; a commit that makes one larger fails, unless it edits that file by hand and its message names the budget.

Physical lines are those of `.py` files, code lines those without comments, docstrings and blank lines. Complexity is
McCabe's, as radon counts it: one for each branch, loop, handler, boolean operator, comprehension and conditional
expression. A rule is a name in kebab case that canaryd/judge gives to findings.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
FIGURES = ROOT / "tools" / "weight.json"
PARTS = ("canaryd", "lab/canaryd_lab", "probes", "tests", "lab/tests", "benchmarks", "tools")
OURS = ("canaryd", "lab", "probes")
"""Folders whose functions, classes and numbers are counted."""
SLACK = 200
"""Lines by which a part can be below its figure, so that not every commit has to change tools/weight.json."""
COMPLEX = 12
"""Cyclomatic complexity above which a function is counted."""
ASKS = re.compile(r"isinstance\([^()]*ModelServer\)|is_served\(|backend [!=]= (ENDPOINT|\"endpoint\")")
"""Questions whether something is a model server: the class `ModelServer` should answer what differs."""
RULE = re.compile(r"[a-z]+(-[a-z]+)+")
SILENT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING}
BRANCHES = (ast.If, ast.IfExp, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.Assert, ast.match_case)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def files(part: str) -> list[Path]:
    """Return the Python files of a part (one of `PARTS`), sorted."""
    return sorted(path for path in (ROOT / part).rglob("*.py") if "__pycache__" not in path.parts)


def docstring_lines(tree: ast.Module) -> set[int]:
    """Return the numbers of the lines of all docstrings: strings that are statements of their own."""
    texts = [n.value for n in ast.walk(tree) if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)]
    found = [range(t.lineno, (t.end_lineno or t.lineno) + 1) for t in texts if isinstance(t.value, str)]
    return {line for lines in found for line in lines}


def code_lines(source: str, tree: ast.Module) -> int:
    """Return the number of lines with code: without comments, docstrings and blank lines."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    spans = [range(t.start[0], t.end[0] + 1) for t in tokens if t.type not in SILENT and t.string]
    return len({line for span in spans for line in span} - docstring_lines(tree))


def complexity(function: ast.AST) -> int:
    """Return the cyclomatic complexity of a function without the functions inside it."""

    def points(node: ast.AST) -> int:
        own = isinstance(node, BRANCHES) + (len(node.values) - 1 if isinstance(node, ast.BoolOp) else 0)
        own += 1 + len(node.ifs) if isinstance(node, ast.comprehension) else 0
        inner = (child for child in ast.iter_child_nodes(node) if not isinstance(child, FUNCTIONS))
        return own + sum(map(points, inner))

    return 1 + points(function)


def rules(trees: dict[Path, ast.Module]) -> set[str]:
    """Return the names of the judge's rules: all texts in kebab case in the files of canaryd/judge."""
    found: set[str] = set()
    for path, tree in trees.items():
        if ROOT / "canaryd" / "judge" in path.parents:
            texts = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
            found |= {text for text in texts if RULE.fullmatch(text)}
    return found


def figures() -> dict[str, int]:
    """Return name → value of every figure of the working tree."""
    found: dict[str, int] = {}
    trees: dict[Path, ast.Module] = {}
    for part in PARTS:
        for path in files(part):
            source = path.read_text()
            tree = trees[path] = ast.parse(source)
            inside = path.relative_to(ROOT / part).parts
            names = [part] if part != "canaryd" or len(inside) == 1 else [part, f"{part}/{inside[0]}"]
            for name in names:
                for kind, lines in (("lines", len(source.splitlines())), ("code", code_lines(source, tree))):
                    found[f"{kind} {name}"] = found.get(f"{kind} {name}", 0) + lines
    ours = {path: tree for path, tree in trees.items() if path.relative_to(ROOT).parts[0] in OURS}
    functions = [n for tree in ours.values() for n in ast.walk(tree) if isinstance(n, FUNCTIONS[:2])]
    classes = Counter(name for tree in ours.values() for name in public_classes(tree))
    found["rules"] = len(rules(ours))
    found[f"functions of a complexity above {COMPLEX}"] = sum(complexity(f) > COMPLEX for f in functions)
    found["public class names with several definitions"] = sum(count > 1 for count in classes.values())
    found['numbers marked "(ours"'] = sum(path.read_text().count("(ours") for path in ours)
    found["questions for a model server"] = sum(len(ASKS.findall(p.read_text())) for p in files("canaryd"))
    found["lines docs"] = sum(len(path.read_text().splitlines()) for path in (ROOT / "docs").rglob("*.md"))
    return found


def public_classes(tree: ast.Module) -> Iterator[str]:
    """Yield the names of a module's top-level classes without a leading underscore."""
    yield from (n.name for n in tree.body if isinstance(n, ast.ClassDef) and not n.name.startswith("_"))


def complaints(now: dict[str, int], most: dict[str, int]) -> Iterator[str]:
    """Yield a message for each figure that grew, and for each that fell but is not written down yet."""
    for name, value in now.items():
        limit = most.get(name, 0)
        slack = SLACK if name.partition(" ")[0] in ("lines", "code") else 0
        if value > limit:
            yield f"{name}: {value:,}, at most {limit:,}; delete, or raise it in {FIGURES.name} and name the budget"
        elif value < limit - slack:
            yield f"{name}: {value:,}, written {limit:,}; run: python tools/weigh.py --write"
    yield from (f"{name}: is gone; run: python tools/weigh.py --write" for name in most.keys() - now.keys())


def main() -> int:
    """Print, check or write the figures; return 1 if a check failed, else 0."""
    parser = argparse.ArgumentParser(prog="tools/weigh.py", description="Weigh the house.")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--check", action="store_true", help="fail where a figure grew, or fell without being written")
    what.add_argument("--write", action="store_true", help="write the figures that fell")
    options = parser.parse_args()
    now = figures()
    most = json.loads(FIGURES.read_text()) if FIGURES.exists() else now
    if options.write:
        lowered = {name: min(value, most.get(name, value)) for name, value in now.items()}
        FIGURES.write_text(json.dumps(lowered, indent=2) + "\n")
    elif options.check:
        found = list(complaints(now, most))
        sys.stderr.writelines(f"{line}\n" for line in found)
        return 1 if found else 0
    else:
        sys.stdout.writelines(f"{value:8,}  {name}\n" for name, value in now.items())
    return 0


if __name__ == "__main__":
    sys.exit(main())
