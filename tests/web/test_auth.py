"""Passwords, headers and rates, as scrapers and strangers meet them."""

from __future__ import annotations

import base64
import concurrent.futures
import contextlib
import http.client
import logging
import re
import shutil
import statistics
import subprocess
import sys
import threading
import time

import pytest

from canaryd.config.load import ConfigError
from canaryd.web.auth import SHARE, WAITING, WebConfig
from canaryd.web.settings import MAKE_HASH
from tests.command import ROOT, eventually
from tests.web.gates import PASSWORD, REQUIRED, bcrypt, get, hashed, problems, serving, tls, users, write


def basic(user: str, password: str) -> dict[str, str]:
    return {"Authorization": "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()}


# --- Passwords -------------------------------------------------------------------------------------------------------


def test_passwords(tmp_path):
    """One of a known user lets in, everywhere; nothing else does, and the answer says how to come in."""
    with serving(write(tmp_path, users(alice=hashed(), bob=hashed("other")))) as server:
        for path, status in (("/metrics", 200), ("/healthz", 503), ("/nowhere", 404)):
            assert get(server, path=path, **basic("alice", PASSWORD))[0] == status
            assert get(server, path=path)[0] == 401
        status, headers, body, _ = get(server)
        assert headers["WWW-Authenticate"] == 'Basic realm="canaryd", charset="UTF-8"'
        assert b"canaryd_" not in body
        assert get(server, **basic("bob", "other"))[0] == 200
        for user, password in (("alice", "other"), ("bob", PASSWORD), ("eve", PASSWORD), ("", ""), ("alice", "")):
            assert get(server, **basic(user, password))[0] == 401
        for header in ("Bearer x", "Basic", "Basic !!!", "Basic YWxpY2U=", "Basic " + "A" * 5000, "basic"):
            assert get(server, Authorization=header)[0] == 401
        assert get(server, Authorization="bASIC  " + basic("alice", PASSWORD)["Authorization"][6:])[0] == 200


@pytest.mark.parametrize("password", ["", "x\0y", "pässwörd", "x" * 72, "y" * 200, "a:b:c"])
def test_passwords_of_every_kind(tmp_path, password):
    """Empty, not ASCII, with colons, longer than bcrypt looks: as bcrypt defines it; one with a NUL lets nobody in."""
    with serving(write(tmp_path, users(alice=hashed("x" if "\0" in password else password)))) as server:
        assert get(server, **basic("alice", password))[0] == (401 if "\0" in password else 200)
        assert get(server, **basic("alice", "z" + password))[0] == 401


def test_hashes_that_htpasswd_makes(tmp_path):
    """$2y$ is taken as $2b$."""
    with serving(write(tmp_path, users(alice=hashed().replace("$2b$", "$2y$")))) as server:
        assert get(server, **basic("alice", PASSWORD))[0] == 200


def test_the_documented_line_makes_a_hash_with_what_is_installed(tmp_path):
    """docs/security.md: canaryd's own interpreter asks for the password; a bad hash names the line too."""
    (line,) = re.findall(r'^printf "basic_auth_users.*$', (ROOT / "docs/security.md").read_text(), re.MULTILINE)
    assert MAKE_HASH in line
    here = line.replace("/opt/canaryd/bin/python3", sys.executable).replace("-o root -g canaryd ", "")
    script = here.replace("/etc/canaryd/web.yml", str(tmp_path / "web.yml"))
    subprocess.run(["/bin/sh", "-c", script], input=f"{PASSWORD}\n", text=True, start_new_session=True, check=True)
    (tmp_path / "web.yml").chmod(0o640)
    with serving(tmp_path / "web.yml") as server:
        assert get(server, **basic("prometheus", PASSWORD))[0] == 200
        assert get(server, **basic("prometheus", "another"))[0] == 401
    with pytest.raises(ConfigError) as caught:
        WebConfig(write(tmp_path, users(alice="typed")))
    assert MAKE_HASH in str(caught.value)


def test_an_unknown_user_costs_what_a_known_one_does(tmp_path):
    """The stand-in is computed at the cost of a real user's hash, and the same for the same name."""
    gate = WebConfig(write(tmp_path, users(alice=hashed(cost=4), bob=hashed(cost=6))))
    rules = gate._rules
    costs = {}
    for name in (b"eve%d" % i for i in range(200)):
        stand_in = gate._stand_in(rules, name)
        assert stand_in == gate._stand_in(rules, name)
        assert not bcrypt.checkpw(b"x", stand_in)
        costs[name] = int(stand_in.split(b"$")[2])
    assert 40 < sum(cost == 4 for cost in costs.values()) < 160
    assert set(costs.values()) == {4, 6}


def test_known_and_unknown_users_take_the_same_time(tmp_path):
    """Median against median, wrong passwords for both, each on a gate of its own."""
    took = {}
    for user in ("alice", "eve"):
        gate = WebConfig(write(tmp_path, users(alice=hashed(cost=8))))
        times = []
        for number in range(9):
            gate._turns._next = 0.0  # the pause after a wrong password would hide what is compared
            begun = time.thread_time()
            answer = gate.refusal({"authorization": basic(user, f"wrong{number}")["Authorization"]}, "test")
            times.append(time.thread_time() - begun)
            assert answer is not None
            assert answer.status == 401
        took[user] = statistics.median(times)
    assert 0.5 < took["eve"] / took["alice"] < 2.0


def test_a_right_password_is_computed_once(tmp_path):
    """Scrapes cost no hash each; a new hash for the user is heeded at once; nothing in memory is the password."""
    gate = WebConfig(write(tmp_path, users(alice=hashed(cost=10))))
    header = {"authorization": basic("alice", PASSWORD)["Authorization"]}
    assert gate.refusal(header, "test") is None
    begun = time.thread_time()
    for _ in range(100):
        assert gate.refusal(header, "test") is None
    assert time.thread_time() - begun < 1.0  # a hundred hashes would take several
    assert PASSWORD.encode() not in b"".join(gate._correct)
    write(tmp_path, users(alice=hashed("new", cost=4)))
    gate.refresh()
    assert gate.refusal(header, "test") is not None


def test_a_wrong_password_is_never_remembered(tmp_path):
    """A user whose hash is mended comes in with the very password that was wrong a moment ago."""
    file = write(tmp_path, users(alice=hashed("first")))
    with serving(file) as server:
        assert get(server, **basic("alice", "second"))[0] == 401
        write(tmp_path, users(alice=hashed("second")))
        assert get(server, **basic("alice", "second"))[0] == 200
        assert get(server, **basic("alice", "first"))[0] == 401


def test_guessing_costs_a_bounded_share_and_keeps_no_scraper_out(tmp_path):
    """Forty clients guess as fast as they can: few wait, the others are sent away, and who is known is served."""
    with serving(write(tmp_path, users(alice=hashed(cost=9)))) as server:
        assert get(server, **basic("alice", PASSWORD))[0] == 200
        seen: list[int] = []
        stop = threading.Event()

        def guess(number: int) -> None:
            turn = 0
            while not stop.is_set():
                turn += 1
                with contextlib.suppress(OSError, http.client.HTTPException):  # its place is given to another
                    seen.append(get(server, timeout=60, **basic("alice", f"{number} {turn}"))[0])
                time.sleep(0.01)

        with concurrent.futures.ThreadPoolExecutor(40) as pool:
            for number in range(40):
                pool.submit(guess, number)
            eventually(lambda: 429 in seen and 401 in seen)
            begun = time.monotonic()
            for _ in range(10):
                assert get(server, **basic("alice", PASSWORD))[0] == 200
            assert time.monotonic() - begun < 20
            stop.set()
        assert set(seen) == {401, 429}


def test_the_pause_after_a_wrong_password(tmp_path):
    """Computing takes at most the promised share of the time, however many ask at once."""
    gate = WebConfig(write(tmp_path, users(alice=hashed(cost=8))))
    header = {"authorization": basic("alice", "wrong")["Authorization"]}
    begun = time.monotonic()
    spent = []
    for _ in range(4):
        before = time.thread_time()
        gate.refusal(header, "test")
        spent.append(time.thread_time() - before)
    assert sum(spent[:3]) / (time.monotonic() - begun) < 2 * SHARE
    gate._turns._waiting |= {f"other {number}" for number in range(WAITING)}
    answer = gate.refusal(header, "test")
    assert answer is not None
    assert (answer.status, answer.headers) == (429, ("Retry-After: 5",))


def test_a_guesser_keeps_out_nobody_but_itself(tmp_path):
    """One place for each address: while one guesses, a scraper that is not known yet comes in."""
    gate = WebConfig(write(tmp_path, users(alice=hashed())))
    header = {"authorization": basic("alice", PASSWORD)["Authorization"]}
    gate._turns._waiting.add("guesser")
    assert gate.refusal(header, "guesser").status == 429
    assert gate.refusal(header, "scraper") is None


def test_who_is_known_stays_known_when_others_change(tmp_path, monkeypatch):
    """Another user's change costs a scraper no computing, its own does; and one password is remembered once."""
    gate = WebConfig(write(tmp_path, users(alice=(one := hashed()))))
    header = {"authorization": basic("alice", PASSWORD)["Authorization"]}
    assert gate.refusal(header, "test") is None
    write(tmp_path, users(alice=one, bob=hashed("b")))
    gate.refresh()
    with monkeypatch.context() as patched:
        patched.setattr(gate._turns, "check", lambda *_: pytest.fail("computed again"))
        assert gate.refusal(header, "test") is None
    write(tmp_path, users(alice=hashed("another"), bob=hashed("b")))
    gate.refresh()
    assert gate.refusal(header, "test").status == 401
    long = "l" * 80
    write(tmp_path, users(alice=hashed(long)))
    gate.refresh()
    before = len(gate._correct)
    for more in ("", "x", "yy"):  # bcrypt looks at the first 72 bytes
        assert gate.refusal({"authorization": basic("alice", long + more)["Authorization"]}, "test") is None
    assert len(gate._correct) == before + 1


def test_an_authority_that_others_may_write_lets_nobody_in(tmp_path, ca, pair):
    """Whoever can put an authority there can issue himself a certificate."""
    theirs = tmp_path / "clients.crt"
    shutil.copy(ca.cert, theirs)
    theirs.chmod(0o666)
    more = f"  client_ca_file: {theirs}\n  client_auth_type: {REQUIRED}\n"
    assert "is writable by others" in problems(write(tmp_path, tls(pair, more)))[0]


def test_no_secret_in_the_log(tmp_path, caplog):
    """Who was sent away is named by address, once a minute; what was typed is not, not even the user."""
    with caplog.at_level(logging.DEBUG), serving(write(tmp_path, users(alice=hashed()))) as server:
        for number in range(3):
            get(server, **basic("s3cret-user", f"s3cret-{number}"))
        get(server, Authorization="Bearer s3cret")
    assert caplog.text.count("127.0.0.1 was not let in: wrong user or password") == 1
    assert "s3cret" not in caplog.text
    assert "$2b$" not in caplog.text


# --- Headers and rates -----------------------------------------------------------------------------------------------


def test_headers(tmp_path):
    """Those that are set replace ours of the same name; the others stay."""
    text = "http_server_config:\n  http2: false\n  headers:\n    X-Frame-Options: deny\n"
    text += "    Content-Security-Policy: \"default-src 'self'\"\n"
    with serving(write(tmp_path, text)) as server:
        headers = get(server)[1]
        assert headers["X-Frame-Options"] == "deny"
        assert headers.get_all("Content-Security-Policy") == ["default-src 'self'"]
        assert headers["X-Content-Type-Options"] == "nosniff"


def test_rate_limit(tmp_path):
    """As many at once as `burst` says, then 429 until an interval is over; 0 is no limit."""
    with serving(write(tmp_path, "rate_limit: {interval: 2s, burst: 3}\n")) as server:
        answers = [get(server)[0] for _ in range(6)]
        assert answers[:3] == [200] * 3
        assert 429 in answers[3:]
        eventually(lambda: get(server)[0] == 200)
    with serving(write(tmp_path, "rate_limit: {interval: 0, burst: 1}\n")) as server:
        assert {get(server)[0] for _ in range(10)} == {200}


def test_bcrypt_is_loaded_only_where_there_are_passwords(tmp_path):
    """A node without it serves TLS all the same, and with passwords is told what is missing."""
    file = write(tmp_path, "http_server_config: {headers: {X-Frame-Options: deny}}\n")
    code = "import sys, pathlib; from canaryd.web.auth import WebConfig; sys.modules['bcrypt'] = None\n"
    code += "WebConfig(pathlib.Path(sys.argv[1]))"
    argv = [sys.executable, "-c", code, file]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")
    write(tmp_path, users(alice=hashed()))
    done = subprocess.run(argv, capture_output=True, text=True, check=False, cwd=ROOT)
    assert "web.yml:2: basic_auth_users: passwords need the package bcrypt, which is missing" in done.stderr
