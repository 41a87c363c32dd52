"""The canary of an endpoint against real sockets: prompts, baselines, load, chain, latencies, drills."""

from __future__ import annotations

import copy
import itertools
import json
import threading
import time

import pytest

from canaryd.facts import Reading
from canaryd.model import Outcome
from canaryd.probe import Absent, Skip, Skipped
from canaryd.supervisor.protocol import RunRequest, WorkerSpec
from canaryd.supervisor.series import Series
from canaryd.worker.endpoint import recorder as endpoint_recorder
from canaryd.worker.endpoint.canary import PATHS
from probes import endpoint_canary
from tests import checkpoints
from tests.worker.endpoint.asked import PROMPT, reason, routes_of, run
from tests.worker.endpoint.served import PROBE, completion, context, only, recorded, recordings, served

# --- The probe -------------------------------------------------------------------------------------------------------


def test_quick_takes_one_prompt_in_rotation():
    """Fresh and warm, per API; the seed decides which prompt; a run that repeats gives the same digests."""
    cases = {}
    with served(routes_of("vllm")) as server:
        for seed in (0, 1, 2):
            found = recordings(run(server.url, seed=seed))
            assert all(len(each) == 1 for each in found.values())
            cases[seed] = {case: each[0].digest for case, each in found.items()}
    assert set(cases[0]) == {f"{a}/reef/{m}" for a in ("completions", "chat") for m in ("fresh", "warm")}
    assert {case.split("/")[1] for case in cases[1]} == {"ledger"}
    assert cases[2] == cases[0]


def test_standard_takes_every_prompt():
    """And the prompts of the user where there are some."""
    with served(routes_of("llama-server")) as server:
        found = recordings(run(server.url, level="standard"))
        assert {case.split("/")[1] for case in found} == {"reef", "ledger"}
        assert len(found) == 8


def test_prompts_of_the_user_are_asked(tmp_path):
    """By their names; a file with errors ends the run with all of them."""
    path = tmp_path / "prompts.json"
    path.write_text(json.dumps({"prompts": [{"name": "mine", "text": PROMPT.text, "tokens": 32}]}))
    with served(routes_of("vllm")) as server:
        found = recordings(run(server.url, settings={"prompts": str(path)}))
        assert "chat/mine/warm" in found
        assert server.asked("/completions")[0]["max_tokens"] == 32
        path.write_text("{}")
        assert str(path) in reason(run, server.url, settings={"prompts": str(path)})


def test_a_fresh_request_has_a_salt_that_no_other_had_and_a_warm_one_the_same():
    """Or it would find the cache of an earlier run, or miss that of its twin."""
    with served(routes_of("vllm")) as server:
        for _ in range(2):
            run(server.url, seed=0, settings={"apis": ["chat"]})
        salts = [body["cache_salt"] for body in server.asked("/chat/completions") if "logprobs" in body]
        assert len(salts) == 4
        assert salts[0] == salts[1] != salts[2] == salts[3]
    with served(routes_of("llama-server")) as server:
        run(server.url, seed=0, settings={"apis": ["chat"]})
        asked = [body["cache_prompt"] for body in server.asked("/chat/completions") if "logprobs" in body]
        assert asked == [False, True]


class Counting:
    """Counts the requests that a server serves at the same time; beyond `most` of them it refuses or is slow.

    After `alone` of them each takes long enough to meet the others.
    """

    def __init__(self, alone: int, most: int = 99, refusal=None) -> None:
        self.alone, self.most, self.refusal = alone, most, refusal
        self.active, self.lock = 0, threading.Lock()
        self.peaks: list[int] = []

    def __call__(self, answer):
        def route(body):
            with self.lock:
                self.active += 1
                self.peaks.append(self.active)
                refused = self.active > self.most
            time.sleep(0.1 if len(self.peaks) > self.alone else 0.002)
            with self.lock:
                self.active -= 1
            if refused and self.refusal is None:
                time.sleep(4.5)
            return self.refusal if refused and self.refusal else answer(body)

        return route

    def around(self, name: str) -> dict:
        routes = routes_of(name)
        for path in ("POST /v1/completions", "POST /v1/chat/completions"):
            routes[path] = self(routes[path])
        return routes


