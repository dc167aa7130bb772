"""The API as OpenAI's own client sees it, over a tiny model."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
from safetensors.torch import save_file
from served_model import VOCAB, Served, serving, small_model, small_tokenizer
from tiny_engine import check_empty, engine

from moonlet.model.hf import ExportOptions, export_released
from moonlet.serve.openai import ServeConfig
from moonlet.serve.sampler import SamplingParams
from moonlet.serve.sequence import Request
from moonlet.text.tokenizer import SPECIAL_TOKENS
from moonlet.text.xtml import ChatOptions, encode_chat

QUESTION = [{"role": "user", "content": "what lights the moon?"}]


@pytest.fixture(scope="module")
def tokenizer():
    return small_tokenizer()


@pytest.fixture(scope="module")
def model(tokenizer):
    return small_model(tokenizer)


@pytest.fixture(scope="module")
def served(model, tokenizer):
    with serving(model, tokenizer) as found:
        yield found


def _controls(tokenizer, *kept: str) -> frozenset[int]:
    """Control and reserved ids but for `kept`; the tokenizer's text is so short that some of its ids are reserved."""
    reserved = {token for token in range(VOCAB) if b"<|reserved" in tokenizer.decode_bytes([token])}
    assert reserved
    return frozenset(tokenizer.special_id(name) for name in SPECIAL_TOKENS if name not in kept) | reserved


def _until_idle(served: Served) -> None:
    until = time.monotonic() + 30
    while served.in_engine(lambda engine: engine.has_work):
        assert time.monotonic() < until, "a request that nobody waits for still runs"
    check_empty(served.thread.engine)


def _chat(served: Served, **changes):
    asked = {"max_tokens": 24, "seed": 5, "temperature": 1.0, "extra_body": {"return_token_ids": True}, **changes}
    return served.client().chat.completions.create(model="moonlet", messages=QUESTION, **asked)


# -- chats ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("thinking", ["enabled", "disabled"])
def test_a_streamed_chat_is_the_whole_one(served: Served, thinking: str) -> None:
    extra = {"return_token_ids": True, "thinking": {"type": thinking}}
    asked = {"logprobs": True, "top_logprobs": 3, "extra_body": extra, "reasoning_effort": "low"}
    whole = _chat(served, **asked)
    stream = list(_chat(served, stream=True, stream_options={"include_usage": True}, **asked))
    parts = [chunk.choices[0] for chunk in stream if chunk.choices]
    message = whole.choices[0].message
    assert "".join(part.delta.content or "" for part in parts) == message.content
    reasoning = "".join(getattr(part.delta, "reasoning_content", None) or "" for part in parts)
    assert reasoning == getattr(message, "reasoning_content", "")
    assert (reasoning if thinking == "enabled" else message.content) != ""
    assert parts[0].delta.role == "assistant"
    assert parts[-1].finish_reason == whole.choices[0].finish_reason
    assert [entry for part in parts for entry in (part.logprobs.content if part.logprobs else [])] == whole.choices[
        0
    ].logprobs.content
    assert stream[-1].usage.completion_tokens == whole.usage.completion_tokens == len(whole.choices[0].token_ids)
    assert len(whole.choices[0].logprobs.content[0].top_logprobs) == 3


def test_a_chat_is_what_the_engine_says(served: Served, model, tokenizer) -> None:
    ids = encode_chat(tokenizer, QUESTION, ChatOptions(effort="high")).ids
    banned = _controls(tokenizer, "[EOS]", "<|end_of_msg|>", "<|open|>", "<|close|>", "<|sep|>")
    stops = frozenset(tokenizer.special_id(name) for name in ("[EOS]", "<|end_of_msg|>"))
    [alone] = engine(model).generate(
        [Request(ids, SamplingParams(seed=5), max_tokens=24, stop_ids=stops, banned_ids=banned)]
    )
    answer = _chat(served, reasoning_effort="high", logprobs=True)
    assert answer.choices[0].prompt_token_ids == ids
    assert answer.choices[0].token_ids == alone.ids
    assert [entry.logprob for entry in answer.choices[0].logprobs.content] == alone.logprobs
    assert answer.usage.prompt_tokens == len(ids)


