"""The service as machines run it: a real systemd in a container installs, starts, kills, starves, reloads, upgrades it.

tests/boot/make_root makes what is booted, once; without it, and without root, everything here is skipped aloud.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from canaryd import __version__
from canaryd.store.migrations import MIGRATIONS
from canaryd.store.store import Store
from canaryd.supervisor import cgroup
from tests.boot.machine import CACHE, Machine, booted, copy_clone, why_not
from tests.command import BUILTIN, PROBES, ROOT, soon

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())

LIGHT = {
    "probes": {name: {"enabled": False} for name in BUILTIN if not name.endswith("_telemetry")}
    | {"passes": {"period": "5s"}}
}
"""A configuration that needs no torch: telemetry, and one light probe of tests/probes every few seconds."""
QUICK = "[Service]\nRestartSec=1s\nWatchdogSec=5s\n"
"""A drop-in, so that a test need not wait for the unit's own times."""
ON_CPU = {
    *("exact_attention", "exact_canary", "exact_integer", "exact_matmul"),
    *("exact_units", "host_telemetry", "memory_sweep", "recorded_kernels"),
}
"""Probes that every processor must have evidence of."""
BREAKS = '\nraise RuntimeError("this release does not start")\n'


def prepare(machine: Machine) -> None:
    """Put a configuration, a probe and the quick times where an operator would."""
    machine.put("/etc/canaryd/canaryd.yaml", json.dumps(LIGHT))
    machine.put("/etc/canaryd/probes.d/passes.py", (PROBES / "passes.py").read_text())
    machine.put("/etc/systemd/system/canaryd.service.d/quick.conf", QUICK)
    shutil.copytree(CACHE / "wheels", machine.root / "srv/wheels")


def leave_what_root_made(machine: Machine) -> None:
    """Make what a check by root leaves behind where canaryd is not installed yet: a history and locks of root's."""
    state = machine.root / "var/lib/canaryd"
    with Store.open(state) as store, store.lock("GPU-1"), store.lock("CPU-1"):
        assert {path.owner() for path in (state, *state.rglob("*"))} == {"root"}
    assert {path.name for path in state.rglob("*.lock")} >= {"GPU-1.lock", "CPU-1.lock"}


def has_taken_over(machine: Machine) -> bool:
    """Whether nothing in the state directory is another's; the daemon must be able to store there."""
    assert machine.out("find", "/var/lib/canaryd", "!", "(", "-user", "canaryd", "-group", "canaryd", ")") == ""
    assert (machine.root / "var/lib/canaryd/locks/GPU-1.lock").exists(), "what root had made is still there"
    recorded(machine)
    return "canaryd_store_problem 0.0" in machine.get("/metrics")[1]


