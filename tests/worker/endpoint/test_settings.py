"""The key file, models that a server lists, and fields that it refuses."""

from __future__ import annotations

import pytest

from canaryd.worker.endpoint.client import Client, Refused
from canaryd.worker.endpoint.prompts import Prompt
from canaryd.worker.endpoint.settings import Settings
from tests.worker.endpoint.asked import KEY, PROMPT, reach, reason
from tests.worker.endpoint.served import models, recorded, served

# --- Settings and models ---------------------------------------------------------------------------------------------


def test_the_key_file_holds_a_key_that_not_everybody_may_read(tmp_path):
    """It is refused otherwise, and never shown."""
    path = tmp_path / "key"
    read = {"url": "http://h/v1", "key_file": str(path)}
    assert "cannot be read" in reason(Settings.read, read)
    path.write_text(KEY + "\n")
    path.chmod(0o644)
    assert reason(Settings.read, read) == f"key_file: {path}: any user can read it: chmod o-r {path}"
    path.chmod(0o640)
    settings = Settings.read(read)
    assert settings.key == KEY
    assert KEY not in repr(settings)
    assert KEY not in repr(Client(url="http://h/v1", key=KEY))
    for bad in ("", KEY + "\n" + KEY, "sk canary", "sk-k\u00e9y"):
        path.write_text(bad)
        assert "wanted one key on one line" in reason(Settings.read, read)


@pytest.mark.parametrize(
    ("there", "wanted", "said"),
    [
        (("a", "b"), "", "not set, and the server lists 2: a, b; choose one"),
        ((), "", "not set, and the server lists none"),
        (("a", "b"), "c", "'c' is not served; the server lists a, b"),
        (tuple("abcdefghij"), "z", "lists a, b, c, d, e, f, g, h, …"),
    ],
)
def test_a_model_that_is_not_known_is_one_line(there, wanted, said):
    """With what there is."""
    with served({**recorded("generic"), "GET /v1/models": models(*there)}) as server:
        assert said in reason(reach, server, model=wanted)


def test_a_server_that_does_not_list_all_says_itself_what_it_lacks():
    """mlx-lm serves models beside its list; its 404 is a wrong name and not a missing API."""
    refusal = (404, {}, {"error": "model tinier not found"})
    with served({**recorded("mlx-lm"), "POST /v1/completions": refusal}) as server:
        endpoint = reach(server, model="tinier", dialect="mlx-lm")
        text = reason(endpoint.ask, "completions", PROMPT, fresh=True)
        assert text == "model: 'tinier' is not served (model tinier not found); the server lists tiny"


@pytest.mark.parametrize("status", [502, 504])
def test_a_proxy_that_does_not_reach_its_server_is_told_by_the_first_path(status):
    """Other paths would fail likewise, with names that the reader does not know, or give another dialect."""
    refusal = (status, {}, b"<html><h1>Bad Gateway</h1></html>")
    with served({**recorded("vllm"), "GET /v1/models": refusal}) as server:
        text = reason(reach, server, model="tiny")
        assert text == f"GET {server.url}/models: refused with {status}: without a message"
        assert len(server.requests) == 1


# --- Refused fields --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "refusal",
    [
        (422, {}, {"detail": [{"loc": ["body", "return_token_ids"], "msg": "Extra inputs are not permitted"}]}),
        (400, {}, {"error": {"message": "return_token_ids is not supported"}}),
        (400, {}, {"error": "bad request"}),
        (500, {}, {"error": {"message": "ValueError: return_token_ids is not supported"}}),
    ],
)
def test_a_field_that_is_refused_is_dropped_and_not_sent_again(refusal):
    """Whether the server names it or not; the rest is still asked for, and the chain says what is sent."""
    routes = recorded("vllm")
    answer = routes["POST /v1/completions"]
    routes["POST /v1/completions"] = lambda body: refusal if "return_token_ids" in body else answer(body)
    with served(routes) as server:
        endpoint = reach(server)
        for _ in range(3):
            given = endpoint.ask("completions", PROMPT, fresh=False, salt="s")
        sent = [set(body) for body in server.asked("/completions")]
        assert ["return_token_ids" in fields for fields in sent].count(True) == 1 + (
            refusal[2] == {"error": "bad request"}
        )
        assert len(sent) == 4 + (refusal[2] == {"error": "bad request"})
        assert "logprobs" in sent[-1]
        assert given.scored
        assert "return_token_ids" not in endpoint.recording("c", "completions", PROMPT, given, "").chain["settings"]


def test_a_request_that_is_refused_bare_has_not_taught_anything():
    """A context that is too long says nothing about fields."""
    routes = recorded("vllm")
    answer = routes["POST /v1/completions"]
    long = (400, {}, {"error": {"message": "context length exceeded"}})
    routes["POST /v1/completions"] = lambda body: long if len(body["prompt"]) > 100 else answer(body)
    with served(routes) as server:
        endpoint = reach(server)
        with pytest.raises(Refused, match="context length exceeded"):
            endpoint.ask("completions", PROMPT, fresh=True, salt="s")
        assert endpoint.dropped == {"completions": set(), "chat": set()}
        asked = len(server.requests)
        assert endpoint.ask("completions", Prompt(name="a", text="short"), fresh=True, salt="s").scored
        assert len(server.requests) == asked + 1
        assert asked < 12


def test_alternatives_are_given_up_before_probabilities():
    """A server that allows fewer than five names both fields."""
    routes = recorded("generic")
    answer = routes["POST /v1/chat/completions"]
    refusal = (400, {}, {"error": {"message": "top_logprobs with logprobs: at most 2"}})
    routes["POST /v1/chat/completions"] = lambda body: refusal if "top_logprobs" in body else answer
    with served(routes) as server:
        endpoint = reach(server)
        assert endpoint.ask("chat", PROMPT, fresh=True).scored
        assert endpoint.dropped["chat"] == {"top_logprobs"}
