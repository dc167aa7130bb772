"""The streaming parser: one result for every cut, and forgiveness for what models do."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonlet.text.parse import ParsedMessage, TextParser, TokenParser
from moonlet.text.tokenizer import train_tokenizer

CALL = '<|open|>call tool="f" index="1"<|sep|><|open|>argument key="x" type="number"<|sep|>2<|close|>argument<|sep|><|close|>call<|sep|>'
TOOLS = f"<|open|>tools<|sep|>{CALL}<|close|>tools<|sep|><|close|>message<|sep|>"
RESPONSE = "<|open|>response<|sep|>"


def _parse(pieces: list[str], thinking: bool = True) -> ParsedMessage:
    """The whole of a stream; checks on the way that the deltas add up to it."""
    parser = TextParser(thinking=thinking)
    deltas = [delta for piece in pieces for delta in parser.push(piece)] + parser.flush()
    message = parser.message

    def joined(kind: str, index: int = 0) -> str:
        return "".join(delta.text for delta in deltas if delta.kind == kind and delta.index == index)

    assert joined("reasoning") == message.reasoning and joined("content") == message.content
    for index, call in enumerate(message.tool_calls):
        assert joined("tool_name", index) == call.name and joined("arguments", index) == call.arguments
    return message


def _all_cuts(raw: str, thinking: bool = True) -> ParsedMessage:
    """The result, the same for every cut in two and for single characters."""
    whole = _parse([raw], thinking)
    assert _parse(list(raw), thinking) == whole
    for cut in range(1, len(raw)):
        assert _parse([raw[:cut], raw[cut:]], thinking) == whole, f"cut at {cut}"
    return whole


@pytest.mark.parametrize(
    "before",
    [
        "R",  # the close of think is missing
        f"R<|close|>think<|sep|>{RESPONSE}<|close|>response<|sep|>",
        f"R<|close|>think{RESPONSE}<|close|>response",  # closes that are cut short
        "R<|close|>think<|sep|>",
    ],
)
def test_a_call_after_any_way_of_ending_the_thinking(before: str) -> None:
    """B46: everything landed in the reasoning, and the tool calls vanished."""
    message = _all_cuts(before + TOOLS)
    assert (message.reasoning, message.content, message.finish) == ("R", "", "tool_calls")
    assert [(call.name, json.loads(call.arguments)) for call in message.tool_calls] == [("f", {"x": 2})]


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        ("number", "2", 2),
        ("number", "-1.5e3", -1500.0),
        ("boolean", "true", True),
        ("null", "null", None),
        ("array", '[1, "a", null]', [1, "a", None]),
        ("object", '{"a": {"b": [true]}}', {"a": {"b": [True]}}),
        ("string", "2", "2"),
        ("string", 'quote " and \\ and\nline', 'quote " and \\ and\nline'),
        ("number", "no number", "no number"),
        ("string", "", ""),
    ],
)
def test_arguments_keep_their_types_however_they_arrive(kind: str, text: str, value: object) -> None:
    """B48: what streams is what does not stream."""
    raw = TOOLS.replace('type="number"', f'type="{kind}"').replace(">2<", f">{text}<")
    call = _all_cuts("R" + raw).tool_calls[0]
    assert json.loads(call.arguments) == {"x": value} and call.is_complete


@pytest.mark.parametrize("answer", ["Plain prose, no JSON.", '{"a": 1}', "1 < 2 and <|almost|> a marker <|"])
def test_prose_with_tools_declared_is_content(answer: str) -> None:
    """B49: prose was pushed through a JSON decoder."""
    raw = f"think<|close|>think<|sep|>{RESPONSE}{answer}<|close|>response<|sep|><|close|>message<|sep|>"
    message = _all_cuts(raw)
    assert (message.content, message.finish) == (answer, "stop")
    direct = _all_cuts(f"think<|close|>think<|sep|> \n{answer}<|end_of_msg|>")
    assert (direct.reasoning, direct.content, direct.finish) == ("think", answer, "stop")


_START, _END = len("R<|open|>tools<|sep|>"), len("R" + TOOLS[: TOOLS.index("call<|sep|><|close|>tools")])


@pytest.mark.parametrize("size", range(_START, _END))
def test_a_call_that_the_length_limit_cut_must_not_run(size: int) -> None:
    """B49: finish is `length`, and the call is not executable."""
    message = _parse([("R" + TOOLS)[:size]])
    assert message.finish == "length" and "tool_calls" not in message.as_message()
    assert not any(call.is_complete for call in message.tool_calls)


def test_parallel_calls_and_raw_arguments() -> None:
    raw = '<|open|>call tool="g&quot;&amp;" index="2"<|sep|><|open|>json type="object"<|sep|>{"cmd": broken<|close|>json<|sep|><|close|>call<|sep|>'
    empty = '<|open|>call tool="h" index="3"<|sep|><|close|>call<|sep|>'
    message = _all_cuts("R" + TOOLS.replace(CALL, CALL + raw + empty))
    assert [call.name for call in message.tool_calls] == ["f", 'g"&', "h"]
    assert [call.arguments for call in message.tool_calls] == ['{"x": 2}', '{"cmd": broken', "{}"]
    assert all(call.is_complete for call in message.tool_calls)


def test_a_tag_that_is_none_stays_text() -> None:
    message = _all_cuts(f"{RESPONSE}a <|open|>b<|sep|> c <|close|>d<|sep|> e<|end_of_msg|>")
    assert message.content == "a <|open|>b<|sep|> c <|close|>d<|sep|> e"
    endless = _parse([f"{RESPONSE}a <|open|>{'x' * 2000}<|end_of_msg|>"])
    assert endless.content == "a <|open|>" + "x" * 2000


def test_nothing_counts_after_the_end() -> None:
    message = _all_cuts(f"R<|close|>think<|sep|>{RESPONSE}A<|close|>response<|sep|><|close|>message<|sep|>junk{TOOLS}")
    assert (message.content, message.tool_calls, message.is_closed) == ("A", [], True)


_TAGS = (
    "think",
    "response",
    "tools",
    'call tool="f" index="1"',
    "json",
    'argument key="x" type="number"',
    "message",
    "call",
)
_PIECES = st.sampled_from(
    ["<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>", *_TAGS, "argument", "2", "text ", "\n", "<|", "é", '"']
)


@given(pieces=st.lists(_PIECES, max_size=25), cuts=st.lists(st.integers(0, 300), max_size=6), thinking=st.booleans())
@settings(max_examples=300, deadline=None)
def test_no_stream_depends_on_its_cuts(pieces: list[str], cuts: list[int], thinking: bool) -> None:
    raw = "".join(pieces)
    edges = sorted({0, len(raw), *(cut for cut in cuts if cut < len(raw))})
    cut = [raw[start:stop] for start, stop in pairwise(edges)]
    assert _parse(cut, thinking) == _parse([raw], thinking) == _parse(list(raw), thinking)


def test_markers_count_as_ids_only() -> None:
    """The same characters as ordinary tokens are text; characters split over tokens arrive whole."""
    tokenizer = train_tokenizer(["response text " * 9], 300)
    parser = TokenParser(tokenizer, thinking=False)
    text = "say <|close|>response<|sep|> 🙂"
    deltas = [delta for token in tokenizer.encode(text) for delta in parser.push(token)]
    assert parser.message.content == text and all("�" not in delta.text for delta in deltas)
    parser.push(tokenizer.special_id("<|close|>"))
    for token in tokenizer.encode("response"):
        parser.push(token)
    parser.push(tokenizer.special_id("<|sep|>"))
    parser.push(tokenizer.special_id("<|end_of_msg|>"))
    assert parser.message.content == text and parser.message.finish == "stop"