def skipped(facts: list) -> list[tuple[str, str]]:
    return [(fact.case, fact.reason) for fact in facts if isinstance(fact, Skipped)]


@pytest.mark.parametrize("apis", [("completions", "chat"), ("chat",)])
def test_a_baseline_asks_every_case_alone_first_and_then_under_load(apis):
    """So often alone that the judge may call it bit-stable, then with 2, 4 and 8 requests of our own at once."""
    alone = 16 * 4 * len(apis)
    counting = Counting(alone)
    with served(counting.around("llama-server")) as server:
        facts = run(server.url, baselining=True, budget=100.0, settings={"apis": list(apis)})
    found = recordings(facts)
    assert len(found) == 4 * len(apis)
    for case, each in found.items():
        assert [recording.condition for recording in each] == ["idle"] * 16 + ["loaded"] * 16, case
        assert len({recording.digest for recording in each}) == 1
        assert len({json.dumps(dict(recording.chain)) for recording in each}) == 1
    assert max(counting.peaks[:alone]) == 1
    assert max(counting.peaks[alone:]) >= 5
    assert skipped(facts) == []


def test_a_baseline_ends_with_its_budget():
    """What it has is kept, and it says that more is to come."""
    with served(routes_of("vllm")) as server:
        facts = run(server.url, baselining=True, budget=1e-6)
    assert len(recordings(facts)) >= 1
    assert skipped(facts) == [("baseline", "1 of 64 requests alone and none under load in this run; more to come")]


class Turns:
    """A clock whose budget is spent after so many looks at it."""

    def __init__(self, looks: int) -> None:
        self.looks = looks

    def __call__(self) -> float:
        self.looks -= 1
        return 0.0 if self.looks >= 0 else 1000.0


def test_a_baseline_goes_on_where_an_earlier_run_ended(tmp_path):
    """Alone first, round by round over every case; then under load; and from the start when all is done or changed."""
    memory = str(tmp_path / "memory")
    wanted = {"baselining": True, "budget": 100.0, "memory": memory, "settings": {"apis": ["chat"]}}

    def conditions(looks: int) -> list[tuple[int, int]]:
        found = recordings(run(server.url, clock=Turns(looks), **wanted))
        every = [[recording.condition for recording in each] for each in found.values()]
        return sorted({(each.count("idle"), each.count("loaded")) for each in every})

    with served(routes_of("llama-server")) as server:
        assert conditions(20) == [(10, 0)]
        assert conditions(16) == [(6, 4)]
        assert conditions(10**6) == [(1, 16)]
        assert conditions(20) == [(10, 0)]
        server.routes["GET /props"] = {**server.routes["GET /props"], "build_info": "b2"}
        assert conditions(28) == [(14, 0)]
        (file,) = (tmp_path / "memory").iterdir()
        for damage in ("", "[]", "[1, 2, 3]", "7", "{}"):
            file.write_text(damage)
            assert conditions(4) == [(2, 0)]
        file.unlink()
        file.mkdir()
        assert conditions(4) == [(2, 0)]


BUSY = (429, {"Retry-After": "3600"}, {"error": {"message": "queue is full"}})


@pytest.mark.parametrize("refusal", [BUSY, (503, {"Retry-After": "3600"}, {}), (500, {}, {"error": "no memory"}), None])
def test_a_load_that_a_server_does_not_take_is_halved(refusal):
    """Refused or too slow under our own load: what it took is kept, and the run ends well, saying which it was."""
    counting = Counting(64, 4, refusal)
    with served(counting.around("llama-server")) as server:
        facts = run(server.url, baselining=True, budget=100.0, settings={"apis": ["chat"], "timeout": 3.0})
    for each in recordings(facts).values():
        kinds = [recording.condition for recording in each]
        assert kinds[:16] == ["idle"] * 16
        assert kinds[16:] == ["loaded"] * len(kinds[16:])
        assert 13 <= len(kinds[16:]) <= 16  # one that was left over would have been alone
    ((case, text),) = skipped(facts)
    assert case == "baseline"
    assert "the server did not answer 8 requests at once: POST " in text
    assert "not take 2 requests" not in text
    absent = {fact.name: fact.reason for fact in facts if isinstance(fact, Absent)}
    assert "requests at once" in absent["endpoint_token_seconds{api=chat}"]


