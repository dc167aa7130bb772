"""Messages with tool calls, as a model that was taught would write them: tokens that `encode_chat` gives."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from served_model import small_tokenizer

from moonlet.serve.openai.chat import Chat, ChatWriter
from moonlet.serve.openai.schema import ChatBody
from moonlet.serve.openai.stops import StopStrings
from moonlet.serve.sampler import Drawn
from moonlet.serve.sequence import Finish, Request, TokenEvent
from moonlet.text.xtml import ChatOptions, encode_chat

CALLS = [
    {"type": "function", "function": {"name": "look", "arguments": {"at": "the moon", "times": 2}}},
    {"type": "function", "function": {"name": "wait", "arguments": {}}},
]
MESSAGE = {"role": "assistant", "reasoning_content": "I look.", "content": "One moment.", "tool_calls": CALLS}


@pytest.fixture(scope="module")
def tokenizer():
    return small_tokenizer()


class ScriptedThread:
    """Streams given tokens."""

    def __init__(self, ids: list[int], finish: Finish = "stop") -> None:
        self.ids = ids
        self.finish: Finish = finish

    async def stream(self, request: Request) -> AsyncIterator[TokenEvent]:
        *first, last = self.ids
        for token in first:
            yield TokenEvent("scripted", Drawn(token, -0.5), 0, num_cached=3)
        yield TokenEvent("scripted", Drawn(last, -0.5), 0, self.finish, num_cached=3)


def _written(tokenizer, message=MESSAGE) -> list[int]:
    encoded = encode_chat(tokenizer, [message], ChatOptions(add_generation_prompt=False))
    return [token for token, is_generated in zip(encoded.ids, encoded.is_generated) if is_generated]


def _chat(tokenizer, **changes) -> Chat:
    body = ChatBody.model_validate({"messages": [{"role": "user", "content": "?"}], **changes})
    return Chat(tokenizer, body, Request([1]), {"id": "x"})


def _run(chat: Chat, thread: ScriptedThread):
    async def both():
        return await chat.whole(thread)

    return asyncio.run(both())["choices"][0]


def test_tool_calls_come_out_whole(tokenizer) -> None:
    choice = _run(_chat(tokenizer), ScriptedThread(_written(tokenizer)))
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert (message["reasoning_content"], message["content"]) == ("I look.", "One moment.")
    found = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in message["tool_calls"]]
    assert found == [("look", {"at": "the moon", "times": 2}), ("wait", {})]
    ids = [call["id"] for call in message["tool_calls"]]
    assert len(set(ids)) == 2 and all(name.startswith("call_") for name in ids)


def test_tool_calls_stream_by_index(tokenizer) -> None:
    async def collect() -> list[dict]:
        chunks = _chat(tokenizer, stream_options={"include_usage": True}).chunks(ScriptedThread(_written(tokenizer)))
        return [chunk async for chunk in chunks]

    *chunks, last = asyncio.run(collect())
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
    pieces = [piece for chunk in chunks for piece in chunk["choices"][0]["delta"].get("tool_calls", ())]
    assert [piece["function"]["name"] for piece in pieces if "id" in piece] == ["look", "wait"]
    arguments = ["", ""]
    for piece in pieces:
        arguments[piece["index"]] += piece["function"]["arguments"]
    assert [json.loads(text) for text in arguments] == [{"at": "the moon", "times": 2}, {}]
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_an_answer_cut_anywhere_never_has_half_a_call(tokenizer) -> None:
    ids = _written(tokenizer)
    for stop in range(1, len(ids)):
        choice = _run(_chat(tokenizer), ScriptedThread(ids[:stop], "length"))
        assert choice["finish_reason"] == "length"
        for call in choice["message"].get("tool_calls", ()):
            json.loads(call["function"]["arguments"])


def test_a_stop_string_cuts_the_answer_not_the_thinking(tokenizer) -> None:
    ids = _written(tokenizer, {"role": "assistant", "reasoning_content": "stop here", "content": "now stop here"})
    writer = ChatWriter(tokenizer, ["stop"])
    deltas = [delta for token in ids for delta in writer.push(token)]
    assert "".join(delta.text for delta in deltas if delta.kind == "reasoning") == "stop here"
    assert "".join(delta.text for delta in deltas if delta.kind == "content") == "now "
    assert writer.finish("stop") == "stop"


def test_half_a_surrogate_pair_is_an_answer_too(tokenizer) -> None:
    from moonlet.serve.openai.answers import ASCIIResponse

    call = {"type": "function", "function": {"name": "say", "arguments": '{"x": 1}'}}
    ids = _written(tokenizer, {"role": "assistant", "content": "", "tool_calls": [call]})
    at = ids.index(tokenizer.encode("1")[0], len(ids) // 2)
    choice = _run(_chat(tokenizer), ScriptedThread([*ids[:at], *tokenizer.encode('"\\ud800"'), *ids[at + 1 :]]))
    assert ASCIIResponse(choice).body.isascii()


@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.data())
def test_stop_strings_do_not_depend_on_the_cuts(text: str, stops: list[str], data) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))))
    pieces = [text[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(text)])]
    results = []
    for parts in (pieces, list(text), [text]):
        found = StopStrings(stops)
        results.append(("".join(found.push(part) for part in parts) + found.flush(), found.is_stopped))
    assert len(set(results)) == 1
    assert results[0][1] == any(stop in text for stop in stops)
    assert not any(stop in results[0][0] for stop in stops)
