"""The file that `web_config` names: mistakes, contradictions, rights."""

from __future__ import annotations

import logging
import re
import shutil
import subprocess

import pytest

from canaryd.config.load import ConfigError
from canaryd.web.auth import WebConfig
from tests.command import ROOT
from tests.web.gates import problems, tls, write

# --- The file --------------------------------------------------------------------------------------------------------


def test_every_mistake_is_told_at_once_with_its_line(tmp_path):
    """What is unknown, what is misspelt and what Python's TLS cannot do; no secret is repeated."""
    text = """\
tls_server_config:
  cert_file: server.crt
  key: hunter2
  client_auth_type: RequireAnyClientCert
  min_version: TLS11
  max_version: SSL3
  cipher_suites: [TLS_AES_128_GCM_SHA256, TLS_RSA_WITH_RC4_128_SHA]
  curve_preferences: [CurveP224]
  certificate: x
http_server_config:
  http2: true
  headers: {Server: x, X-Frame-Options: sometimes}
basic_auth_users:
  alice: hunter2
  bob: 123456789
  eve: "$2y$31$vakpDkkQhyIU1fs6gTe1suHKHeXCvI8xdwi5..GXpF9ihWMxzUyqe"
rate_limit: {interval: soon, burst: 0}
"""
    found = problems(write(tmp_path, text))
    begun = [re.match(r"(\d+): ([\w.-]+)(\[\d\])?: ", line) for line in found]
    assert [(int(m[1]), m[2]) for m in begun if m] == [
        (3, "tls_server_config.key"),
        (4, "tls_server_config.client_auth_type"),
        (5, "tls_server_config.min_version"),
        (6, "tls_server_config.max_version"),
        (7, "tls_server_config.cipher_suites"),
        (7, "tls_server_config.cipher_suites"),
        (8, "tls_server_config.curve_preferences"),
        (9, "tls_server_config.certificate"),
        (11, "http_server_config.http2"),
        (12, "http_server_config.headers.Server"),
        (12, "http_server_config.headers.X-Frame-Options"),
        (14, "basic_auth_users.alice"),
        (15, "basic_auth_users.bob"),
        (16, "basic_auth_users.eve"),
        (17, "rate_limit.interval"),
        (17, "rate_limit.burst"),
    ]
    assert len(begun) == 16
    assert "hunter2" not in "".join(found)
    assert "123456789" not in "".join(found)


@pytest.mark.parametrize(
    ("more", "where", "said"),
    [
        ("  min_version: TLS12\n  cert: |\n    -----BEGIN CERTIFICATE-----\n", "cert_file", "given beside cert"),
        (
            "  client_auth_type: RequireAndVerifyClientCert\n",
            "client_auth_type",
            "the CA of client",
        ),
        ("  client_ca_file: ca.crt\n", "client_ca_file", "not used without client_auth_type"),
        ("  client_allowed_sans: [a]\n", "client_allowed_sans", "means nothing without"),
        ("  min_version: TLS13\n  max_version: TLS12\n", "max_version", "older than min_version"),
        ("  curve_preferences: [X25519, CurveP256]\n", "curve_preferences", "exactly one curve"),
        ("  cipher_suites: []\n", "cipher_suites", "an empty list"),
        ("rate_limit: {interval: 1s}\n", "rate_limit.interval", "without a burst"),
    ],
)
def test_settings_that_contradict_each_other(tmp_path, pair, more, where, said):
    """Each is refused with the setting that has to change."""
    (problem,) = problems(write(tmp_path, tls(pair, more)))
    assert where in problem.split(": ")[1]
    assert said in problem


def test_half_a_tls_section_is_no_plain_text(tmp_path):
    """A section that asks for TLS in any way never ends in an address without it."""
    found = problems(write(tmp_path, "tls_server_config: {max_version: TLS13, client_auth_type: NoClientCert}\n"))
    assert [line.partition(": ")[2] for line in found] == [
        "tls_server_config: without cert_file (or cert) there is no TLS; name the file",
        "tls_server_config: without key_file (or key) there is no TLS; name the file",
    ]
    for nothing in ("", "# later\n", "tls_server_config:\n", "tls_server_config: {}\nbasic_auth_users: {}\n"):
        assert problems(write(tmp_path, nothing)) == [
            "1: nothing is set; write what is wanted, or leave web_config out"
        ]