def test_a_spent_budget_leaves_cases_out_aloud():
    """At least one item is asked, and the others are named."""
    with served(routes_of("vllm")) as server:
        facts = run(server.url, level="standard", budget=1e-6)
    assert set(recordings(facts)) == {"completions/reef/fresh", "completions/reef/warm"}
    assert {fact.case for fact in facts if isinstance(fact, Skipped)} == {
        *("chat/reef/fresh", "chat/reef/warm"),
        *(f"{api}/ledger/{mode}" for api in ("completions", "chat") for mode in ("fresh", "warm")),
    }


def test_a_confirmation_asks_its_cases_alone():
    """A warm case is still preceded by the fresh request that warms it; latencies are not measured."""
    with served(routes_of("vllm")) as server:
        facts = run(server.url, cases=("chat/ledger/warm",))
        assert set(recordings(facts)) == {"chat/ledger/warm"}
        assert len(server.asked("/chat/completions")) == 2
        assert server.asked("/completions") == []
        assert set(recordings(run(server.url, cases=("chat/reef/fresh", "completions/reef")))) == {
            *("chat/reef/fresh", "completions/reef/fresh", "completions/reef/warm")
        }
        assert "no case matches nothing; it has e.g. completions/reef/fresh" in reason(
            run, server.url, cases=("nothing",)
        )


def test_it_is_said_whether_others_were_served():
    """Busy before or after is loaded; unknown is neither."""
    routes = routes_of("llama-server")
    with served(routes) as server:
        assert {r.condition for each in recordings(run(server.url)).values() for r in each} == {"idle"}
        for states in ([True, False], [False, True]):  # before and after
            turns = iter(states)
            server.routes["GET /slots"] = lambda _, turns=turns: [{"id": 0, "is_processing": next(turns)}]
            found = recordings(run(server.url, cases=("chat/reef/fresh",)))
            assert [r.condition for r in found["chat/reef/fresh"]] == ["loaded"]
        server.routes["GET /slots"] = [{"id": 0, "is_processing": True}]
        assert {r.condition for each in recordings(run(server.url)).values() for r in each} == {"loaded"}
    with served(routes_of("mlx-lm")) as server:
        assert {r.condition for each in recordings(run(server.url)).values() for r in each} == {""}


def test_every_link_of_the_chain_is_there(tmp_path):
    """Checkpoint, tokenizer, template and format from the directory; and each moves alone."""
    directory = tmp_path / "model"
    checkpoints.make(directory)
    with served(routes_of("vllm")) as server:
        settings = {"directory": str(directory)}
        before = recordings(run(server.url, settings=settings))["chat/reef/fresh"][0].chain
        assert {"checkpoint", "tokenizer", "template", "dtype", "prompt", "settings", "server", "client"} <= set(before)
        checkpoints.other_template(directory)
        after = recordings(run(server.url, settings=settings))["chat/reef/fresh"][0].chain
        assert {link for link in before if before[link] != after[link]} == {"template"}
        server.routes["GET /version"] = {"version": "0.33.0"}
        changed = recordings(run(server.url, settings=settings))["chat/reef/fresh"][0].chain
        assert {link for link in after if after[link] != changed[link]} == {"server"}
        assert "directory: " in reason(run, server.url, settings={"directory": str(tmp_path / "none")})


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_a_proxy_that_takes_another_model_changes_the_chain(api):
    """The answer says so itself, and no machine is at fault. Other weights answer: an operator has to accept them."""
    path, case, routes = f"POST /v1{PATHS[api]}", f"{api}/reef/fresh", recorded("generic")
    good = routes[path]

    def chain(**changes):
        server.routes[path] = {**good, **changes}
        return recordings(run(server.url, cases=(case,)))[case][0].chain

    with served(routes) as server:
        before = chain()
        assert chain(model=None) == before
        assert chain(model="spare") == {**before, "checkpoint": "spare"}


def numbered(name: str, number) -> dict:
    """Return a server's routes whose completions and chats have the id that `number` gives for a request."""

    def with_id(answer):
        return lambda body: {**answer(body), "id": number(body)}

    routes = routes_of(name)
    paths = ("POST /v1/completions", "POST /v1/chat/completions")
    return routes | {path: with_id(routes[path]) for path in paths}