def test_a_repeated_prompt_is_read_from_the_cache(served: Served) -> None:
    _chat(served)
    again = _chat(served)
    assert 0 < again.usage.prompt_tokens_details.cached_tokens < again.usage.prompt_tokens


# -- completions ------------------------------------------------------------------------------------------------------
def test_a_completion_of_ids_is_what_the_engine_says(served: Served, model, tokenizer) -> None:
    ids = tokenizer.encode("the moon is a small cold")
    banned, stops = _controls(tokenizer, "[EOS]"), frozenset({tokenizer.special_id("[EOS]")})
    request = Request(
        ids, SamplingParams(temperature=1.5, seed=3), max_tokens=40, stop_ids=stops, banned_ids=banned, num_top=2
    )
    [alone] = engine(model).generate([request])
    extra = {"return_token_ids": True}
    asked = {"model": "moonlet", "max_tokens": 40, "temperature": 1.5, "seed": 3, "logprobs": 2, "extra_body": extra}
    of_ids = served.client().completions.create(prompt=ids, **asked)
    of_text = served.client().completions.create(prompt="the moon is a small cold", **asked)
    streamed = list(served.client().completions.create(prompt=ids, stream=True, **asked))
    for answer in (of_ids, of_text):
        assert answer.choices[0].token_ids == alone.ids
        assert answer.choices[0].logprobs.token_logprobs == alone.logprobs
        assert answer.choices[0].text == tokenizer.decode(token for token in alone.ids if token not in stops)
    assert "".join(chunk.choices[0].text for chunk in streamed) == of_ids.choices[0].text
    assert not set(alone.ids) & banned


def test_stop_strings_end_answers_across_tokens(served: Served) -> None:
    """Every stop string that lies across two tokens of an answer ends it exactly before its first occurrence."""
    asked = {"model": "moonlet", "prompt": "the sun", "max_tokens": 30, "seed": 8, "temperature": 0.9}
    client = served.client()
    plain = client.completions.create(**asked, extra_body={"return_token_ids": True}).choices[0]
    assert plain.finish_reason == "length"
    for start in range(2, len(plain.text) - 4, 3):
        stop = plain.text[start : start + 4]
        if "\ufffd" in stop:
            continue
        cut = client.completions.create(**asked, stop=["never said", stop], extra_body={"return_token_ids": True})
        choice = cut.choices[0]
        assert (choice.text, choice.finish_reason) == (plain.text[: plain.text.index(stop)], "stop")
        assert choice.token_ids == plain.token_ids[: len(choice.token_ids)]
        streamed = client.completions.create(**asked, stop=stop, stream=True)
        assert "".join(chunk.choices[0].text for chunk in streamed) == choice.text
    _until_idle(served)


# -- refusals ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "changes",
    [
        {"messages": []},
        {"messages": [{"role": "wizard", "content": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        {"temperature": -1},
        {"top_p": 2},
        {"n": 2},
        {"max_tokens": 0},
        {"max_tokens": 10**9},
        {"stop": ""},
        {"logit_bias": {str(VOCAB): 1}},
        {"reasoning_effort": "medium"},
        {"tools": [{"type": "function"}]},
        {"tool_choice": {"type": "function", "function": {"name": "absent"}}},
        {"response_format": {"type": "json_schema"}},
    ],
    ids=str,
)
def test_bad_requests_are_refused_in_openai_form(served: Served, changes: dict) -> None:
    asked = {"model": "moonlet", "messages": QUESTION, **changes}
    for stream in (False, True):
        answer = httpx.post(f"{served.url}/v1/chat/completions", json={**asked, "stream": stream})
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["type"] == "invalid_request_error"
        assert answer.json()["error"]["message"]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b"[" * 100_000, b'{"ids": [1e999]}', b'{"ids": [-1]}'])
def test_bad_bodies_are_refused(served: Served, body: bytes) -> None:
    assert httpx.post(f"{served.url}/v1/generate", content=body).status_code == 400


@pytest.mark.parametrize("prompt", [[], "", [[]], ["one", "two"], [[5], [6]], [VOCAB], [-1], {"a": 1}], ids=str)
def test_bad_prompts_are_refused(served: Served, prompt) -> None:
    answer = httpx.post(f"{served.url}/v1/completions", json={"prompt": prompt})
    assert answer.status_code == 400
    if prompt in (["one", "two"], [[5], [6]]):
        assert "one prompt a request" in answer.json()["error"]["message"]


