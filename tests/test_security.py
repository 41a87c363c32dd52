"""Who may come in, whose files are believed, and what is never told: tried on the real daemon."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import tarfile
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from canaryd import hidden
from canaryd.config import load, permissions, settings
from canaryd.config.load import ConfigError
from canaryd.engine import catalogue
from tests.command import ROOT, Daemon, canaryd, configure, environment, eventually, in_turn, marked, running
from tests.http_server import Handler, listening
from tests.pki import Authority
from tests.programs import needed

STRANGER = 12345
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away: owners were not tried")


# --- Whose files are believed ----------------------------------------------------------------------------------------


def place(directory: Path, *names: str) -> Path:
    directory.mkdir(mode=0o755, parents=True, exist_ok=True)
    for name in names:
        (directory / name).write_text("raise SystemExit\n")
        (directory / name).chmod(0o644)
    return directory


def found(directory: Path, tmp_path: Path) -> tuple[list[str], list[str]]:
    """Return the names of the probes that are used, and what is said of the others."""
    files, problems = catalogue.find([directory], builtin=place(tmp_path / "builtin"))
    return [file.name for file in files], [str(problem) for problem in problems]


@pytest.mark.parametrize("mode", [0o775, 0o757, 0o1777])
def test_a_directory_on_the_way_that_others_can_write(tmp_path, mode):
    """They could put a directory of theirs in its place; the sticky bit keeps them from that, above the directory."""
    probes = place(tmp_path / "above" / "probes.d", "mine.py")
    (tmp_path / "above").chmod(mode)
    names, problems = found(probes, tmp_path)
    if mode & 0o1000:
        assert (names, problems) == (["mine"], [])
    else:
        assert names == []
        assert problems[0].startswith(f"{probes}: its directory {tmp_path}/above is writable by others (drwx")
    probes.chmod(0o1777)
    assert found(probes, tmp_path)[0] == []


@needs_root
def test_owners_on_the_way(tmp_path):
    """The owner of a directory above can rename what is in it, and the owner of a link lead it elsewhere."""
    probes = place(tmp_path / "above" / "probes.d", "mine.py")
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "above")
    assert found(link / "probes.d", tmp_path) == (["mine"], [])
    os.chown(link, STRANGER, -1, follow_symlinks=False)
    names, (problem,) = found(link / "probes.d", tmp_path)
    assert names == []
    assert f"its link {link} belongs to user {STRANGER}; wanted root" in problem
    os.chown(tmp_path / "above", STRANGER, -1)
    names, (problem,) = found(probes, tmp_path)
    assert names == []
    assert f"its directory {tmp_path}/above belongs to user {STRANGER}; wanted root" in problem


@needs_root
def test_a_link_is_as_good_as_every_directory_that_it_leads_through(tmp_path):
    """A probe that is a link into a stranger's directory, by any detour, is refused; its neighbours stay."""
    probes = place(tmp_path / "probes.d", "good.py")
    home = place(tmp_path / "home" / "stranger", "target.py")
    (probes / "linked.py").symlink_to(Path("..") / "home" / "stranger" / ".." / "stranger" / "target.py")
    assert found(probes, tmp_path) == (["good", "linked"], [])
    os.chown(home, STRANGER, -1)
    names, (problem,) = found(probes, tmp_path)
    assert names == ["good"]
    assert problem.startswith(f"{probes}/linked.py: its directory {home} belongs to user {STRANGER}")


@pytest.mark.parametrize("name", ["_shared.py", "data.json", ".hidden", "data/operands.bin"])
def test_what_lies_beside_probes_counts_too(tmp_path, name):
    """A probe may read it, so a file of anybody's makes the directory unusable; a link to nowhere does not."""
    probes = place(tmp_path / "probes.d", "good.py")
    (probes / ".#good.py").symlink_to("editor@host.1234")
    place((probes / name).parent, Path(name).name)
    assert found(probes, tmp_path) == (["good"], [])
    (probes / name).chmod(0o666)
    names, (problem,) = found(probes, tmp_path)
    assert names == []
    reason = f"the probes beside it may read it, so no probe in {probes} is used"
    assert f"{name}: {reason}: it is writable by others" in problem