@pytest.mark.parametrize("name", ["generic", "vllm"])
def test_a_cache_of_whole_answers_is_no_server(name):
    """A gateway that repeats an earlier answer, with its id: every answer is as it was, and nothing is computed."""
    kept: dict[str, str] = {}

    def replay(body):
        return kept.setdefault(json.dumps(body, sort_keys=True), f"cmpl-{len(kept)}")

    with served(numbered(name, replay)) as server, pytest.raises(Skip, match="a cache before the server gives an earl"):
        run(server.url, seed=0, settings={"apis": ["chat"]})


IDS = [
    itertools.repeat(123),
    itertools.chain([7, 7], itertools.count(8)),
    itertools.chain([7, 7, 7, 7], itertools.count(8)),  # the time in seconds
]


@pytest.mark.parametrize("ids", IDS)
def test_ids_that_repeat_by_themselves_are_no_cache(ids):
    """Some servers give every answer one id; small random ids meet now and then."""
    with served(numbered("generic", lambda _: f"cmpl-{next(ids)}")) as server:
        found = run(server.url, seed=0, settings={"apis": ["chat"]})
    assert set(recordings(found)) == {"chat/reef/fresh", "chat/reef/warm"}


def test_an_api_that_the_server_lacks_is_left_out_aloud():
    """The other is recorded; without any, the run is skipped with the server's words."""
    routes = routes_of("vllm")
    routes["POST /v1/chat/completions"] = (400, {}, {"error": {"message": "no chat template is defined"}})
    with served(routes) as server:
        facts = run(server.url)
        assert set(recordings(facts)) == {"completions/reef/fresh", "completions/reef/warm"}
        skipped = {fact.case: fact.reason for fact in facts if isinstance(fact, Skipped)}
        assert set(skipped) == {"chat/reef/fresh", "chat/reef/warm"}
        assert all("no chat template is defined" in text for text in skipped.values())
        server.routes["POST /v1/completions"] = (404, {}, {"detail": "Not Found"})
        assert "refused with 404: Not Found" in reason(run, server.url)


@pytest.mark.parametrize("baselining", [False, True])
def test_a_server_that_fails_ends_the_run(baselining):
    """With its own words: an engine that died is no missing API, and an API that always fails is never learnt."""
    routes = routes_of("vllm")
    routes["POST /v1/chat/completions"] = (500, {}, {"error": {"message": "EngineCore died"}})
    with served(routes) as server:
        said = reason(run, server.url, baselining=baselining)
        assert said.endswith("/v1/chat/completions: refused with 500: EngineCore died")


def test_a_learning_run_goes_on_after_one_bad_answer():
    """It was lost before anything was learnt, as often as a server failed once."""
    routes, asked = routes_of("vllm"), []
    good = routes["POST /v1/chat/completions"]

    def once_bad(body):
        asked.append(body)
        return (500, {}, {"error": {"message": "busy"}}) if len(asked) == 1 else good(body)

    routes["POST /v1/chat/completions"] = once_bad
    with served(routes) as server:
        facts = run(server.url, baselining=True)
    assert "chat/reef/fresh" in recordings(facts)
    assert not [fact for fact in facts if isinstance(fact, Skipped) and "busy" in fact.reason]


def test_latencies_come_from_requests_of_their_own():
    """To the first token and per further token; they never change what is recorded."""
    slow = routes_of("vllm")
    with served(slow) as server:
        facts = run(server.url)
        readings = {fact.key: fact for fact in facts if isinstance(fact, Reading)}
        for api in ("completions", "chat"):
            first = readings[f"endpoint_first_token_seconds{{api={api}}}"]
            assert (first.unit, 0 < first.value < 10.0) == ("seconds", True)
            assert 0 <= readings[f"endpoint_token_seconds{{api={api}}}"].value < 10.0
        assert readings["endpoint_prompt_tokens{api=completions,prompt=reef}"].value == 14
        assert readings["endpoint_nonfinite"].value == 0
        assert "endpoint_start_time_seconds" not in readings
        server.routes["GET /metrics"] = b"process_start_time_seconds 1.76374712345e+09\n"
        (started,) = (fact for fact in run(server.url) if getattr(fact, "name", "") == "endpoint_start_time_seconds")
        assert (started.value, started.unit, started.key) == (1763747123.45, "seconds", "endpoint_start_time_seconds")
        assert "dialect=vllm" in readings["switches"].value
        timed = [body for body in server.asked("/completions") if "logprobs" not in body]
        assert len({body["cache_salt"] for body in timed}) == len(timed), "the second would find the first's prompt"
        assert [body["max_tokens"] for body in timed] == [1, 16, 1, 16]