def test_files_that_are_no_certificates(tmp_path, ca, pair):
    """Missing, unreadable as PEM, not a pair, encrypted, no authority: each is said at its setting, with its path."""
    other = ca.issue("other")
    noise = tmp_path / "noise"
    noise.write_text("nothing\n")
    locked = tmp_path / "locked.key"
    subprocess.run(
        ["openssl", "ec", "-aes256", "-passout", "pass:x", "-in", pair.key, "-out", locked],
        check=True, capture_output=True,
    )  # fmt: skip

    def said(cert, key, more="") -> str:
        (problem,) = problems(write(tmp_path, f"tls_server_config:\n  cert_file: {cert}\n  key_file: {key}\n{more}"))
        return problem

    assert said("gone.crt", pair.key) == (
        f"2: tls_server_config.cert_file: {tmp_path}/gone.crt: cannot be read: No such file or directory"
    )
    assert said(noise, pair.key) == f"2: tls_server_config.cert_file: {noise} holds no certificate in PEM"
    assert said(pair.cert, noise) == f"3: tls_server_config.key_file: {noise} holds no private key in PEM"
    assert said(pair.cert, other.key).startswith("3: tls_server_config.key_file: not the key of the certificate")
    assert said(pair.cert, locked).startswith("3: tls_server_config.key_file: the key is encrypted")
    more = f"  client_auth_type: RequireAndVerifyClientCert\n  client_ca_file: {noise}\n"
    assert (
        said(pair.cert, pair.key, more) == f"5: tls_server_config.client_ca_file: {noise} holds no certificate in PEM"
    )
    broken = tmp_path / "broken.crt"
    broken.write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    assert "OpenSSL cannot use this certificate" in said(broken, pair.key)
    more = f"  client_auth_type: RequireAndVerifyClientCert\n  client_ca_file: {broken}\n"
    assert "holds no certificate that OpenSSL reads" in said(pair.cert, pair.key, more)


@pytest.mark.parametrize("name", ["missing.yml", "."])
def test_a_file_that_is_none(tmp_path, name):
    """A missing file and a directory are named."""
    with pytest.raises(ConfigError, match=re.escape(str(tmp_path / name))):
        WebConfig(tmp_path / name)


def test_a_number_of_no_character_is_a_mistake_like_any_other(tmp_path):
    """What PyYAML itself fails on has its line too."""
    path = write(tmp_path, 'http_server_config:\n  headers: {X-Frame-Options: "\\U99999999"}\n')
    with pytest.raises(ConfigError, match=r"web\.yml:2: cannot read this YAML: "):
        WebConfig(path)


def test_a_file_that_others_can_write_is_refused(tmp_path):
    """Whoever writes it decides who may read the evidence."""
    path = write(tmp_path, "")
    path.chmod(0o662)
    reason = r"it is writable by others \(-rw-rw--w-\); if you trust it, run chmod go-w"
    with pytest.raises(ConfigError, match=rf"web\.yml: {reason}"):
        WebConfig(path)


def test_keys_that_everybody_may_read_are_warned_of(tmp_path, ca, caplog):
    """They work, and the log says how to end it."""
    pair = ca.issue("open")
    pair.key.chmod(0o644)
    with caplog.at_level(logging.WARNING):
        WebConfig(write(tmp_path, tls(pair)))
    assert f"{pair.key}: all users may read it (-rw-r--r--); run chmod o-rwx {pair.key}" in caplog.text


def test_the_shipped_example_is_read_and_promtool_agrees(tmp_path, ca, pair):
    """deploy/web.yml, every line of it uncommented, is a configuration for canaryd and for Prometheus alike."""
    text = (ROOT / "deploy" / "web.yml").read_text()
    assert "nothing is set" in problems(write(tmp_path, text))[0]
    full = re.sub(r"(?m)^( *)#(?=\S)", r"\1", text)
    shutil.copy(pair.cert, tmp_path / "server.crt")
    shutil.copy(pair.key, tmp_path / "server.key")
    shutil.copy(ca.cert, tmp_path / "clients.crt")
    gate = WebConfig(write(tmp_path, full))
    assert gate.tls
    assert gate.passwords
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed here: nobody else has read the example")
    done = subprocess.run(
        [promtool, "check", "web-config", tmp_path / "web.yml"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
