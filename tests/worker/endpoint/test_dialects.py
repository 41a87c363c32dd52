"""Each dialect against the bodies that its server was recorded to answer: told apart, asked in its way, understood."""

from __future__ import annotations

import itertools
import json
import math

import pytest

from canaryd.config import values
from canaryd.probe import Skip
from canaryd.worker.endpoint.answers import Answer, parse
from canaryd.worker.endpoint.canary import Endpoint
from canaryd.worker.endpoint.dialects import DIALECTS, GENERIC, MLX_LM
from canaryd.worker.endpoint.prompts import Prompt
from canaryd.worker.endpoint.settings import Settings
from tests.worker.endpoint import served as bodies
from tests.worker.endpoint.served import PORTABLE, VLLM_LEGACY, chat, completion, recorded, served

PROMPT = Prompt(name="reef", text="The diver sank slowly towards the reef. " * 3)
BYPASSED = {"vllm": "cache_salt", "sglang": "cache_salt", "llama-server": "cache_prompt"}


def reach(server, **settings) -> Endpoint:
    return Endpoint(Settings.read({"url": server.url, "model": "tiny", **settings}))


def answered(name: str, api: str) -> tuple[Answer, dict, str]:
    """Return the answer of a recorded server, what it was asked, and which server it was taken for."""
    with served(recorded(name)) as server:
        endpoint = reach(server)
        answer = endpoint.ask(api, PROMPT, fresh=True, salt="s1")
        body = server.asked("/completions" if api == "completions" else "/chat/completions")[-1]
        return answer, body, endpoint.dialect.name


def test_the_configuration_knows_the_same_dialects():
    """It must not import the worker to list them, so it has a copy."""
    assert tuple(DIALECTS) == values.DIALECTS


@pytest.mark.parametrize("name", [name for name in DIALECTS if name != "generic"])
def test_a_server_is_told_by_what_it_answers(name):
    """Nothing is set, and the adapter of that server is taken, on both APIs without a refused request."""
    with served(recorded(name)) as server:
        endpoint = reach(server)
        assert endpoint.dialect.name == name
        for api in ("completions", "chat"):
            assert endpoint.ask(api, PROMPT, fresh=True, salt="s1").text
        assert endpoint.dropped == {"completions": set(), "chat": set()}


def test_an_unknown_server_is_asked_with_care():
    """It is generic, and gets fields of the interface alone, none of one server."""
    answer, body, name = answered("generic", "chat")
    assert name == "generic"
    assert set(body) - PORTABLE == {"logprobs", "top_logprobs", "seed"}
    assert answer.values == (-4.480612754821777,)


def test_a_dialect_that_is_set_is_not_looked_for():
    """No request but those for the models and the version."""
    with served(recorded("generic")) as server:
        assert reach(server, dialect="mindie").dialect.name == "mindie"
        assert [route for route, _, _ in server.requests] == ["GET /v1/models"]


@pytest.mark.parametrize(
    ("name", "version"),
    [
        ("vllm", "0.32.0"),
        ("sglang", "0.5.23"),
        ("trtllm", "1.2.0"),
        ("llama-server", "b0-unknown"),
        ("ollama", "0.12.9"),
        ("tgi", "3.3.4"),
        *((name, "") for name in ("mlx-lm", "transformers", "mindie", "llama-cpp-python")),
    ],
)
def test_the_version_is_read_where_the_server_has_it(name, version):
    """And it is a part of the chain, with the fingerprint where there is one."""
    with served(recorded(name)) as server:
        endpoint = reach(server)
        assert endpoint.version == version
        answer = endpoint.ask("completions", PROMPT, fresh=True, salt="s")
        chain = endpoint.recording("c", "completions", PROMPT, answer, "").chain
        said = (name, version, answer.fingerprint, endpoint.configuration)
        assert chain["server"] == " ".join(filter(None, dict.fromkeys(said)))
        assert name in chain["client"]


@pytest.mark.parametrize("name", DIALECTS)
@pytest.mark.parametrize("api", ["completions", "chat"])
def test_only_fields_of_the_adapter_are_sent(name, api):
    """The portable ones always with temperature 0; the field against the cache where there is one."""
    _, body, _ = answered(name, api)
    assert (body["temperature"], body["stream"], body["model"], body["max_tokens"]) == (0, False, "tiny", 64)
    cold = BYPASSED.get(name, "cache_salt" if (name, api) == ("trtllm", "chat") else "")
    assert set(body) - PORTABLE == {*DIALECTS[name].fields(api), *([cold] if cold else [])}
    if cold:
        assert body[cold] == ("s1" if cold == "cache_salt" else False)


