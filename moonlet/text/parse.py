"""What the model wrote, as it arrives: thinking, response and tool calls out of an XTML stream (k3_model.md section 6).

A prompt ends inside an open channel (`think` or `response`), so the stream starts there. The result never depends on how
the stream was cut: the parser keeps what it cannot decide yet. It forgives what models do: a channel whose close is missing
or cut short ends where the next one opens; a tag that is none stays text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from moonlet.text.tokenizer import SPECIAL_TOKENS, Tokenizer
from moonlet.text.utf8 import Utf8Stream
from moonlet.text.xtml import CLOSE, END_OF_MESSAGE, OPEN, SEP

Finish = Literal["stop", "tool_calls", "length"]

_MAX_TAG_CHARACTERS = 512  # a marker that no <|sep|> follows within this was none
_ENDS = {END_OF_MESSAGE, "[EOS]", "[EOT]"}
_MARKERS = (OPEN, CLOSE, SEP, *_ENDS)
_MARKER = re.compile("|".join(re.escape(marker) for marker in _MARKERS))
_ATTRIBUTE = re.compile(r' ([^\s="]+)="([^"]*)"')
# Opening one of them closes the one that is open.
_CHANNELS = {"think", "response", "tools"}


class Delta(NamedTuple):
    """A piece of the message. `index` is the 0-based tool call; a call starts with its `tool_name`.

    The `arguments` pieces of a call, joined, are its arguments as JSON (or the raw text that the model gave instead).
    """

    kind: Literal["reasoning", "content", "tool_name", "arguments"]
    text: str
    index: int = 0


@dataclass
class ToolCall:
    """`is_complete` is False if the stream ended inside it: such a call must not run."""

    name: str
    arguments: str = ""
    is_complete: bool = False


@dataclass
class ParsedMessage:
    """Everything so far. `is_closed`: the model ended its message itself."""

    reasoning: str = ""
    content: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    is_closed: bool = False

    @property
    def finish(self) -> Finish:
        if any(not call.is_complete for call in self.tool_calls) or not self.is_closed:
            return "length"
        return "tool_calls" if self.tool_calls else "stop"

    def as_message(self, make_id: Any = None) -> dict[str, Any]:
        """An OpenAI assistant message; incomplete calls are left out. `make_id(index)` names calls."""
        calls = [
            {
                "id": make_id(index) if make_id else f"call_{index}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for index, call in enumerate(self.tool_calls)
            if call.is_complete
        ]
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        return {**message, "tool_calls": calls} if calls else message


class _Argument(NamedTuple):
    key: str
    kind: str


class StreamParser:
    """Feed it markers and text; it returns deltas and keeps the whole in `message`.

    Args:
        thinking: the prompt ended inside `think`, else inside `response`.
    """

    def __init__(self, *, thinking: bool = True) -> None:
        self.message = ParsedMessage()
        self._channel: str | None = "think" if thinking else "response"
        self._in_tools = self._in_call = False
        self._argument = _Argument("", "string")
        self._value: list[str] = []
        self._num_arguments = 0
        self._tag: list[str] | None = None  # the marker and the text of a tag that is not complete

    # -- input --------------------------------------------------------------------------------------------------------
    def push_text(self, text: str) -> Iterator[Delta]:
        """Ordinary text; markers in it are text."""
        if not text or self.message.is_closed:
            return
        if self._tag is None:
            yield from self._text(text)
            return
        room = _MAX_TAG_CHARACTERS - sum(len(piece) for piece in self._tag)
        self._tag.append(text[:room])
        if len(text) > room:
            yield from self._not_a_tag()
            yield from self._text(text[room:])

    def push_marker(self, marker: str) -> Iterator[Delta]:
        """A control token by its name; one that has no place in the format is ignored."""
        if self.message.is_closed:
            return
        if marker in _ENDS:
            yield from self._finish_tag(is_elided=True)
            yield from self._close("message")
        elif marker == SEP:
            yield from self._finish_tag(is_elided=False)
        elif marker in (OPEN, CLOSE):
            yield from self._finish_tag(is_elided=True)
            if not self.message.is_closed:
                self._tag = [marker]

    def flush(self) -> Iterator[Delta]:
        """The stream is over. Half a tag is nothing, unless it is a close that only lacks its end."""
        if self._tag is not None and self._tag[0] == CLOSE and not self.message.is_closed:
            yield from self._finish_tag(is_elided=True)
        self._tag = None

    # -- tags ---------------------------------------------------------------------------------------------------------
    def _finish_tag(self, *, is_elided: bool) -> Iterator[Delta]:
        """The tag that is held is over: by its <|sep|>, or because something else begins (then only a close counts)."""
        if self._tag is None:
            return
        marker, header = self._tag[0], "".join(self._tag[1:])
        name, _, rest = header.partition(" ")
        attributes = {key: _unescape(value) for key, value in _ATTRIBUTE.findall(" " + rest)}
        if marker == CLOSE and self._can_close(name):
            self._tag = None
            yield from self._close(name)
        elif marker == OPEN and not is_elided and self._can_open(name, attributes):
            self._tag = None
            yield from self._open(name, attributes)
        else:
            yield from self._not_a_tag(SEP if not is_elided else "")

    def _not_a_tag(self, ending: str = "") -> Iterator[Delta]:
        text = "".join(self._tag or ()) + ending
        self._tag = None
        yield from self._text(text)

    def _can_open(self, name: str, attributes: dict[str, str]) -> bool:
        if name in ("argument", "json"):
            return self._in_call and (name == "json" or "key" in attributes)
        return name in _CHANNELS or (name == "call" and "tool" in attributes) or name == "message"

    def _can_close(self, name: str) -> bool:
        if name in ("argument", "json"):
            return self._channel == name
        if name == "call":
            return self._in_call
        return name in _CHANNELS or name == "message"

    def _open(self, name: str, attributes: dict[str, str]) -> Iterator[Delta]:
        if name == "message":  # the model goes on by itself: its own message is over
            yield from self._close("message")
            return
        if self._channel in ("argument", "json"):
            yield from self._close(self._channel)
        if name in _CHANNELS or name == "call":
            yield from self._end_call()
            self._channel = name if name in ("think", "response") else None
            self._in_tools = name in ("tools", "call")
        if name == "call":
            self._in_call, self._num_arguments = True, 0
            self.message.tool_calls.append(ToolCall(attributes["tool"]))
            yield Delta("tool_name", attributes["tool"], len(self.message.tool_calls) - 1)
        elif name in ("argument", "json"):
            self._channel, self._value = name, []
            self._argument = _Argument(attributes.get("key", ""), attributes.get("type", "string"))

    def _close(self, name: str) -> Iterator[Delta]:
        if self._channel in ("argument", "json"):
            yield from self._end_value()
        if name in ("argument", "json"):
            self._channel = None
            return
        yield from self._end_call()
        self._channel = None
        self._in_tools = self._in_tools and name == "call"
        self.message.is_closed = self.message.is_closed or name == "message"

    def _end_call(self) -> Iterator[Delta]:
        """A call ends where it is closed, or where something beside it begins."""
        if self._in_call:
            self._in_call = False
            call = self.message.tool_calls[-1]
            call.is_complete = True
            if self._num_arguments >= 0:
                yield from self._arguments("}" if self._num_arguments else "{}")

    def _end_value(self) -> Iterator[Delta]:
        value, is_raw = "".join(self._value), self._channel == "json"
        self._channel, self._value = None, []
        if is_raw:
            self._num_arguments = -1  # the raw text stands for all arguments
            yield from self._arguments(value)
        elif self._num_arguments >= 0:
            pair = f"{json.dumps(self._argument.key, ensure_ascii=False)}: {_as_json(value, self._argument.kind)}"
            yield from self._arguments(("{" if self._num_arguments == 0 else ", ") + pair)
            self._num_arguments += 1

    def _arguments(self, text: str) -> Iterator[Delta]:
        self.message.tool_calls[-1].arguments += text
        yield Delta("arguments", text, len(self.message.tool_calls) - 1)

    # -- text ---------------------------------------------------------------------------------------------------------
    def _text(self, text: str) -> Iterator[Delta]:
        if self._channel == "think":
            self.message.reasoning += text
            yield Delta("reasoning", text)
        elif self._channel == "response":
            self.message.content += text
            yield Delta("content", text)
        elif self._channel is not None:
            self._value.append(text)
        elif not self._in_tools and (said := text.lstrip()):
            # A model that closed its thinking and goes on without opening a response means one.
            self._channel = "response"
            yield from self._text(said)


def _unescape(text: str) -> str:
    return text.replace("&quot;", '"').replace("&amp;", "&")


def _as_json(text: str, kind: str) -> str:
    """An argument's text as a JSON value; one that its type does not fit is a string."""
    if kind != "string":
        try:
            return json.dumps(json.loads(text), ensure_ascii=False)
        except (ValueError, RecursionError):
            pass
    return json.dumps(text, ensure_ascii=False)