def test_an_answer_that_cannot_go_on_is_an_error(served: Served) -> None:
    answer = httpx.post(f"{served.url}/v1/generate", json={"ids": [5], "banned_ids": list(range(VOCAB))})
    assert answer.status_code == 500
    assert "no token may come next" in answer.json()["error"]["message"]


def test_unknown_names_are_not_found(served: Served) -> None:
    with pytest.raises(openai.NotFoundError, match="there is no model 'other'"):
        served.client().chat.completions.create(model="other", messages=QUESTION)
    assert httpx.get(f"{served.url}/v1/nothing").json()["error"]["message"] == "there is no GET /v1/nothing"
    assert [entry.id for entry in served.client().models.list()] == ["moonlet"]
    assert served.client().models.retrieve("moonlet").owned_by == "moonlet"


def test_a_key_is_asked_for_and_bodies_have_a_limit(model, tokenizer) -> None:
    config = ServeConfig(api_key="moon-key", max_body_bytes=2000)
    with serving(model, tokenizer, config) as served:
        for key in ("wrong", "moon-key2"):
            with pytest.raises(openai.AuthenticationError):
                served.client(key).models.list()
        assert httpx.get(f"{served.url}/metrics").status_code == 401
        assert httpx.get(f"{served.url}/health").status_code == 200
        client = served.client("moon-key")
        assert client.completions.create(model="moonlet", prompt="the", max_tokens=2).choices
        with pytest.raises(openai.APIStatusError) as caught:
            client.completions.create(model="moonlet", prompt="the" * 1000, max_tokens=2)
        assert caught.value.status_code == 413
        chunks = (b" " * 500 for _ in range(8))
        headers = {"Authorization": "Bearer moon-key"}
        assert httpx.post(f"{served.url}/v1/completions", content=chunks, headers=headers).status_code == 413


def test_too_many_requests_are_told_when_to_come_back(model, tokenizer) -> None:
    with serving(model, tokenizer, schedule={"max_running": 1, "max_waiting": 1}) as served:
        httpx.post(f"{served.url}/pause")
        with ThreadPoolExecutor(8) as pool:
            asked = {"model": "moonlet", "prompt": "the", "max_tokens": 3}
            waiting = [pool.submit(served.client().completions.create, **asked) for _ in range(1)]
            while not served.in_engine(lambda engine: engine.scheduler.num_waiting):
                pass
            for stream in (False, True):
                with pytest.raises(openai.RateLimitError) as caught:
                    served.client().completions.create(**asked, stream=stream)
                assert caught.value.response.headers["Retry-After"] == "1"
            httpx.post(f"{served.url}/resume")
            assert all(future.result().choices for future in waiting)


# -- leaving ----------------------------------------------------------------------------------------------------------
def test_leaving_in_mid_stream_frees_the_slot(served: Served) -> None:
    stream = served.client().completions.create(model="moonlet", prompt="the", max_tokens=1500, stream=True, seed=1)
    for _, _ in zip(range(3), stream):
        pass
    assert served.in_engine(lambda engine: engine.has_work)
    stream.close()
    _until_idle(served)
    with pytest.raises(openai.APITimeoutError):
        served.client().with_options(timeout=0.3).completions.create(model="moonlet", prompt="the", max_tokens=1500)
    _until_idle(served)


@pytest.mark.parametrize("stream", [False, True])
def test_leaving_before_the_first_token_frees_the_slot(served: Served, stream: bool) -> None:
    httpx.post(f"{served.url}/pause")
    try:
        with pytest.raises(httpx.ReadTimeout):
            asked = {"prompt": "the", "max_tokens": 900, "stream": stream}
            httpx.post(f"{served.url}/v1/completions", json=asked, timeout=httpx.Timeout(5, read=0.5))
        _until_idle(served)
    finally:
        httpx.post(f"{served.url}/resume")