def test_legacy_lists_with_ids():
    """vLLM: tokens are the ids, margins the lead over the second."""
    answer, _, _ = answered("vllm", "completions")
    assert answer.tokens == ("511", "512")
    assert answer.values == (-4.39196252822876, -4.180643081665039)
    assert answer.margins == pytest.approx((-4.39196252822876 + 4.50133752822876, 4.3 - 4.180643081665039))
    assert (answer.text, answer.finish, answer.prompt_ids, answer.prompt_tokens) == ("thodbj", "length", (5, 6), 14)
    assert answer.fingerprint == "vllm-0.32.0-180f2252"


def test_objects_with_and_without_ids():
    """The chat shape; a token is its id where it has one, else its text."""
    answer, _, _ = answered("llama-server", "completions")
    assert (answer.tokens, answer.values) == (("1001",), (-3.933040142059326,))
    assert answer.margins == pytest.approx((4.451022624969482 - 3.933040142059326,))
    answer, _, _ = answered("sglang", "chat")
    assert (answer.tokens, answer.values) == ((" range",), (-4.480612754821777,))


def test_the_generated_token_of_mlx_is_the_best_of_the_alternatives():
    """`content[0].token` is another one; of equals, greedy decoding takes the lowest id."""
    answer, body, _ = answered("mlx-lm", "completions")
    assert body["logprobs"] is True
    assert (answer.tokens, answer.values, answer.margins) == (("753",), (-4.375,), (-4.375 + 4.65625,))
    tied = {**bodies.MLX_WRONG, "top_logprobs": [{"id": i, "token": "", "logprob": -4.0} for i in (70, 9, 12, 80, 90)]}
    answer = parse(MLX_LM, completion({"text": "x", "logprobs": {"content": [tied]}}), tokens=64)
    assert (answer.tokens, answer.values, answer.margins) == (("9",), (-4.0,), (0.0,))


def test_colliding_texts_leave_no_margin():
    """Five were asked for and four came: one of the two best may be missing."""
    answer, _, _ = answered("llama-cpp-python", "completions")
    assert (answer.values, answer.margins) == ((-4.37767219543457,), (None,))


@pytest.mark.parametrize(("name", "api"), [("ollama", "completions"), ("tgi", "completions"), ("transformers", "chat")])
def test_text_alone_has_no_values(name, api):
    """Nothing is scored, nothing is missing, and the text is still exact."""
    answer, _, _ = answered(name, api)
    assert (answer.scored, answer.tokens, answer.values, answer.margins, answer.nonfinite) == (False, (), (), (), 0)
    assert answer.text == "syools"


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, -9999.0, -3.4028234663852886e38, None])
def test_what_is_no_probability_is_none_and_counted(bad):
    """NaN, infinities, the servers' sentinels and null; also among the alternatives."""
    item = {**bodies.RANGE, "logprob": bad}
    said = json.loads(json.dumps(chat({"text": " range", "logprobs": {"content": [item]}})))
    answer = parse(GENERIC, said, tokens=64)
    assert (answer.values, answer.nonfinite) == ((None,), 1)
    top = [{**entry, "logprob": bad} if i else entry for i, entry in enumerate(bodies.RANGE["top_logprobs"])]
    item = {**bodies.RANGE, "top_logprobs": top}
    answer = parse(GENERIC, chat({"text": " range", "logprobs": {"content": [item]}}), tokens=64)
    assert (answer.values, answer.margins, answer.nonfinite) == ((-4.480612754821777,), (None,), 4)


@pytest.mark.parametrize("value", [-9999.0, None])
def test_the_token_that_ends_a_text_has_no_probability_and_is_left_out(value):
    """As vLLM lists it (vllm#17637): last, empty, no alternatives, its sentinel or null. Else it is lost."""
    listed = [{"token": t, "logprob": -0.3, "top_logprobs": [{"token": t, "logprob": -0.3}]} for t in (" a", " b")]
    end = {"token": "", "logprob": value, "bytes": [], "top_logprobs": []}
    said = chat({"text": " a b", "logprobs": {"content": [*listed, end]}, "token_ids": [5, 6, 7]})
    said["choices"][0]["finish_reason"] = "stop"
    answer = parse(GENERIC, said, tokens=64)
    assert (answer.tokens, answer.values, answer.nonfinite) == (("5", "6"), (-0.3, -0.3), 0)
    said["choices"][0]["finish_reason"] = "length"
    assert parse(GENERIC, said, tokens=64).nonfinite == 1
    said["choices"][0] |= {"finish_reason": "stop", "logprobs": {"content": [end, *listed]}}
    assert parse(GENERIC, said, tokens=64).nonfinite == 1