class TokenParser:
    """The same over token ids: control ids are markers, all else is text, also where it looks like a marker."""

    def __init__(self, tokenizer: Tokenizer, *, thinking: bool = True) -> None:
        self._parser = StreamParser(thinking=thinking)
        self._marker_of = {tokenizer.special_id(name): name for name in SPECIAL_TOKENS}
        self._characters = Utf8Stream(tokenizer)

    @property
    def message(self) -> ParsedMessage:
        return self._parser.message

    def push(self, token: int) -> list[Delta]:
        marker = self._marker_of.get(token)
        if marker is None:
            return list(self._parser.push_text(self._characters.push(token)))
        return [*self._parser.push_text(self._characters.flush()), *self._parser.push_marker(marker)]

    def flush(self) -> list[Delta]:
        return [*self._parser.push_text(self._characters.flush()), *self._parser.flush()]


class TextParser:
    """The same over text in which markers are spelled out, as engines that return strings give it."""

    def __init__(self, *, thinking: bool = True) -> None:
        self._parser = StreamParser(thinking=thinking)
        self._held = ""

    @property
    def message(self) -> ParsedMessage:
        return self._parser.message

    def push(self, text: str) -> list[Delta]:
        text, deltas, start = self._held + text, [], 0
        for found in _MARKER.finditer(text):
            deltas += self._parser.push_text(text[start : found.start()])
            deltas += self._parser.push_marker(found.group())
            start = found.end()
        keep = _held_back(text, start)
        deltas += self._parser.push_text(text[start : len(text) - keep])
        self._held = text[len(text) - keep :]
        return deltas

    def flush(self) -> list[Delta]:
        held, self._held = self._held, ""
        return [*self._parser.push_text(held), *self._parser.flush()]


def _held_back(text: str, start: int) -> int:
    """Characters at the end of `text` that may be the beginning of a marker."""
    longest = max(len(marker) for marker in _MARKERS) - 1
    for size in range(min(longest, len(text) - start), 0, -1):
        if any(marker.startswith(text[len(text) - size :]) for marker in _MARKERS):
            return size
    return 0
