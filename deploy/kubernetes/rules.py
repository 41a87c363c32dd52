"""Write components/prometheus-operator/prometheusrule.yaml from deploy/prometheus; `--check` only compares.

The rules have a single source: the files that promtool checks and tests.
"""
# ruff: noqa: INP001  a script beside what it writes

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).resolve().parent
SOURCE = HERE.parent / "prometheus"
OUT = HERE / "components/prometheus-operator/prometheusrule.yaml"
HEAD = "# Written by deploy/kubernetes/rules.py from deploy/prometheus: change it there, and run that.\n"


class _Dumper(yaml.SafeDumper):
    """A YAML writer that writes text of several lines as a block, so that people can read an expression."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def document(path: Path) -> dict[str, Any]:
    """Return the PrometheusRule object for one file of rules."""
    name = path.name.removesuffix(".rules.yml")
    groups = yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]
    head = {"apiVersion": "monitoring.coreos.com/v1", "kind": "PrometheusRule"}
    return {**head, "metadata": {"name": name, "namespace": "canaryd"}, "spec": {"groups": groups}}


def render() -> str:
    """Return the text of the whole output file."""
    documents = [document(path) for path in sorted(SOURCE.glob("*.rules.yml"))]
    return HEAD + yaml.dump_all(
        documents, Dumper=_Dumper, sort_keys=False, width=110, allow_unicode=True, explicit_start=True
    )


def main() -> int:
    """Write the file, or compare it; return 1 if a comparison finds a difference, else 0."""
    text = render()
    if sys.argv[1:] == ["--check"]:
        if OUT.exists() and OUT.read_text(encoding="utf-8") == text:
            return 0
        sys.stderr.write(f"{OUT}: is not what deploy/prometheus makes; run python deploy/kubernetes/rules.py\n")
        return 1
    OUT.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