def test_thirty_at_once_with_leavers_answer_as_one_by_one(model, tokenizer) -> None:
    rng = random.Random(4)
    prompts = ["the moon is a small " * rng.randrange(1, 4) + str(number % 7) for number in range(30)]
    with serving(model, tokenizer, schedule={"max_running": 6}) as served:

        def ask(number: int) -> list[int]:
            asked = {"model": "moonlet", "prompt": prompts[number], "max_tokens": 20, "seed": number}
            extra = {"return_token_ids": True}
            stream = served.client().completions.create(**asked, temperature=1.1, stream=True, extra_body=extra)
            ids: list[int] = []
            for count, chunk in enumerate(stream):
                ids += chunk.choices[0].token_ids
                if number % 3 == 0 and count == number % 5:
                    stream.close()
                    break
            return ids

        with ThreadPoolExecutor(30) as pool:
            together = list(pool.map(ask, range(30)))
        _until_idle(served)
    banned, stops = _controls(tokenizer, "[EOS]"), frozenset({tokenizer.special_id("[EOS]")})
    serial = engine(model)
    for number, ids in enumerate(together):
        sampling = SamplingParams(temperature=1.1, seed=number)
        request = Request(tokenizer.encode(prompts[number]), sampling, 20, stops, banned)
        [alone] = serial.generate([request])
        assert ids == (alone.ids[: number % 5 + 1] if number % 3 == 0 else alone.ids)


# -- for reinforcement learning ---------------------------------------------------------------------------------------
def test_other_weights_answer_with_their_version(tokenizer, tmp_path) -> None:
    old, new = small_model(tokenizer), small_model(tokenizer, seed=1)
    ids = tokenizer.encode("the moon is a small cold world")
    asked = {"ids": ids, "max_tokens": 12, "seed": 2, "num_top": 2}
    request = Request(ids, SamplingParams(seed=2), max_tokens=12)
    expected = [engine(model).generate([request])[0] for model in (old, new)]
    save_file(new.state_dict(), tmp_path / "new.safetensors")
    export_released(new, tmp_path / "exported", ExportOptions(quantize_experts=False))
    save_file({"strange": new.state_dict()["lm_head.weight"].clone()}, tmp_path / "strange.safetensors")
    with serving(old, tokenizer) as served:

        def post(to: str, **body):
            return httpx.post(f"{served.url}{to}", json=body, timeout=60)

        answers = [post("/v1/generate", **asked).json()]
        for name in ("strange.safetensors", "absent"):
            assert post("/update_weights", path=str(tmp_path / name), version=9).status_code == 400
        assert post("/v1/generate", **asked).json()["versions"] == [0] * 12
        assert post("/update_weights", path=str(tmp_path / "new.safetensors"), version=7).json() == {"version": 7}
        answers.append(post("/v1/generate", **asked).json())
        assert post("/update_weights", path=str(tmp_path / "exported"), version=8).status_code == 200
        assert post("/v1/generate", **asked).json()["versions"] == [8] * 12
    for answer, alone, version in zip(answers, expected, (0, 7)):
        assert (answer["ids"], answer["logprobs"]) == (alone.ids, alone.logprobs)
        assert answer["versions"] == [version] * 12
        assert answer["finish"] == "length"
        assert [len(top) for top in answer["top_logprobs"]] == [2] * 12


def test_a_pause_holds_answers_and_a_resume_lets_them_go_on(served: Served) -> None:
    whole = served.client().completions.create(model="moonlet", prompt="the", max_tokens=300, seed=1)
    stream = iter(
        served.client().completions.create(model="moonlet", prompt="the", max_tokens=300, stream=True, seed=1)
    )
    text = next(stream).choices[0].text
    assert httpx.post(f"{served.url}/pause").json() == {"paused": True}
    assert httpx.get(f"{served.url}/health").json()["paused"]
    steps = served.in_engine(lambda engine: engine.counters.num_steps)
    assert served.in_engine(lambda engine: engine.counters.num_steps) == steps
    assert served.in_engine(lambda engine: engine.has_work)
    assert httpx.post(f"{served.url}/resume").json() == {"paused": False}
    assert text + "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text


def test_metrics_count(served: Served) -> None:
    _chat(served)
    lines = dict(
        line.rsplit(" ", 1) for line in httpx.get(f"{served.url}/metrics").text.splitlines() if not line.startswith("#")
    )
    counters = served.thread.engine.counters
    assert float(lines["moonlet_engine_requests_total"]) == counters.num_requests > 0
    assert float(lines['moonlet_engine_finished_total{finish="length"}']) == counters.num_finished["length"]