def install(machine: Machine, clone: str, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Install or upgrade from a clone inside the machine, by the documented command and without a network."""
    return machine.run(f"{clone}/scripts/install", "--find-links", "/srv/wheels", *arguments, check=check)


def serves(machine: Machine) -> bool:
    """Whether the service is up and Prometheus would get its metrics."""
    return machine.show("ActiveState") == "active" and machine.get("/metrics")[0] == 200


def grown(machine: Machine, before: dict[str, str]) -> bool:
    """Whether runs were added; none of those before may be missing."""
    now = machine.runs()
    assert before.items() <= now.items()
    return len(now) > len(before)


def recorded(machine: Machine) -> dict[str, str]:
    """Wait for history and return it."""
    machine.eventually(lambda: "passes" in machine.runs().values())
    return machine.runs()


def restarted(machine: Machine, pid: str) -> bool:
    """Whether another process serves in place of `pid`, and no worker of the old one is left."""
    return machine.show("MainPID") not in ("0", pid) and serves(machine)


def verified(machine: Machine, directory: str) -> str:
    """Return what systemd-analyze says of the installed units."""
    units = [f"{directory}/{name}" for name in ("canaryd.service", "canaryd-check@.service")]
    done = machine.run("systemd-analyze", "verify", *units, check=False)
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    """A machine on which scripts/install has installed this clone; tests leave the service running."""
    with booted(tmp_path_factory.mktemp("machine")) as one:
        prepare(one)
        leave_what_root_made(one)
        copy_clone(one.root / "srv/canaryd")
        done = install(one, "/srv/canaryd")
        assert "is installed and ready" in done.stdout
        yield one


def test_the_installed_service_is_ready_and_scraped(machine):
    """READY has been said, it starts with the machine, runs as its own user, and serves what promtool accepts."""
    assert serves(machine)
    assert machine.show("Type") == "notify"
    assert machine.out("systemctl", "is-enabled", "canaryd") == "enabled"
    assert machine.show("NRestarts") == "0"
    assert machine.out("stat", "-c", "%U", f"/proc/{machine.show('MainPID')}") == "canaryd"
    assert machine.out("stat", "-c", "%U %a", "/var/lib/canaryd") == "canaryd 750"
    recorded(machine)
    _, page = machine.get("/metrics")
    assert re.search(r"^canaryd_device_state\{", page, re.MULTILINE)
    if promtool := shutil.which("promtool"):
        checked = subprocess.run(
            [promtool, "check", "metrics"], input=page, capture_output=True, text=True, check=False
        )
        assert checked.returncode == 0, checked.stderr
    machine.eventually(lambda: machine.get("/readyz")[0] == 200)


def test_the_machine_has_nothing_that_a_small_debian_lacks(machine):
    """What a unit or a script calls and Debian's smallest installation has not is seen only where it is missing."""
    there = {
        name for name in ("kill", "ps", "pgrep", "curl", "wget") if machine.shell(f"which {name}", check=False).stdout
    }
    assert there == set()
    assert machine.shell("which systemctl sh python3").stdout


def test_the_installed_service_has_what_root_had_made_before(machine):
    """As after the README's order: scripts/check as root, then scripts/install."""
    assert has_taken_over(machine)


def test_systemd_has_nothing_to_complain_of(machine):
    """Not one line about any installed unit, and nothing in the journal that systemd ignored."""
    directory = "/usr/local/lib/systemd/system"
    done = machine.run(
        "systemd-analyze", "verify", f"{directory}/canaryd.service", f"{directory}/canaryd-check@.service"
    )
    assert done.stdout + done.stderr == ""
    assert "gnoring" not in machine.out("journalctl", "--no-pager", "-o", "cat", "-t", "systemd")


@pytest.mark.parametrize(
    ("name", "file", "level"),
    [("quick", "", "quick"), ("server", "CHECK=--level standard --device cpu:0 --probe passes\n", "standard")],
    ids=["a level", "a server's own file"],
)
def test_a_gate_checks_what_its_name_stands_for(machine, name, file, level):
    """Every device at a level; or what a file of that name asks for, word by word."""
    if file:
        machine.put(f"/etc/canaryd/check-{name}.env", file)
    machine.run("systemctl", "start", f"canaryd-check@{name}", check=False)
    report = machine.root / f"var/lib/canaryd/check-{name}.json"
    document = json.loads(report.read_text())
    assert machine.show("ExecMainStatus", f"canaryd-check@{name}.service") == str(document["exit_code"])
    assert (document["level"], [d["backend"] for d in document["devices"]]) == (level, ["cpu"])
    asked = {run["probe"] for d in document["devices"] for run in d["runs"]}
    assert asked == {"passes"}
    assert any("only passes was selected" in gap for gap in document["not_checked"]) == bool(file)


def test_a_killed_daemon_comes_back_with_its_history(machine):
    """SIGKILL to the main process: started again, and every earlier run is still there."""
    before, pid, count = recorded(machine), machine.show("MainPID"), int(machine.show("NRestarts"))
    machine.run("systemctl", "kill", "--kill-who=main", "-s", "KILL", "canaryd")
    machine.eventually(lambda: restarted(machine, pid))
    assert int(machine.show("NRestarts")) == count + 1
    machine.eventually(lambda: grown(machine, before))
    told = json.loads(machine.run("/usr/local/bin/canaryd", "history", "--json", check=False).stdout)
    assert told["devices"]


def test_a_starved_watchdog_restarts_the_daemon(machine):
    """A main process that stands still is killed by systemd's watchdog and replaced."""
    before, pid = recorded(machine), machine.show("MainPID")
    machine.run("systemctl", "kill", "--kill-who=main", "-s", "STOP", "canaryd")
    machine.eventually(lambda: restarted(machine, pid))
    assert "Watchdog timeout" in machine.journal()
    machine.eventually(lambda: grown(machine, before))


def test_a_bad_configuration_is_told_at_the_reload_and_not_taken(machine):
    """A mistake is logged and counted, the old configuration works on; a good one is taken."""
    pid = machine.show("MainPID")
    machine.put("/etc/canaryd/canaryd.yaml", json.dumps(LIGHT | {"shedule": {}}))
    machine.run("systemctl", "reload", "canaryd")
    machine.eventually(lambda: "canaryd_config_last_reload_successful 0.0" in machine.get("/metrics")[1])
    assert "shedule" in machine.journal()
    before = machine.runs()
    machine.eventually(lambda: grown(machine, before))
    machine.put("/etc/canaryd/canaryd.yaml", json.dumps(LIGHT))
    machine.run("systemctl", "reload", "canaryd")
    machine.eventually(lambda: "canaryd_config_last_reload_successful 1.0" in machine.get("/metrics")[1])
    assert machine.show("MainPID") == pid


def test_a_check_by_root_before_the_service_has_run_takes_nothing_from_it(machine):
    """What root's command makes in an empty state directory is the service's, which then stores there."""
    machine.run("systemctl", "stop", "canaryd")
    machine.shell("mv /var/lib/canaryd /srv/history && systemd-tmpfiles --create canaryd.conf")
    try:
        machine.run("canaryd", "check", "--probe", "passes", "--level", "quick", check=False)
        assert "passes" in machine.runs().values()
        assert machine.out("find", "/var/lib/canaryd", "!", "(", "-user", "canaryd", "-group", "canaryd", ")") == ""
        before = machine.runs()
        machine.restart()
        machine.eventually(lambda: grown(machine, before))
        assert "canaryd_store_problem 0.0" in machine.get("/metrics")[1]
    finally:
        machine.run("systemctl", "stop", "canaryd")
        machine.shell("rm -rf /var/lib/canaryd && mv /srv/history /var/lib/canaryd")
        machine.restart()


def stays(machine: Machine) -> bool:
    """Whether two workers are there for longer than a sweep takes: the reader of the kernel log, and the hung one."""
    return len([task for task in machine.processes() if "/worker/" in task.args and task.age >= 8]) >= 2


@pytest.mark.parametrize("probe", ["hangs_ignoring_sigterm", "hangs_holding_gil"])
def test_it_stops_within_five_seconds_beside_a_hung_worker(machine, probe):
    """Whatever a worker does: the stop is clean and quick, and no process of the service is left behind."""
    machine.put(f"/etc/canaryd/probes.d/{probe}.py", (PROBES / f"{probe}.py").read_text())
    probes = LIGHT["probes"] | {probe: {"timeout": "10m"}, "passes": {"enabled": False}}
    machine.put("/etc/canaryd/canaryd.yaml", json.dumps(LIGHT | {"probes": probes}))
    machine.restart()
    try:
        machine.eventually(lambda: stays(machine))
        begun = time.monotonic()
        machine.run("systemctl", "stop", "canaryd")
        assert time.monotonic() - begun < soon(5.0)
        assert machine.processes() == []
        assert machine.show("Result") == "success"
    finally:
        (machine.root / f"etc/canaryd/probes.d/{probe}.py").unlink()
        machine.put("/etc/canaryd/canaryd.yaml", json.dumps(LIGHT))
        machine.restart()


COMPUTES = '''"""Takes its time on a device that serves."""

import time

from canaryd.probe import ProbeSpec

SPEC = ProbeSpec(name="computes", summary="Takes its time")


def run(ctx):
    time.sleep(600)
    yield from ()
'''


@pytest.mark.slow
@pytest.mark.skipif(not cgroup.apart(None), reason="this kernel has no group of the scheduler for a session")
def test_a_round_steps_back_under_the_unit(machine):
    """No line of the unit keeps a worker that computes from the lowest claim on cores and memory."""
    machine.put("/etc/canaryd/probes.d/computes.py", COMPUTES)
    probes = LIGHT["probes"] | {"computes": {"timeout": "10m"}, "passes": {"enabled": False}}
    machine.put("/etc/canaryd/canaryd.yaml", json.dumps(LIGHT | {"probes": probes}))
    machine.restart()
    try:
        (idle,) = machine.eventually(lambda: [task.pid for task in machine.processes() if task.idle])
        machine.eventually(lambda: machine.out("cat", f"/proc/{idle}/oom_score_adj") == "1000")
    finally:
        (machine.root / "etc/canaryd/probes.d/computes.py").unlink()
        machine.put("/etc/canaryd/canaryd.yaml", json.dumps(LIGHT))
        machine.restart()


@pytest.mark.slow
def test_an_upgrade_keeps_history_and_can_be_rolled_back(machine):
    """The same command upgrades; --rollback returns to the release before; no run is lost on the way."""
    before = recorded(machine)
    copy_clone(machine.root / "srv/newer", "99.1")
    assert "canaryd 99.1 is installed and ready" in install(machine, "/srv/newer").stdout
    assert machine.out("/usr/local/bin/canaryd", "--version") == "canaryd 99.1"
    assert 'version="99.1"' in machine.get("/metrics")[1]
    machine.eventually(lambda: grown(machine, before))
    before = machine.runs()
    machine.run("/srv/newer/scripts/install", "--rollback")
    assert machine.out("/usr/local/bin/canaryd", "--version") != "canaryd 99.1"
    assert serves(machine)
    machine.eventually(lambda: grown(machine, before))


def migrates(program: Path) -> None:
    """Give a copy of canaryd a database of a newer version."""
    file = program / "store/migrations.py"
    text, count = re.subn(r"(?m)^(MIGRATIONS: .*)\}$", r'\1, 99: ""}', file.read_text())
    assert count == 1
    file.write_text(text)


@pytest.mark.slow
def test_an_upgrade_that_does_not_start_is_undone(machine):
    """Even where the new release has migrated the database first: the old one runs again and knows what it knew."""
    before, version = recorded(machine), machine.out("/usr/local/bin/canaryd", "--version")
    clone = copy_clone(machine.root / "srv/broken", "99.2")
    migrates(clone / "canaryd")
    daemon = clone / "canaryd/daemon/daemon.py"
    text = daemon.read_text()
    daemon.write_text(text.replace("        host, port = self.config.listen\n", f"        {BREAKS.strip()}\n", 1))
    assert daemon.read_text() != text
    done = install(machine, "/srv/broken", check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "this release does not start" in done.stderr
    assert "the release before is in force again" in done.stderr
    assert machine.out("/usr/local/bin/canaryd", "--version") == version
    machine.eventually(lambda: serves(machine))
    machine.eventually(lambda: grown(machine, before))
    assert list((machine.root / "var/lib/canaryd").glob("canaryd.db.version-*"))  # nothing is thrown away


@contextlib.contextmanager
def crowded(machine: Machine) -> Iterator[None]:
    """The state directory on a small disk with less room left than a copy of the database takes; the daemon runs."""
    machine.run("systemctl", "stop", "canaryd")
    machine.shell(
        "set -e; cp -a /var/lib/canaryd /srv/history; mount -t tmpfs -o size=32m canaryd-state /var/lib/canaryd;"
        "cp -a --preserve=all /srv/history/. /var/lib/canaryd; systemctl start canaryd"
    )
    try:
        recorded(machine)
        half = int(machine.out("stat", "-c", "%s", "/var/lib/canaryd/canaryd.db")) // 2
        machine.shell(
            "dd if=/dev/zero of=/var/lib/canaryd/others bs=4k 2>/dev/null;"
            f"truncate -s -{max(half, 65536)} /var/lib/canaryd/others"
        )
        yield
    finally:
        machine.run("systemctl", "stop", "canaryd")
        machine.shell(
            "set -e; rm -rf /srv/history /var/lib/canaryd/others; cp -a /var/lib/canaryd /srv/history;"
            "umount -l /var/lib/canaryd; rm -rf /var/lib/canaryd; mv /srv/history /var/lib/canaryd;"
            "systemctl start canaryd"
        )


@pytest.mark.slow
def test_an_upgrade_on_a_full_disk_is_undone_with_the_history_in_force(machine):
    """The release before knows what it knew; the new one would only have worked from memory."""
    before, version = recorded(machine), machine.out("/usr/local/bin/canaryd", "--version")
    migrates(copy_clone(machine.root / "srv/crowded", "99.3") / "canaryd")
    with crowded(machine):
        done = install(machine, "/srv/crowded", check=False)
        assert done.returncode == 1, done.stdout + done.stderr
        assert "could not be converted" in done.stderr
        assert "the release before is in force again" in done.stderr
        assert machine.out("/usr/local/bin/canaryd", "--version") == version
        assert serves(machine)
        assert before.items() <= machine.runs().items()
    machine.eventually(lambda: grown(machine, before))


@pytest.mark.slow
def test_an_upgrade_stops_a_check_that_runs_beside_the_daemon(machine):
    """It writes as well, and its next workers would be those of another release."""
    machine.put("/etc/canaryd/probes.d/hangs.py", (PROBES / "hangs.py").read_text())
    machine.put(
        "/etc/canaryd/canaryd.yaml",
        json.dumps(LIGHT | {"probes": LIGHT["probes"] | {"hangs": {"timeout": "10m"}}}),
    )
    unit = "canaryd-check@quick.service"
    try:
        machine.run("systemctl", "start", "--no-block", unit)
        machine.eventually(lambda: machine.show("ActiveState", unit) == "activating")
        time.sleep(3)
        assert machine.show("ActiveState", unit) == "activating"
        copy_clone(machine.root / "srv/beside", "99.4")
        assert "canaryd 99.4 is installed and ready" in install(machine, "/srv/beside").stdout
        assert machine.show("ActiveState", unit) in ("inactive", "failed")
    finally:
        (machine.root / "etc/canaryd/probes.d/hangs.py").unlink()
        machine.put("/etc/canaryd/canaryd.yaml", json.dumps(LIGHT))
        machine.restart()
        machine.run("systemctl", "reset-failed", unit, check=False)


@pytest.mark.slow
def test_an_upgrade_that_cannot_use_the_configuration_changes_nothing(machine):
    """The running release is not even stopped."""
    pid, version = machine.show("MainPID"), machine.out("/usr/local/bin/canaryd", "--version")
    machine.put("/etc/canaryd/canaryd.yaml", json.dumps(LIGHT | {"shedule": {}}))
    try:
        done = install(machine, "/srv/newer", check=False)
    finally:
        machine.put("/etc/canaryd/canaryd.yaml", json.dumps(LIGHT))
    assert done.returncode == 1
    assert "shedule" in done.stderr
    assert "nothing was changed" in done.stderr
    assert machine.show("MainPID") == pid
    assert machine.out("/usr/local/bin/canaryd", "--version") == version


@pytest.mark.slow
def test_removal_leaves_history_and_purge_does_not(machine):
    """Installed again, it knows what it knew; purged, nothing of it is left but the user."""
    before = recorded(machine)
    machine.run("/srv/canaryd/scripts/install", "--uninstall")
    assert machine.processes() == []
    assert left(machine) == {"/etc/canaryd", "/var/lib/canaryd"}
    assert before.items() <= machine.runs().items()
    assert "is installed and ready" in install(machine, "/srv/canaryd").stdout
    machine.eventually(lambda: grown(machine, before))
    machine.run("/srv/canaryd/scripts/install", "--uninstall", "--purge")
    assert machine.processes() == []
    assert left(machine) == set()


def left(machine: Machine) -> set[str]:
    """Return what of canaryd is on the disk, but for an operator's drop-in and the notes of systemd and apt."""
    found = machine.shell("find /[!psd]* -xdev -name 'canaryd*' -prune").stdout.splitlines()
    theirs = ("/etc/systemd/system/canaryd.service.d", "/var/lib/systemd", "/var/lib/dpkg", "/var/cache/apt")
    return {path for path in found if not path.startswith(theirs)}


# --- The Debian package ----------------------------------------------------------------------------------------------


def package(directory: Path) -> tuple[Path, Path]:
    """Build the package of this clone, and the same one as another version that migrates the database."""
    clone = copy_clone(directory / "clone")
    subprocess.run(
        [clone / "scripts/deb", "--find-links", CACHE / "wheels"],
        env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "PYTHON": sys.executable, "SOURCE_DATE_EPOCH": "1700000000"},
        check=True,
        capture_output=True,
    )
    (built,) = (clone / "dist").glob("*.deb")
    subprocess.run(["dpkg-deb", "-R", built, directory / "newer"], check=True)
    for path, pattern in (
        ("DEBIAN/control", r"(?m)^(Version: )(.*)$"),
        ("opt/canaryd/lib/python3/site-packages/canaryd/__init__.py", r'(__version__ = ")([^"]*)'),
    ):
        text, count = re.subn(pattern, r"\g<1>99.2", (directory / "newer" / path).read_text())
        assert count == 1
        (directory / "newer" / path).write_text(text)
    migrates(directory / "newer/opt/canaryd/lib/python3/site-packages/canaryd")
    newer = directory / "canaryd_99.2_all.deb"
    subprocess.run(["dpkg-deb", "--root-owner-group", "-Zgzip", "-b", directory / "newer", newer], check=True)
    return built, newer


def documented_way_back() -> str:
    """Return the command of docs/install.md that puts the copy back."""
    (command,) = re.findall(r"(?m)^(cd /var/lib/canaryd && .*)$", (ROOT / "docs/install.md").read_text())
    return command


def apt(machine: Machine, *arguments: str, check: bool = True) -> str:
    """Run apt-get as on a machine without a network."""
    asked = {"DEBIAN_FRONTEND": "noninteractive"}
    done = machine.run(
        "apt-get", "-q", "-y", "-o", "Dpkg::Options::=--force-confold", *arguments, check=check, env=asked
    )
    return done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="dpkg-deb is not installed: apt install dpkg")
