"""What the documents say is there: links, commands, settings, protocol, outcomes, and the example probe."""

from __future__ import annotations

import argparse
import ast
import json
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from canaryd.cli.main import parser
from canaryd.config import judge_policy, load, settings
from canaryd.engine import catalogue
from canaryd.judge import case
from canaryd.judge.node import node as node_of
from canaryd.judge.verdict import decide
from canaryd.model import Device, Outcome, Run, State
from canaryd.supervisor.protocol import RunRequest, WorkerSpec
from canaryd.supervisor.series import Series
from tests.command import canaryd, configure
from tests.programs import accepted, needed

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
DOCUMENTS = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *(ROOT / "benchmarks").rglob("*.md")])
PROBES = sorted([*(ROOT / "probes").glob("*.py"), *(DOCS / "examples").glob("*.py")])
MISBEHAVING = {path.stem for path in (ROOT / "tests" / "probes").glob("*.py")}
ARCHITECTURE = (DOCS / "architecture.md").read_text()
FAILURES = (DOCS / "failures.md").read_text()
EXAMPLE = DOCS / "examples" / "memory_pattern.py"
DEVICE = Device(uuid="CPU-test", backend="cpu", index=0, model="a processor")


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def spans(text: str) -> list[str]:
    """Return what stands in `backticks` outside of fenced code."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))


def subcommands() -> Mapping[str, argparse.ArgumentParser]:
    (action,) = (a for a in parser()._actions if isinstance(a, argparse._SubParsersAction))
    return action.choices


def options_of(command: argparse.ArgumentParser) -> set[str]:
    return {text for action in command._actions for text in action.option_strings}


# --- Links and names -------------------------------------------------------------------------------------------------


def anchors(path: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and the documentation site make them."""
    prose = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_relative_links_lead_to_something(path):
    """Every link without a scheme names a file or a directory of the repository, and a heading in it."""
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        page = path.parent / file if file else path
        assert page.exists(), f"{name(path)}: {target}"
        assert not anchor or anchor in anchors(page), f"{name(path)}: {target}"