@needs_root
def test_what_kubernetes_mounts_is_believed(tmp_path):
    """A read-only mount of its own, of root's files, whatever its mode; a read-only part of a mount is no better."""
    mounted = tmp_path / "mounted"
    mounted.mkdir()
    code = "import sys, pathlib; from canaryd.config.permissions import doubt; "
    code += "[print(doubt(pathlib.Path(p))) for p in sys.argv[1:]]"
    script = """
        mount -t tmpfs -o mode=0777 none "$1" && mkdir -m 0777 "$1/below" && echo "{}" >"$1/canaryd.yaml" || exit
        "$0" -c "$2" "$1/canaryd.yaml"
        mount -o remount,ro "$1"
        "$0" -c "$2" "$1/canaryd.yaml" "$1" "$1/below"
    """
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script, sys.executable, str(mounted), code],
        capture_output=True, text=True, check=False, cwd=Path(settings.__file__).parents[1],
    )  # fmt: skip
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"nothing can be mounted here: {done.stderr.strip()}")
    assert done.stderr == ""
    writable, file, directory, below = done.stdout.splitlines()
    assert writable.startswith(f"its directory {mounted} is writable by others (drwxrwxrwx)")
    assert (file, directory) == ("", "")
    assert below.startswith("it is writable by others (drwxrwxrwx)")


@needs_root
def test_the_configuration_names_programs_and_is_believed_like_one(tmp_path, monkeypatch):
    """Not one that others can write or own, nor one in such a directory: one line, and exit status 64."""
    path = tmp_path / "etc" / "canaryd.yaml"
    path.parent.mkdir()
    path.write_text("listen: 127.0.0.1:19469\n")
    assert load.load(path).file == path
    path.chmod(0o664)
    answer = canaryd("config", "check", "--config", path)
    assert (answer.code, answer.out) == (64, "")
    assert answer.err == (
        f"canaryd: {path}: it is writable by others (-rw-rw-r--); if you trust it, run chmod go-w on it\n"
    )
    path.chmod(0o644)
    os.chown(path, STRANGER, -1)
    monkeypatch.setenv("CANARYD_CONFIG", str(path))
    reason = rf"it belongs to user {STRANGER}; wanted root; if you trust it, chown"
    with pytest.raises(ConfigError, match=rf"named by \$CANARYD_CONFIG.*{reason}"):
        load.load(None)
    os.chown(path, 0, -1)
    os.chown(path.parent, STRANGER, -1)
    with pytest.raises(ConfigError, match=f"its directory {path.parent} belongs to user {STRANGER}"):
        load.load(path)