def test_the_debian_package_installs_upgrades_downgrades_and_goes(tmp_path):
    """With apt and its own maintainer scripts; history outlives the package until that is purged."""
    packages = package(tmp_path)
    with booted(tmp_path) as machine:
        prepare(machine)
        for path in packages:
            shutil.copy(path, machine.root / "srv")
        copy_clone(machine.root / "srv/clone")
        older, newer = (f"/srv/{path.name}" for path in packages)
        leave_what_root_made(machine)
        apt(machine, "install", older)
        assert serves(machine)
        assert has_taken_over(machine)
        assert machine.out("systemctl", "is-enabled", "canaryd") == "enabled"
        assert verified(machine, "/usr/lib/systemd/system") == ""
        assert machine.out("canaryd", "--version") == f"canaryd {__version__}"
        before = recorded(machine)

        machine.shell("while systemctl restart canaryd; do :; done")  # as a release that crashes: started too often
        apt(machine, "install", newer)
        assert serves(machine)
        assert 'version="99.2"' in machine.get("/metrics")[1]
        machine.eventually(lambda: grown(machine, before))
        machine.run("systemctl", "disable", "--now", "canaryd")  # an operator's word outlives a change of version
        apt(machine, "install", "--allow-downgrades", older)
        assert machine.show("ActiveState") == "inactive"
        assert machine.run("canaryd", "status", check=False).returncode == 64
        machine.shell(f"set -e; {documented_way_back().replace('version-5', f'version-{max(MIGRATIONS)}')}")
        machine.run("systemctl", "enable", "--now", "canaryd")
        assert serves(machine)
        machine.eventually(lambda: grown(machine, before))
        before = machine.runs()

        refused = machine.run("/srv/clone/scripts/install", check=False)
        assert refused.returncode == 64
        assert "upgrade that with apt" in refused.stderr

        apt(machine, "remove", "canaryd")
        assert machine.processes() == []
        assert not (machine.root / "opt/canaryd").exists()
        assert before.items() <= machine.runs().items()
        apt(machine, "install", older)
        machine.eventually(lambda: grown(machine, before))
        apt(machine, "purge", "canaryd")
        assert machine.processes() == []
        assert left(machine) == set()