@pytest.mark.parametrize(
    ("server", "shown", "told", "promise"),
    [
        ("sglang", {"enable_deterministic_inference": True}, None, "always"),
        ("sglang", {"disable_flashinfer_autotune": True}, None, "restarts"),
        ("sglang", {"disable_flashinfer_autotune": False}, None, ""),
        ("llama-server", {}, None, "restarts"),
        ("vllm", {}, None, ""),
        ("vllm", {}, "always", "always"),
    ],
)
def test_when_a_server_repeats_its_bits_is_told(server, shown, told, promise):
    """By its own pages, or by a setting; what nobody says is not assumed."""
    routes = routes_of(server)
    if shown:
        routes["GET /server_info"] = {**routes["GET /server_info"], **shown}
    with served(routes) as replay:
        facts = run(replay.url, settings={"repeats": told})
    assert [f.value for f in facts if isinstance(f, Reading) and f.name == "endpoint_repeats"] == (
        [promise] if promise else []
    )


def test_an_answer_that_ends_early_has_no_time_per_token():
    """How many tokens came is not known then; the time to the first is."""
    routes = recorded("llama-server")
    short = completion({"text": "one", "finish_reason": "stop"})
    answer = routes["POST /v1/completions"]
    routes["POST /v1/completions"] = lambda body: answer if "logprobs" in body else short
    with served(routes) as server:
        facts = run(server.url, settings={"apis": ["completions"]})
    absent = {fact.name: fact.reason for fact in facts if isinstance(fact, Absent)}
    assert "(llama-server) does not report when it started" in absent.pop("endpoint_start_time_seconds")
    assert absent == {"endpoint_token_seconds{api=completions}": "the answer ended before all tokens came"}


def test_a_timed_request_that_fails_is_an_absent_part():
    """It is one clear line; the recordings stand, and no other latency is asked for."""
    routes = recorded("vllm")
    answer = routes["POST /v1/completions"]
    dead = (500, {}, {"error": {"message": "EngineCore died"}})
    routes["POST /v1/completions"] = lambda body: answer(body) if "logprobs" in body else dead
    with served(routes) as server:
        facts = run(server.url)
        assert all("logprobs" in body for body in server.asked("/chat/completions"))
    absent = {fact.name: fact.reason for fact in facts if isinstance(fact, Absent)}
    for api in ("completions", "chat"):
        assert "EngineCore died" in absent[f"endpoint_first_token_seconds{{api={api}}}"]
        assert "EngineCore died" in absent[f"endpoint_token_seconds{{api={api}}}"]
    assert len(recordings(facts)) == 4


def test_a_baseline_keeps_what_it_has_when_a_request_fails(tmp_path):
    """It keeps what it recorded and says why it stopped. The next run records the remaining rounds."""
    wanted = {"baselining": True, "budget": 100.0, "memory": str(tmp_path), "settings": {"apis": ["chat"]}}
    routes = recorded("llama-server")
    answer = routes["POST /v1/chat/completions"]
    left = [40]

    def dying(_: object) -> object:
        left[0] -= 1
        return answer if left[0] >= 0 else (500, {}, {"error": "EngineCore died"})

    with served({**routes, "POST /v1/chat/completions": dying}) as server:
        facts = run(server.url, **wanted)
        ((case, text),) = skipped(facts)
        assert (case, text[:21]) == ("baseline", "20 of 32 requests alo")
        assert "EngineCore died" in text
        assert {len(each) for each in recordings(facts).values()} == {10}
        left[0] = 10**6
        again = run(server.url, **wanted)
    assert {sum(r.condition == "idle" for r in each) for each in recordings(again).values()} == {6}