def mentions() -> Iterator[tuple[str, str]]:
    """Yield (where, page, or page#anchor) for every page that code, a unit, an alert, a dashboard or a script names."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    for each in filter(None, listed.split("\0")):
        path = ROOT / each
        if path.is_file() and not path.is_symlink() and path.suffix not in {".md", ".png", ".whl", ".safetensors"}:
            text = path.read_text(encoding="utf-8", errors="replace")
            for found in re.findall(
                r"(?:(?<![\w/])|canaryd/blob/main/)(docs/[\w-]+\.md(?:#[\w-]+)?)(?! of prom)", text
            ):
                yield each, found


def test_every_page_that_something_names_is_there():
    """Help texts, comments, runbook_url of an alert, dashboards: none leads to a page or a heading that is gone."""
    named = sorted(set(mentions()))
    if not named:
        pytest.skip("git does not list the files of this tree: no mention of a page was checked")
    for where, target in named:
        file, _, anchor = target.partition("#")
        assert (ROOT / file).is_file(), f"{where}: {target}"
        assert not anchor or anchor in anchors(ROOT / file), f"{where}: {target}"


def test_the_index_has_every_page_once():
    """docs/README.md lists each page with one line in one of its three parts."""
    text = (DOCS / "README.md").read_text()
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == ["Operate", "Understand", "Extend"]
    listed = re.findall(r"^- \[[^\]]+\]\(([\w-]+\.md)\): .+\.$", text, re.MULTILINE)
    assert sorted(listed) == sorted(path.name for path in DOCS.rglob("*.md") if path.name != "README.md")


@pytest.mark.parametrize("path", [*DOCUMENTS, *sorted((ROOT / "deploy").rglob("*.*"))], ids=name)
def test_no_document_speaks_of_a_private_machine(path):
    """No path and no ticket that only its author knows."""
    found = re.search(r"/work/|/tmp/w|\b[Ii]ssue #?\d", path.read_text())
    assert found is None, f"{name(path)}: {found}"


def test_the_page_says_of_the_h200_what_its_files_show():
    """Every figure is counted again in the committed record and reports."""
    results = ROOT / "benchmarks" / "results"
    (file,) = results.glob("characterise-NVIDIA-H200-*.json")
    record = json.loads(file.read_text())
    seen = {part["name"]: part["observations"] for part in record["parts"]}
    page = (DOCS / "vendors.md").read_text().partition("## Seen on an H200")[2].partition("\n## ")[0]
    said = " ".join(page.split())
    strict = record["strict"]
    assert (
        f"*{record['verdict']}*. {strict['right']:,} strict results right, none wrong, {strict['refused']} refused, "
        in said
    )
    assert (strict["wrong"], strict["raised"]) == (0, 0)
    assert f"{strict['left_out']} left out, {strict['not_reached']} not reached. " in said
    controls = [o["name"] for part in seen.values() for o in part if (o["claim"], o["seen"]) == ("control", "wrong")]
    faults, goldens = (sum(word in name for name in controls) for word in ("/fault ", "/wrong golden"))
    assert f"{len(controls)} controls failed as they must: {faults} injected faults, {goldens} wrong goldens, " in said
    assert len(controls) - faults - goldens == len(["an unforeseen error", "an accumulator in software"])
    pairs = [(o["values"]["canaryd"], o["values"]["tool"]) for o in seen["telemetry"] if "tool" in o["values"]]
    equal = sum(own == other for own, other in pairs)
    assert f"Of {len(pairs)} readings beside nvidia-smi's, {equal} were constants or zeros" in said
    assert (
        f"; {['no', 'one', 'two', 'three', 'four'][len(pairs) - equal]}, read at another moment, all differed." in said
    )
    fresh = [(o["name"].split("/")[0], o["seen"]) for o in seen["cases/exact_matmul"] if "/fixed" not in o["name"]]
    reached = {form for form, came_to in fresh if came_to == "right"}
    assert {form for form, _ in fresh} - reached == {
        *("float64", "float32", "float16>float32", "int8>int32"),
        *("float8_e4m3fn>bfloat16", "float8_e4m3fn>float32", "float8_e5m2>bfloat16"),
    }
    late = sum("was spent before its turn" in o["detail"] for o in seen["cases/exact_canary"])
    assert f"{late} of {len(seen['cases/exact_canary'])} cases of `exact_canary`" in said
    assert {part["name"] for part in record["left"]} == {"throughput", "beside"}
    share = re.search(
        r"products' share of it at the chip's rate, % \| ([\d.]+)", (results / "case_list.md").read_text()
    )
    assert f"[{float(share[1]):.1f} %](" in said
    for form in ("bfloat16", "float32"):
        text = (results / f"verified_gemm-cuda-{form}.md").read_text()
        ratios = [float(ratio) for ratio in re.findall(r"^\| \d+ \|.*?\| ([\d.]+) \(.*missed", text, re.MULTILINE)]
        assert (
            f"[{form}](../benchmarks/results/verified_gemm-cuda-{form}.md) {min(ratios):.2f} to {max(ratios):.2f}"
            in said
        )


# --- Schemas ---------------------------------------------------------------------------------------------------------

SCHEMAS = {n: json.loads((DOCS / f"{n}.schema.json").read_text()) for n in ("check", "gate", "history", "status")}


def fields(part: Any, path: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield (path, schema) of every field that a JSON Schema names, at any depth."""
    for name, field in part.get("properties", {}).items() if isinstance(part, dict) else ():
        yield f"{path}/{name}", field
    for key, inner in part.items() if isinstance(part, dict) else enumerate(part) if isinstance(part, list) else ():
        yield from fields(inner, f"{path}/{key}")


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_schema_is_closed_and_explains_every_field(name):
    """It is valid itself, each object has the fields that it names and no other, and each field says what it means."""
    schema = SCHEMAS[name]
    jsonschema.Draft202012Validator.check_schema(schema)
    for part in [schema, *(part for part in schema["$defs"].values() if "properties" in part)]:
        assert part["additionalProperties"] is False
        assert sorted(part["required"]) == sorted(part["properties"])
    assert [path for path, field in fields(schema) if not field.get("description", "").endswith(".")] == []


@pytest.mark.parametrize("part", ["characterised", "event", "finding", "incident", "rival"])
def test_what_schemas_share_they_explain_alike(part):
    """An object of several commands has one meaning."""
    shared = [dict(fields(schema["$defs"][part])) for schema in SCHEMAS.values() if part in schema["$defs"]]
    texts = [{path: field["description"] for path, field in one.items()} for one in shared]
    assert len(texts) > 1
    assert all(one == texts[0] for one in texts)


# --- Commands and settings -------------------------------------------------------------------------------------------