@pytest.mark.parametrize(
    "data",
    [
        {},
        [],
        "text",
        {"choices": []},
        {"choices": [{"message": {"role": "assistant"}}]},
        {"choices": [{"text": "a", "logprobs": {"tokens": ["a"]}}]},
        {"choices": [{"text": "a", "logprobs": {"tokens": ["a", "b"], "token_logprobs": [-1.0]}}]},
        {"choices": [{"text": "a", "logprobs": {"content": [{"logprob": -1.0}]}}]},
        {"choices": [{"text": "a", "logprobs": 5}]},
        {"choices": [{"text": "a"}], "usage": 7},
        {"choices": [{"text": "a"}], "usage": {"prompt_tokens": {"text": 14}}},
        {"choices": [{"text": "a"}], "usage": {"prompt_tokens": -1}},
        {"choices": [{"text": "a", "finish_reason": {"why": "length"}}]},
        {"choices": [{"text": {"a": 1}}]},
        {"choices": [{"text": "a", "token_ids": [{"id": 1}]}]},
        {"choices": [{"text": "a", "prompt_token_ids": ["1"]}]},
        {"choices": [{"text": "a", "logprobs": {"content": [{"token": "a", "logprob": {"value": -1.0}}]}}]},
        {"choices": [{"text": "a", "logprobs": {"content": [{"token": "a", "logprob": "-1.0"}]}}]},
        {"choices": [{"text": "a", "logprobs": {"content": [{"token": ["a"], "logprob": -1.0}]}}]},
        {"choices": [{"text": "a" * 300, "logprobs": {"content": [{"token": "a" * 300, "logprob": -1.0}]}}]},
    ],
)
def test_an_unknown_shape_is_one_clear_line(data):
    """It names the dialect; it is never taken for an answer."""
    with pytest.raises(Skip, match="this generic server has an unknown shape"):
        parse(GENERIC, data, tokens=64)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (
            chat({"text": "a", "logprobs": {"content": [{"token": "ab", "logprob": -1.0}] * 65}}),
            "has 65 tokens; at most 64 were asked for",
        ),
        (chat({"text": "a" * 20_000}), "has 20,000 characters; at most 64 tokens were asked for"),
        (completion({"text": "", "finish_reason": "abort"}), 'was broken off by the server itself ("abort")'),
        (
            completion({"text": "thodbj", "logprobs": VLLM_LEGACY, "finish_reason": "error"}),
            'was broken off after 2 tokens by the server itself ("error")',
        ),
    ],
)
def test_what_is_no_answer_is_one_clear_line(data, said):
    """A baseline must not learn it, and a harness must not trip over it."""
    with pytest.raises(Skip) as caught:
        parse(GENERIC, data, tokens=64)
    assert str(caught.value).startswith(f"the answer of this generic server {said}")


def test_reasoning_is_part_of_the_answer():
    """A model that thinks aloud may have spent all its tokens on that."""
    data = chat({"text": None})
    data["choices"][0]["message"]["reasoning_content"] = "First"
    assert parse(GENERIC, data, tokens=64).text == "First"


CACHE = (
    'vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="0",num_gpu_blocks="%s",'
    'enable_prefix_caching="%s"} 1.0\nprocess_start_time_seconds 1.76374712345e+09\n'
)


def props(**changes) -> dict:
    settings = {"n_ctx": 4096, "params": {"temperature": 0.8, "seed": 7}, **changes.pop("settings", {})}
    props = {
        "default_generation_settings": settings,
        "total_slots": 8,
        "model_path": "/m/tiny.gguf",
        "build_info": "b1",
    }
    return {**props, **changes}


@pytest.mark.parametrize(
    ("name", "route", "same", "other"),
    [
        ("vllm", "GET /metrics", [CACHE % (8, True), CACHE % (9, True)], CACHE % (8, False)),
        (
            "llama-server",
            "GET /props",
            [
                props(),
                props(is_sleeping=True),
                props(settings={"params": {"seed": 8, "temperature": 0.8}, "is_processing": True}),
            ],
            props(total_slots=4),
        ),
        ("llama-server", "GET /props", [props()], props(model_path="/m/other.gguf")),
        ("llama-server", "GET /props", [props()], props(settings={"params": {"temperature": 0.7}})),
        (
            "sglang",
            "GET /server_info",
            [
                {"version": "1", "attention_backend": "fa3", "internal_states": [{"last_gen_throughput": speed}]}
                for speed in (1.5, 2.5)
            ],
            {"version": "1", "attention_backend": "triton"},
        ),
    ],
)
def test_what_a_server_says_of_its_configuration_is_a_part_of_the_chain(name, route, same, other):
    """What it was started with counts; what changes by itself does not."""
    said = []
    for answer in (*same, other):
        content = answer.encode() if isinstance(answer, str) else answer
        with served({**recorded(name), route: content}) as server:
            endpoint = reach(server)
            given = endpoint.ask("completions", PROMPT, fresh=True, salt="s")
            said.append(endpoint.recording("c", "completions", PROMPT, given, "").chain["server"].split()[-1])
    assert all(len(each) == 8 and int(each, 16) >= 0 for each in said)
    assert len(set(said[:-1])) == 1
    assert said[-1] != said[0]