def test_a_configuration_from_a_pipe_or_from_nowhere(tmp_path):
    """A shell's <(…) and /dev/null are fine; a named pipe of everybody's is not."""
    script = 'exec "$0" -m canaryd config check --config <(echo \'listen: "127.0.0.1:1"\')'
    done = subprocess.run(
        ["bash", "-c", script, sys.executable], capture_output=True, text=True, check=False, env=environment()
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert load.load(Path("/dev/null")).listen == ("127.0.0.1", 19469)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    pipe.chmod(0o666)
    assert permissions.doubt(pipe).startswith("it is writable by others (prw-rw-rw-)")


def test_links_without_end(tmp_path):
    """Links that lead in a circle are an error, not a hang."""
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(OSError, match="symbolic links"):
        permissions.doubt(tmp_path / "a")


# --- Who may come in -------------------------------------------------------------------------------------------------


def test_it_listens_on_loopback_unless_told_otherwise(tmp_path, state):
    """The default says so, the socket is so, and nothing is warned of; on every interface, it is."""
    assert settings.Config().listen[0] == "127.0.0.1"
    path = configure(tmp_path, "passes")
    state.mkdir(mode=0o750)
    with running(Daemon(path, state)) as daemon:
        assert daemon.address.startswith("http://127.0.0.1:")
        assert "canaryd_build_info" in daemon.get("/metrics")[1]
        assert not any("listening on" in line or "everybody" in line for line in daemon.lines)
    with running(Daemon(path, state, "--listen", ":0")) as daemon:
        line = daemon.line("listening on every interface")
        assert "without TLS: who reaches it reads everything; see docs/security.md" in line


def test_what_strangers_could_read_is_said(tmp_path, state):
    """The state directory, a key of an endpoint, the key of TLS."""
    state.mkdir(mode=0o755)
    pair = Authority(tmp_path / "pki").issue("server")
    key = tmp_path / "key"
    key.write_text("k\n")
    for path in (key, pair.key):
        path.chmod(0o644)
    path = configure(
        tmp_path, "passes", endpoints={"main": {"url": "http://127.0.0.1:9/v1", "key_file": str(key)}},
        tls={"cert_file": str(pair.cert), "key_file": str(pair.key)},
    )  # fmt: skip
    with running(Daemon(path, state, "--listen", ":0")) as daemon:
        daemon.line(f"{state}: all users may read it (drwxr-xr-x); run chmod o-rwx {state}")
        daemon.line(f"{key}: all users may read it (-rw-r--r--)")
        daemon.line(f"{pair.key}: all users may read it (-rw-r--r--)")
        assert not any("without TLS" in line for line in daemon.lines)


def test_bad_tls_is_no_open_door(tmp_path, state):
    """At the start: exit status 64, what to do, and no socket. Later: the old files stay, and a metric says so."""
    pair = Authority(tmp_path / "pki").issue("server")
    good = pair.cert.read_bytes()
    pair.cert.write_bytes(b"")
    path = configure(tmp_path, "passes", tls={"cert_file": str(pair.cert), "key_file": str(pair.key)})
    for command in (("run", "--state-dir", state, "--listen", "127.0.0.1:0"), ("config", "check")):
        answer = canaryd(*command, "--config", path)
        assert answer.code == 64
        assert f"OpenSSL cannot use {pair.key} with {pair.cert}" in answer.err
        assert len(answer.err.splitlines()) == 1
    pair.cert.write_bytes(good)
    context = ssl.create_default_context(cafile=tmp_path / "pki" / "ca.crt")
    with running(Daemon(path, state)) as daemon:

        def loaded() -> bool:
            with urllib.request.urlopen(daemon.address + "/metrics", timeout=20, context=context) as answer:
                return b"\ncanaryd_config_last_reload_successful 1" in answer.read()

        assert loaded()
        pair.cert.write_bytes(b"")
        daemon.line("the new TLS files are bad; the old ones stay in force")
        eventually(lambda: not loaded())
        pair.cert.write_bytes(good)
        eventually(loaded)
        path.write_text(json.dumps({name: v for name, v in json.loads(path.read_text()).items() if name != "tls"}))
        daemon.send(signal.SIGHUP)
        daemon.line("tls changed: it takes effect at the next restart")
        assert loaded()
        assert not any("Traceback" in line for line in daemon.lines)


class Guarded:
    """A daemon behind TLS and client certificates, with all that its clients need."""

    def __init__(self, directory: Path) -> None:
        self.ca, self.other = Authority(directory / "pki"), Authority(directory / "other", "other")
        self.server = self.ca.issue("server")
        self.client, self.expired = self.ca.issue("prometheus"), self.ca.issue("expired", days=-1)
        self.stranger = self.other.issue("stranger")
        files = {"cert_file": self.server.cert, "key_file": self.server.key, "client_ca_file": self.ca.cert}
        (directory / "state").mkdir(mode=0o750)
        tls = {name: str(file) for name, file in files.items()}
        self.daemon = Daemon(configure(directory, "passes", tls=tls), directory / "state")
        line = self.daemon.line("serves https://")
        self.target = line.partition("https://")[2].partition("/")[0]


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    with contextlib.ExitStack() as stack:
        made = Guarded(tmp_path_factory.mktemp("guarded"))
        stack.enter_context(running(made.daemon))
        yield made


def test_curl(guarded):
    """With everything: the metrics. Without the certificate, with a bad one, over plain HTTP: nothing."""
    curl = needed("curl", untested="it was not tried")

    def ask(*arguments: object, path: str = "/metrics") -> tuple[int, str, str]:
        argv = [curl, "-sS", "-m", "20", "-w", "%{http_code}", *map(str, arguments), f"https://{guarded.target}{path}"]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout[-3:], done.stdout[:-3] + done.stderr

    ca = ("--cacert", guarded.ca.cert)

    def by(pair) -> tuple[object, ...]:
        return ("--cert", pair.cert, "--key", pair.key)

    for version in ((), ("--tls-max", "1.2"), ("--tlsv1.3",), ("--http2",), ("--compressed",)):
        code, status, text = ask(*ca, *by(guarded.client), *version)
        assert (code, status) == (0, "200")
        assert "canaryd_build_info" in text
    assert ask(*ca, *by(guarded.client), path="/healthz")[1] in ("200", "503")
    for strangers in ((), by(guarded.expired), by(guarded.stranger)):
        code, status, _ = ask(*ca, *strangers)
        assert (code != 0, status) == (True, "000")
    assert ask("--cacert", guarded.other.cert, *by(guarded.client))[0] == 60  # the server is not the one expected
    done = subprocess.run(
        [curl, "-sS", f"http://{guarded.target}/metrics"], capture_output=True, text=True, check=False
    )
    assert done.stdout == "this is an HTTPS server: write https:// for http://\n"


def test_a_rotated_certificate_reaches_the_next_scrape(guarded):
    """The daemon is neither restarted nor signalled; the connections from before end."""
    context = ssl.create_default_context(cafile=guarded.ca.cert)
    context.load_cert_chain(guarded.client.cert, guarded.client.key)

    def number() -> str:
        host, port = guarded.target.split(":")
        with (
            socket.create_connection((host, int(port)), timeout=20) as plain,
            context.wrap_socket(plain, server_hostname="localhost") as client,
        ):
            return client.getpeercert()["serialNumber"]

    before = number()
    new = guarded.ca.issue("rotated")
    new.key.replace(guarded.server.key)
    new.cert.replace(guarded.server.cert)
    eventually(lambda: number() != before)


def test_the_documented_proxy_asks_for_a_password(tmp_path, state):
    """docs/security.md: its lines for nginx are taken, a right password gets the metrics, and others get 401."""
    nginx = needed("nginx", untested="the proxy was not tried")
    (server,) = re.findall("^```nginx\n(.*?)^```", (ROOT / "docs/security.md").read_text(), re.MULTILINE | re.DOTALL)
    ca = Authority(tmp_path / "pki")
    ca.issue("canaryd")
    hashed = subprocess.run(["openssl", "passwd", "-6", "correct horse"], capture_output=True, text=True, check=True)
    (tmp_path / "pki" / "canaryd.htpasswd").write_text(f"prometheus:{hashed.stdout}")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with running(Daemon(configure(tmp_path, "passes"), state)) as daemon:
        server = server.replace("/etc/nginx/", f"{tmp_path}/pki/").replace("19470", f"127.0.0.1:{port}")
        server = server.replace("http://127.0.0.1:19469", daemon.address)
        places = "".join(f"{what}_temp_path {tmp_path}/{what};" for what in _TEMPORARY)
        (tmp_path / "nginx.conf").write_text(
            f"{'user root;' if os.geteuid() == 0 else ''} daemon off; pid {tmp_path}/pid; events {{}}\n"
            f"http {{ access_log off; {places}\n{server}}}\n"
        )
        context = ssl.create_default_context(cafile=ca.cert)

        def ask(password: str) -> int:
            login = base64.b64encode(f"prometheus:{password}".encode()).decode()
            asked = urllib.request.Request(
                f"https://127.0.0.1:{port}/metrics", headers={"Authorization": f"Basic {login}"}
            )
            try:
                with urllib.request.urlopen(asked, timeout=20, context=context) as answer:
                    return answer.status if b"canaryd_build_info" in answer.read() else 0
            except urllib.error.HTTPError as error:
                with error:
                    return error.code
            except OSError:
                return 0

        with subprocess.Popen(
            [nginx, "-e", tmp_path / "errors", "-p", tmp_path, "-c", tmp_path / "nginx.conf"]
        ) as proxy:
            try:
                eventually(lambda: ask("correct horse") == 200)
                assert ask("battery staple") == 401
            finally:
                proxy.terminate()


_TEMPORARY = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")


# --- What is never told ----------------------------------------------------------------------------------------------


class Echo(Handler):
    """A model server that refuses, and repeats in its refusal what it was sent."""

    def respond(self) -> None:
        said = json.dumps({"error": {"message": f"invalid key: {self.headers['Authorization']}"}}).encode()
        self.reply(401, said)


SECRETS = {
    "key": "pl4nted-endpoint-key",
    "environment": "pl4nted-of-the-daemon",
    "worker": "pl4nted-worker-env",
    "setting": "pl4nted-probe-setting",
    "typed": "pl4nted-typed-in-vain",
}


def holds_secret(what: str, data: bytes, secrets: dict[str, str]) -> list[str]:
    """Return which secrets stand in `data`, also as base64."""
    return [
        f"{name} in {what}"
        for name, secret in secrets.items()
        if secret.encode() in data or base64.b64encode(secret.encode())[:-4] in data
    ]


def members(archive: Path):
    with tarfile.open(archive) as tar:
        for member in tar.getmembers():
            if member.isfile():
                yield member.name, tar.extractfile(member).read()


def test_planted_secrets_are_told_nowhere(tmp_path, state):
    """Not in the log, a page, a document, a dossier, the record, or the list of processes."""
    secrets = dict(SECRETS)
    key = tmp_path / "key"
    key.write_text(secrets["key"] + "\n")
    key.chmod(0o600)
    listed: set[bytes] = set()
    with listening(Echo) as address:
        path = configure(
            tmp_path,
            *("surroundings", "raises", "crashes", "mismatches", "records", "echoes"),
            each={
                "endpoint_canary": {"enabled": True, "period": "2s"},
                "records": {"settings": {"api_key": secrets["setting"]}},
            },
            endpoints={"main": {"url": f"http://{address}/v1", "key_file": str(key)}},
        )
        content = json.loads(path.read_text())
        content["worker"]["env"] = {"HF_TOKEN": secrets["worker"], "PLAIN": secrets["worker"]}
        path.write_text(json.dumps(content))
        os.environ["PLANTED_TOKEN"] = secrets["environment"]
        try:
            daemon = Daemon(path, state)
        finally:
            del os.environ["PLANTED_TOKEN"]
        with running(daemon):
            done = threading.Event()

            def watch() -> None:
                while not done.wait(0.2):  # a scan of all processes is dear, and a worker lives longer
                    for pid in marked(daemon.mark):
                        with contextlib.suppress(OSError):
                            listed.add(Path(f"/proc/{pid}/cmdline").read_bytes())

            watcher = threading.Thread(target=watch)
            watcher.start()

            def get(path: str) -> tuple[int, bytes]:
                login = base64.b64encode(f"alice:{secrets['typed']}".encode()).decode()
                asked = urllib.request.Request(daemon.address + path, headers={"Authorization": f"Basic {login}"})
                try:
                    with urllib.request.urlopen(asked, timeout=20) as answer:
                        return answer.status, answer.read() + str(answer.headers).encode()
                except urllib.error.HTTPError as error:
                    with error:
                        return error.code, error.read() + str(error.headers).encode()

            daemon.line("mismatches completed")
            daemon.line("raises errored")
            daemon.line("crashes crashed")
            daemon.line("records completed")
            daemon.line("endpoint_canary skipped")
            eventually(lambda: b'probe="mismatches"' in get("/metrics")[1])
            leaks = []
            for page in ("/", "/metrics", "/healthz", "/readyz", "/nowhere?key=" + secrets["typed"]):
                leaks += holds_secret(page, get(page)[1], secrets)
            options = ("--config", path, "--state-dir", state)
            commands = (("status",), ("status", "--json"), ("history",), ("history", "--json"), ("probes",))
            told = in_turn(*((*command, *options) for command in commands))
            for command, answer in zip(commands, told, strict=True):
                leaks += holds_secret(" ".join(command), (answer.out + answer.err).encode(), secrets)
            for number, more in enumerate(((), ("--redact",), ("--json",))):
                answer = canaryd("report", "cpu:0", "-o", tmp_path / f"r{number}", *more, *options, timeout=300)
                leaks += holds_secret("report", (answer.out + answer.err).encode(), secrets)
                (archive,) = (tmp_path / f"r{number}").glob("*.tar*")
                for name, data in members(archive):
                    leaks += holds_secret(f"report: {name}", data, secrets)
            answer = canaryd("report", "endpoint:main", "-o", tmp_path / "r9", *options, timeout=300)
            leaks += holds_secret("report of the endpoint", (answer.out + answer.err).encode(), secrets)
            for archive in (tmp_path / "r9").glob("*.tar*"):
                for name, data in members(archive):
                    leaks += holds_secret(f"report of the endpoint: {name}", data, secrets)
            done.set()
            watcher.join()
            daemon.end()
        leaks += holds_secret("log", "\n".join(daemon.lines).encode(), secrets)
    assert any(b"worker" in line for line in listed), listed
    for line in listed:
        leaks += holds_secret("list of processes", line, secrets)
    stored = [file for file in state.rglob("*") if file.is_file()]
    assert any(file.name == "canaryd.db" for file in stored)
    for file in stored:
        leaks += holds_secret(f"record: {file.name}", file.read_bytes(), secrets)
    assert leaks == []


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("wrong key sk-a/b+c~90 given", "wrong key … given"),
        ("?key=sk-a%2Fb%2bc~90&x", "?key=…&x"),
        ("Basic " + base64.b64encode(b"user:sk-a/b+c~90").decode(), "Basic dXNlcjp…A=="),
        ({"sk-a/b+c~90": ["x", ("sk-a/b+c~90", 1)]}, {"…": ["x", ["…", 1]]}),
        ("Bearer EMPTY; API key provided: EMPTY; EMPTY", "Bearer …; API key provided: …; EMPTY"),
        ("the basket is EMPTY", "the basket is EMPTY"),
    ],
)
def test_a_key_that_a_server_repeats_is_hidden(text, told):
    """As it is, percent-encoded and in base64; one that is a plain word only where it is called a key."""
    hidden.keep("sk-a/b+c~90")
    hidden.keep("EMPTY")
    assert hidden.hide(text) == told