def test_a_server_that_nobody_knows_is_negotiated_with_and_said_to_be_unknown():
    """A proxy refuses a seed here and log probabilities there: the rest is recorded, and what is unseen is said."""
    routes = recorded("generic")
    for api, taken in (("/completions", {"logprobs"}), ("/chat/completions", {"seed"})):
        answer = routes[f"POST /v1{api}"]
        routes[f"POST /v1{api}"] = only(taken, answer, proxied)
    with served(routes) as server:
        facts = run(server.url)
    absent = {fact.name: fact.reason for fact in facts if isinstance(fact, Absent)}
    assert absent["endpoint_server"] == endpoint_recorder.UNKNOWN
    assert len(recordings(facts)) == 4
    (switches,) = (fact.value for fact in facts if isinstance(fact, Reading) and fact.name == "switches")
    assert switches == (
        "dialect=generic completions.logprobs=5 completions.cold=not offered chat.seed=1 chat.cold=not offered"
    )
    with served(routes_of("vllm")) as server:
        assert "endpoint_server" not in {fact.name for fact in run(server.url) if isinstance(fact, Absent)}


def proxied(name: str) -> tuple:
    """Return LiteLLM's refusal of a parameter that the provider behind it lacks."""
    words = f"litellm.UnsupportedParamsError: openai does not support parameters: ['{name}'], for model=tiny"
    return 400, {}, {"error": {"message": words, "type": "None", "param": None, "code": "400"}}


def test_a_server_without_probabilities_is_judged_by_text_aloud():
    """Its blind spot is an absence with that reason, per API; the text is exact still."""
    with served(routes_of("transformers")) as server:
        facts = run(server.url, settings={"model": "/srv/tiny"})
    absent = {fact.name: fact.reason for fact in facts if isinstance(fact, Absent)}
    assert {"endpoint_logprobs{api=completions}", "endpoint_logprobs{api=chat}", "endpoint_nonfinite"} <= set(absent)
    del absent["endpoint_start_time_seconds"]
    assert set(absent.values()) == {endpoint_recorder.BLIND}
    for each in recordings(facts).values():
        assert (each[0].values, each[0].margins, each[0].text) == ((), (), "syools")


def test_what_is_not_finite_is_counted():
    """And stands as None in the recording."""
    routes = routes_of("generic")
    broken = copy.deepcopy(recorded("generic")["POST /v1/chat/completions"])
    broken["choices"][0]["logprobs"]["content"][0]["logprob"] = -9999.0
    routes["POST /v1/chat/completions"] = broken
    with served(routes) as server:
        facts = run(server.url)
    (counted,) = (fact for fact in facts if isinstance(fact, Reading) and fact.name == "endpoint_nonfinite")
    assert counted.value == 2
    assert recordings(facts)["chat/reef/fresh"][0].values == (None,)


@pytest.mark.parametrize("fault", ["flip", "zero", "swap", "nan", "stuck", "consistent"])
def test_a_drill_changes_every_digest_visibly(fault):
    """One token's probability, the same in a run that confirms; the chain stays, and the text says so."""
    with served(routes_of("vllm")) as server:
        clean, drilled, again = (recordings(run(server.url, drill=drill)) for drill in ("", fault, fault))
    for case, (recording,) in drilled.items():
        assert recording.digest != clean[case][0].digest
        assert recording.digest == again[case][0].digest
        assert recording.chain == clean[case][0].chain
        assert recording.text.startswith(f"[drill: {fault} at position ")


def test_its_facts_travel_through_a_worker():
    """The real supervisor and a real worker: recordings arrive, and an unreachable server is a skip with its reason."""
    spec = endpoint_canary.SPEC
    with served(routes_of("vllm")) as server, Series(WorkerSpec()) as series:
        ctx = context(server.url)
        wanted = {"probe_path": PROBE, "spec": spec, "device": ctx.device, "level": "quick", "seed": 0}
        done = series.run(RunRequest(**wanted, settings={"url": server.url}), 60.0)
        assert (done.outcome, done.detail) == (Outcome.COMPLETED, "")
        assert len(done.recordings) == 4
        assert {link for recording in done.recordings for link in recording.chain} == {
            *("prompt", "settings", "server", "client")
        }
        html = (200, {"Content-Type": "text/html"}, b"<html></html>")
        server.routes["GET /v1/models"] = html
        done = series.run(RunRequest(**wanted, settings={"url": server.url}), 60.0)
        assert (done.outcome, done.recordings) == (Outcome.SKIPPED, ())
        assert "got a web page" in done.detail