def test_the_readmes_table_and_the_command_line_agree():
    """Each of its ten rows is a command that exists, with options and choices that exist."""
    rows = re.findall(r"^\| `canaryd ([^`]+)` \| (.*) \|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    commands = subcommands()
    assert len(rows) == 10
    for words, text in rows:
        command = commands[words.split()[0]]
        assert set(re.findall(r"--[a-z-]+", f"{words} {text}")) <= options_of(command), words
        if choices := words.split()[1:]:
            (positional,) = (a for a in command._actions if a.choices and not a.option_strings)
            assert tuple(choices[0].split("\\|")) == tuple(positional.choices)


def commands_in(text: str) -> Iterator[str]:
    yield from (span for span in spans(text) if span.startswith("canaryd "))
    for block in re.findall(r"^```\w*\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL):
        yield from re.findall(r"^(?:\$ )?(canaryd [^\n]*)", block, re.MULTILINE)


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_every_command_that_a_document_shows_exists(path):
    """In code, "canaryd X --y" names a command X with an option --y."""
    commands = subcommands()
    for text in commands_in(path.read_text()):
        words = shlex.split(text.replace("\\|", "|"), comments=True)
        assert words[1] in commands, f"{name(path)}: {text}"
        options = {word.partition("=")[0] for word in words if word.startswith("--")}
        assert options <= options_of(commands[words[1]]), f"{name(path)}: {text}"


def test_the_default_address_is_the_one_that_is_written_down():
    """The README names the address that the configuration has."""
    host, port = settings.Config().listen
    assert f"{host}:{port}" in (ROOT / "README.md").read_text()


def settings_of(schema: Mapping, where: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in schema.get("properties", {}).items():
        yield (*where, key)
        yield from settings_of(value, (*where, key))
    extra = schema.get("additionalProperties")
    if isinstance(extra, dict) and "properties" in extra:  # one section per probe
        yield from settings_of(extra, (*where, "*"))


def settings_in(text: str) -> Iterator[tuple[str, ...]]:
    """Yield the path of every "key:" and "#key:" line of a commented example; "*" stands for a name."""
    above: list[tuple[int, str]] = []
    for line in text.splitlines():
        if found := re.match(r"( *)#?([a-z_]+):", line):
            depth = len(found[1])
            above = [(d, key) for d, key in above if d < depth]
            below = [key for _, key in above]
            at_name = below == ["probes"] and found[2] in {path.stem for path in PROBES}
            at_name |= below == ["endpoints"]
            above.append((depth, "*" if at_name else found[2]))
            yield tuple(key for _, key in above)


def test_every_setting_stands_in_the_example_configuration():
    """deploy/canaryd.yaml shows all that can be set, and nothing else."""
    shown = set(settings_in((ROOT / "deploy" / "canaryd.yaml").read_text())) - {("probes", "*"), ("endpoints", "*")}
    assert shown == set(settings_of(load.json_schema()))


# --- Architecture ----------------------------------------------------------------------------------------------------


def test_the_diagram_of_packages_is_complete():
    """Every package and module at the top but the worker, once; import-linter checks that their order is right."""
    diagram = re.search(r"^```\n(cli .*?)\n\n", ARCHITECTURE, re.MULTILINE | re.DOTALL)[1]
    drawn = [word for line in diagram.splitlines() for word in re.match(r"\w+(?: \| \w+)*", line)[0].split(" | ")]
    wanted = [path.parent.name for path in (ROOT / "canaryd").glob("*/__init__.py") if path.parent.name != "worker"]
    wanted += [path.stem for path in (ROOT / "canaryd").glob("[a-z]*.py")]
    assert sorted(drawn) == sorted(wanted)


def test_every_message_and_field_of_the_protocol_is_described():
    """Read from the source: the requests that the supervisor builds, the answers that the runner sends."""
    words: set[str] = set()
    supervisor = "".join(path.read_text() for path in (ROOT / "canaryd" / "supervisor").glob("*.py"))
    for node in ast.walk(ast.parse(supervisor.replace("from __future__ import annotations", ""))):
        if isinstance(node, ast.Dict):
            keys = [key.value for key in node.keys if isinstance(key, ast.Constant)]
            if "op" in keys:
                words |= {*keys, node.values[keys.index("op")].value}
    runner = ROOT / "canaryd" / "worker" / "runner.py"
    for node in ast.walk(ast.parse(runner.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "_send":
            words |= {keyword.arg for keyword in node.keywords if keyword.arg}
            words |= {keyword.value.value for keyword in node.keywords if keyword.arg == "kind"}
    assert {"describe", "run", "unpack", "inventory", "follow", "ready", "progress", "fact", "result"} <= words
    assert words - set(spans(ARCHITECTURE)) == set()


def test_the_table_of_outcomes_is_complete():
    """Every outcome has its line, and every probe that misbehaves its place."""
    rows = dict(re.findall(r"^\| `(\w+)` \|.*\| ([^|]*) \|$", FAILURES.partition("## Outcomes")[2], re.MULTILINE))
    assert set(rows) == {outcome.value for outcome in Outcome}
    assert all(set(spans(cell)) and set(spans(cell)) <= MISBEHAVING for cell in rows.values())
    assert set(spans(FAILURES)) >= MISBEHAVING


# --- Probes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PROBES, ids=name)
def test_every_probe_says_what_it_stresses_and_cannot_see(path):
    """A clean result must not promise more than was looked at; telemetry stresses nothing and says what it reads."""
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    assert f"\n{'Reads' if path.stem.endswith('_telemetry') else 'Stresses'}: " in text
    assert "\nCannot see: " in text


def test_the_goldens_page_and_the_catalogue_name_the_same_probes():
    """Each exact probe has its section, memory and links have one, and no section is without its probe."""
    titles = re.findall(r"^## .*\((`.*`)\)", (DOCS / "goldens.md").read_text(), re.MULTILINE)
    named = {name for title in titles for name in re.findall(r"`(\w+)`", title)}
    others = {"memory_sweep", "host_transfer", "collectives"}
    assert named == {path.stem for path in PROBES if path.stem.startswith("exact_")} | others


@pytest.fixture(scope="module")
def entry(tmp_path_factory) -> catalogue.Entry:
    """The example as a drop-in: found in a directory and described by a worker."""
    place = tmp_path_factory.mktemp("probes.d")
    place.chmod(0o755)
    shutil.copyfile(EXAMPLE, place / EXAMPLE.name)
    (place / EXAMPLE.name).chmod(0o644)
    files, problems = catalogue.find([place])
    assert problems == []
    dropped = [file for file in files if file.source == "directory"]
    with Series(WorkerSpec()) as series:
        entries, problems = catalogue.load(dropped, series.describe([file.path for file in dropped]).probes)
    assert problems == []
    return entries["memory_pattern"]


def run_example(entry: catalogue.Entry, **fields) -> Run:
    wanted = {"device": DEVICE, "level": "quick", "seed": 7} | fields
    with Series(WorkerSpec()) as series:
        run = series.run(RunRequest(probe_path=entry.file.path, spec=entry.spec, **wanted), 60.0)
    assert run.outcome is Outcome.COMPLETED, run.detail
    return run


def state_after(run: Run) -> State:
    now = time.time()
    among = node_of({DEVICE.uuid: DEVICE}, {DEVICE.uuid: [run]}, now)
    wanted, policy = {run.probe: 1800.0}, judge_policy.JudgePolicy()
    return decide(case.Case(device=DEVICE, node=among, wanted=wanted, policy=policy, now=now)).state


def test_the_example_finds_nothing_on_a_healthy_machine(entry):
    """It compares, the device is healthy, and the same seed gives the same facts."""
    run, again = run_example(entry), run_example(entry)
    assert run.trials > 0
    assert (run.wrong, state_after(run)) == ((), State.HEALTHY)
    assert (run.comparisons, run.readings) == (again.comparisons, again.readings)


def test_the_example_finds_its_injected_fault(entry):
    """One flipped bit is one wrong element with its bits, and makes the device suspect."""
    run = run_example(entry, drill="flip", cases=("bytes/seeded",))
    (wrong,) = run.wrong
    assert wrong.evidence is not None
    assert (wrong.wrong_trials, wrong.evidence.wrong, wrong.evidence.bits) == (1, 1, {"0": 1})
    assert state_after(run) is State.SUSPECT


# --- Commands of the first steps -------------------------------------------------------------------------------------

RUN_ELSEWHERE = {
    "scripts/check --level quick": (".ci/run", "it fetches packages; the tests run `canaryd check` in many ways"),
    ".venv/bin/canaryd demo": ("tests/cli/test_demo.py", "its tests run it"),
    "apt-get update": ("tests/boot/make_root", "needs root and the network"),
    "apt-get install -y git python3-venv prometheus prometheus-alertmanager": ("tests/boot/make_root", "the same"),
    "git clone https://github.com/canaryd/canaryd": ("tests/boot/machine.py", "the tests copy this clone instead"),
    "cd canaryd": ("tests/boot/machine.py", "the same"),
    'CANARYD_TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu" scripts/install': (
        "tests/test_install.py::test_a_torch_of_its_own_is_made_beside_and_named_in_the_configuration",
        "needs the network; the test has a small package in torch's place",
    ),
    "systemctl restart prometheus prometheus-alertmanager": (
        "tests/test_alarm.py::test_the_alarm_arrives_once_stands_and_ends",
        "needs systemd; the test starts both on the shipped files",
    ),
    "canaryd drill": ("tests/test_alarm.py::test_the_alarm_arrives_once_stands_and_ends", "needs the chain before it"),
    "sleep 60": ("tests/test_alarm.py::test_the_alarm_arrives_once_stands_and_ends", "the test waits in its place"),
    "amtool --alertmanager.url=http://127.0.0.1:9093 alert": (
        "tests/test_alarm.py::test_the_alarm_arrives_once_stands_and_ends",
        "the test asks the same Alertmanager's API on a port of its own",
    ),
    "python3 -m venv fetch": ("tests/test_install.py::wheels", "the fixture uses the environment of the tests"),
    "fetch/bin/pip wheel -w wheels . hatchling": ("tests/test_install.py::wheels", "needs an index of packages"),
    "fetch/bin/pip wheel -w wheels torch==2.13.0": ("tests/test_install.py::wheels", "some GB"),
    "CANARYD_TORCH=torch scripts/install --find-links wheels": (
        "tests/test_install.py::test_a_torch_of_its_own_is_made_beside_and_named_in_the_configuration",
        "needs a root to install into",
    ),
    "cd /var/lib/canaryd && d=$(mktemp -d newer-XXXX) && mv $(ls | grep 'db$\\|db-') $d && "
    "mv canaryd.db.version-5 canaryd.db": (
        "tests/test_boot.py::test_the_debian_package_installs_upgrades_downgrades_and_goes",
        "needs an older package; the test takes the command from the page",
    ),
    "systemctl restart canaryd": (
        "tests/test_boot.py::test_the_debian_package_installs_upgrades_downgrades_and_goes",
        "needs systemd; the test starts the service after it",
    ),
    "podman build -f deploy/container/Containerfile -t canaryd .": (
        "tests/deploy/test_container.py",
        "needs a container engine; the test runs the steps one by one",
    ),
    'podman build -f deploy/container/Containerfile -t canaryd:torch --build-arg TORCH="torch==2.13.0" .': (
        "tests/deploy/test_container.py",
        "the same",
    ),
    "podman run --rm --network host -v canaryd:/var/lib/canaryd canaryd": (
        "tests/deploy/test_container.py",
        "the same",
    ),
}
"""Command of the README or the install page → what runs it, or its equal, and why it is not run as it stands."""
COPIES = {
    "cp deploy/prometheus/* /etc/prometheus/",
    "cp deploy/alertmanager/alertmanager.yml /etc/prometheus/alertmanager.yml",
}
DRILLED = ".venv/bin/canaryd drill --fault flip"


def typed(path: Path) -> set[str]:
    """Return the commands in the shell blocks of a page, without comments."""
    blocks = re.findall(r"^```sh\n(.*?)^```", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    lines = (re.sub(r"(^|\s+)#.*", "", line).strip() for block in blocks for line in block.splitlines())
    return {line for line in lines if line}


def test_every_command_of_the_first_steps_is_run():
    """Each is run below, or stands in the list with the test that runs it and a reason."""
    assert typed(ROOT / "README.md") | typed(DOCS / "install.md") == {*RUN_ELSEWHERE, *COPIES, DRILLED}
    for command, (where, reason) in RUN_ELSEWHERE.items():
        file, _, test = where.partition("::")
        assert (ROOT / file).is_file(), command
        assert not test or f"def {test}(" in (ROOT / file).read_text(), command
        assert reason


def test_the_commands_that_copy_monitoring_give_a_configuration_that_prometheus_takes(tmp_path):
    """As the README has them, with a directory in the place of /etc."""
    promtool, amtool = (needed(n, untested="what the README copies was not checked") for n in ("promtool", "amtool"))
    (tmp_path / "prometheus").mkdir()
    for command in sorted(COPIES, reverse=True):
        subprocess.run(["sh", "-c", command.replace("/etc", str(tmp_path))], cwd=ROOT, check=True, timeout=60)
    accepted(promtool, "check", "config", tmp_path / "prometheus/prometheus.yml")
    accepted(amtool, "check-config", tmp_path / "prometheus/alertmanager.yml")


def test_the_drill_of_the_readme_finds_its_fault(tmp_path):
    """As the README has it, on one light probe that needs no torch."""
    _, *words = shlex.split(DRILLED)
    settings = {"log": str(tmp_path / "log"), "seconds": 0.1, "wrong": 0}
    config = configure(tmp_path, "records", each={"records": {"settings": settings}})
    done = canaryd(*words, "--probe", "records", "--config", config, "--state-dir", tmp_path / "state")
    assert done.code == 2, done.err
    assert "FAULTY" in done.out