# --- With torch ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(bool(why_not(torch=True)), reason=why_not(torch=True))
def test_every_probe_passes_under_the_unit(tmp_path):
    """No line of the unit keeps a probe from its work: with torch, each gives evidence, and the machine is healthy."""
    with booted(tmp_path) as machine:
        for name in ("wheels", "torch"):
            shutil.copytree(CACHE / name, machine.root / "srv/wheels", dirs_exist_ok=True)
        copy_clone(machine.root / "srv/canaryd")
        done = machine.run(
            *("/srv/canaryd/scripts/install", "--find-links", "/srv/wheels"),
            env={"CANARYD_TORCH": "torch"},
            timeout=900.0,
        )
        assert "is installed and ready" in done.stdout
        patient = {name: {"timeout": "30m"} for name in BUILTIN}  # a busy machine is not what is asked about
        file = machine.root / "etc/canaryd/canaryd.yaml"
        content = {"worker": {"python": "/opt/canaryd-torch/bin/python3"}, "probes": patient}
        assert content["worker"]["python"] in file.read_text()
        machine.put("/etc/canaryd/canaryd.yaml", json.dumps(content))
        machine.restart()
        cpu = machine.eventually(lambda: evidence(machine), within=1800.0)
        assert cpu["state"] == "healthy", json.dumps(cpu, indent=1)
        assert machine.get("/healthz")[0] == 200