def test_a_worker_elsewhere_is_told_its_environment_by_no_command_line(tmp_path, state):
    """worker.command and its bootstrap: the variables travel on standard input."""
    path = configure(tmp_path, "surroundings", "records", each={"records": {"settings": {"seconds": 1}}})
    content = json.loads(path.read_text())
    content["worker"] = {"command": ["env", content["worker"]["python"]], "env": {"API_KEY": SECRETS["worker"]}}
    path.write_text(json.dumps(content))
    listed: set[bytes] = set()
    with running(Daemon(path, state)) as daemon:

        def seen() -> bool:
            for pid in marked(daemon.mark):
                with contextlib.suppress(OSError):
                    listed.add(Path(f"/proc/{pid}/cmdline").read_bytes())
            return any(b"-c" in line for line in listed)

        eventually(seen)
        daemon.line("surroundings completed")
        seen()
        log = "\n".join(daemon.lines).encode()
    assert holds_secret("log", log, SECRETS) == []
    assert [leak for line in listed for leak in holds_secret("list of processes", line, SECRETS)] == []


@pytest.mark.parametrize(
    "text",
    [
        "endpoints: {main: {url: 'http://me:pl4nted@127.0.0.1/v1'}}",
        "endpoints: {main: {url: 'http://pl4nted@127.0.0.1/v1'}}",
        "worker: {env: {API_KEY: 471147114711}}",
    ],
)
def test_a_mistake_in_the_configuration_repeats_no_secret(tmp_path, text):
    """An address with a password in it, a number for a text."""
    path = tmp_path / "canaryd.yaml"
    path.write_text(text + "\n")
    with pytest.raises(ConfigError) as caught:
        load.load(path)
    assert "pl4nted" not in str(caught.value)
    assert "471147114711" not in str(caught.value)