def test_a_configuration_that_changes_by_itself_is_none():
    """Only what two reads in a row agree on counts, and a server that settles is waited for."""
    slots = itertools.count()
    with served(recorded("llama-server")) as server:
        server.routes["GET /props"] = lambda _: props(total_slots=next(slots))
        assert reach(server).configuration == ""
        settling = itertools.chain(["early"], itertools.repeat("/m/tiny.gguf"))
        server.routes["GET /props"] = lambda _: props(model_path=next(settling))
        settled = reach(server).configuration
        server.routes["GET /props"] = props()
        assert settled == reach(server).configuration != ""
    with served(recorded("vllm")) as server:
        assert reach(server).configuration == ""  # it has no such metric


SENT = 'model="tiny" max_tokens=64 temperature=0 stream=false'


@pytest.mark.parametrize(
    ("name", "api", "fresh", "settings"),
    [
        (
            "trtllm",
            "chat",
            True,
            SENT + " logprobs=true top_logprobs=5 seed=1 cache_salt=(new)",
        ),
        (
            "llama-server",
            "completions",
            True,
            SENT + " logprobs=5 seed=1 cache_prompt=false",
        ),
        (
            "llama-server",
            "completions",
            False,
            SENT + " logprobs=5 seed=1 cache_prompt=true",
        ),
        ("transformers", "chat", True, SENT),
    ],
)
def test_the_settings_are_all_that_was_sent(name, api, fresh, settings):
    """Every field but the prompt, with the one against the cache; of a salt no value, which no two requests share."""
    with served(recorded(name)) as server:
        endpoint = reach(server)
        for salt in ("s1", "s2"):
            answer = endpoint.ask(api, PROMPT, fresh=fresh, salt=salt)
            assert endpoint.recording("c", api, PROMPT, answer, "").chain["settings"] == settings
        body = server.asked("/completions" if api == "completions" else "/chat/completions")[-1]
        assert {field.partition("=")[0] for field in settings.split()} == set(body) - {"prompt", "messages"}


def test_the_prompts_ids_come_from_the_answer_or_the_tokenizer():
    """Where a server gives neither, their number stands in; another tokenizer changes the link."""
    prompts = {}
    for name in ("vllm", "llama-server", "llama-cpp-python", "tgi", "mlx-lm"):
        with served(recorded(name)) as server:
            endpoint = reach(server)
            links = []
            for _ in range(2):
                answer = endpoint.ask("completions", PROMPT, fresh=True, salt="s")
                links.append(endpoint.recording("c", "completions", PROMPT, answer, "").chain["prompt"])
            assert links[0] == links[1]
            prompts[name] = links[0]
            if endpoint.dialect.tokenize and name != "vllm":
                sent = [body for route, body, _ in server.requests if "tokenize" in route]
                assert [PROMPT.text in body.values() for body in sent] == [True]
    assert len(set(prompts.values())) == len(prompts)


def test_llama_servers_chat_is_rendered_by_itself():
    """The template goes into the chain as the server has it, and so do the tokens of what it renders."""
    chains = []
    for template in ("{{ x }}", "{{ y }}"):
        routes = recorded("llama-server")
        routes["GET /props"] = {**routes["GET /props"], "chat_template": template}
        with served(routes) as server:
            endpoint = reach(server)
            answer = endpoint.ask("chat", PROMPT, fresh=True)
            chains.append(endpoint.recording("c", "chat", PROMPT, answer, "").chain)
            (body,) = (body for route, body, _ in server.requests if route == "POST /tokenize")
            assert body["content"] == "<|im_start|>user"
    assert chains[0]["template"] != chains[1]["template"]
    assert chains[0]["prompt"] == chains[1]["prompt"]


def test_ollamas_digest_is_the_checkpoint():
    """It names the blob that is served; "tiny" is "tiny:latest"."""
    with served(recorded("ollama")) as server:
        first = reach(server).links
        server.routes["GET /api/tags"] = {"models": [{"name": "tiny:latest", "digest": "c0ffef"}]}
        second = reach(server).links
    assert set(first) == set(second) == {"checkpoint"}
    assert first != second