def evidence(machine: Machine) -> dict | None:
    """Return what is known of the processor, once every probe has given evidence."""
    told = json.loads(machine.run("canaryd", "status", "--json", check=False).stdout)
    cpus = [device for device in told["devices"] if device["backend"] == "cpu"]
    found = cpus[0]["evidence"] if cpus else {}
    return cpus[0] if found.keys() >= ON_CPU and None not in found.values() else None


def typed(title: str) -> list[str]:
    """Return the commands below a heading of the README, in order."""
    section = (ROOT / "README.md").read_text().partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    blocks = re.findall(r"```sh\n(.*?)```", section, re.DOTALL)
    return [line for line in "".join(blocks).splitlines() if line and not line.startswith("#")]


def connect(machine: Machine) -> None:
    """Let apt, pip and git find beside the machine what the README takes from the network, and give it an address."""
    for name in ("wheels", "torch", "debs"):
        shutil.copytree(CACHE / name, machine.root / "srv" / name)
    shutil.rmtree(machine.root / "etc/apt/sources.list.d")
    machine.put("/etc/apt/sources.list", "deb [trusted=yes] file:/srv/debs ./\n")
    machine.put("/etc/pip.conf", "[global]\nno-index = true\nfind-links =\n  /srv/wheels\n  /srv/torch\n")
    clone = copy_clone(machine.root / "srv/canaryd")
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    for words in (("init", "-q"), ("add", "-A"), (*who, "commit", "-qm", "a clone")):
        subprocess.run(["git", "-C", clone, *words], check=True)
    machine.put("/root/.gitconfig", '[url "file:///srv/canaryd"]\ninsteadOf = https://github.com/canaryd/canaryd\n')
    # Alertmanager does not start where no address is a private one (docs/install.md).
    subprocess.run(["nsenter", "-t", machine.leader, "-n", "ip", "addr", "add", "10.0.0.1/32", "dev", "lo"], check=True)


@pytest.mark.slow
@pytest.mark.skipif(bool(why_not(torch=True)), reason=why_not(torch=True))
def test_from_a_bare_debian_to_an_alarm_by_the_words_of_the_readme(tmp_path):
    """Each line as it is written, in a shell of its own in the directory that the one before left."""
    with booted(tmp_path) as machine:
        connect(machine)
        place, said = "/root", ""
        for line in typed("From a bare Debian to an alarm"):
            begun = time.monotonic()
            done = machine.run(
                *("bash", "-c", f"cd {place}\n{line}\ncode=$?\npwd >/srv/place\nexit $code"), check=False, timeout=900.0
            )
            print(f"{time.monotonic() - begun:5.0f} s  {line}")
            assert done.returncode == (2 if line.startswith("canaryd drill") else 0), done.stdout + done.stderr
            said, place = done.stdout, (machine.root / "srv/place").read_text().strip()
        assert re.search(r"^CanarydDrill .* active", said, re.MULTILINE), said + machine.journal("prometheus.service")