ADDRESSES = (
    "http://me:pl4nted@127.0.0.1:9/v1",
    "http://pl4nted@127.0.0.1:9/v1",
    "me:pl4nted@127.0.0.1:9",
    "http:/me:pl4nted@127.0.0.1:9/v1",
    "http:me:pl4nted@127.0.0.1:9",
    "//me:pl4nted@127.0.0.1:9",
    "http://me:x/pl4nted@127.0.0.1:9/v1",
    "http://me:x?y#pl4nted@127.0.0.1:9/v1",
    "http://me:x@pl4nted@127.0.0.1:9/v1",
    "http://[me:pl4nted@127.0.0.1:9/v1",
    "ftp://me:pl4nted@127.0.0.1:9",
    "127.0.0.1:pl4nted@9",
    f"http:/me:pl4nted{'x' * 60}@127.0.0.1:9/v1",
)
"""Addresses with a password, well-formed and not."""


def test_no_address_is_repeated_with_its_password(tmp_path):
    """Wherever an address can be written, in a configuration or on the command line: it is refused, and hidden."""
    commands = []
    for address in ADDRESSES:
        for content in (
            {"endpoints": {"main": {"url": address}}},
            {"endpoints": {address: {"url": "http://127.0.0.1:9/v1"}}},
            {"listen": address},
        ):
            path = tmp_path / f"{len(commands)}.yaml"
            path.write_text(json.dumps(content))
            commands.append(("config", "check", "--config", path))
        commands.append(("run", "--listen", address))
    for command, answer in zip(commands, in_turn(*commands), strict=True):
        assert answer.code == 64, command
        assert "pl4nted" not in answer.out + answer.err, answer


def test_a_daemon_that_rereads_its_configuration_repeats_no_password(tmp_path, state):
    """Neither its log, nor its pages, nor `status`."""
    path = configure(tmp_path, "passes")
    content = json.loads(path.read_text())
    with running(Daemon(path, state)) as daemon:
        eventually(lambda: daemon.get("/readyz")[0] == 200)
        path.write_text(json.dumps(content | {"endpoints": {"main": {"url": "http:/me:pl4nted@127.0.0.1:9/v1"}}}))
        daemon.send(signal.SIGHUP)
        daemon.line("endpoints.main.url")
        pages = [daemon.get(page)[1] for page in ("/", "/metrics", "/readyz", "/healthz")]
        path.write_text(json.dumps(content))
        answers = in_turn(*((*words, "--config", path, "--state-dir", state) for words in (["status"], ["history"])))
        told = [*daemon.lines, *pages, *(text for answer in answers for text in (answer.out, answer.err))]
    assert [text for text in told if "pl4nted" in text] == []
