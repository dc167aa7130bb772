"""Messages to tokens in the K3 chat format, XTML (k3_model.md section 6).

A message is a tag `<|open|>NAME k="v"<|sep|> ... <|close|>NAME<|sep|>` with `<|end_of_msg|>` behind it. Only the markers are
control tokens. Names, attributes and everything that people and tools wrote are ordinary text, encoded piece by piece with
special tokens off: a marker in a user's text stays text.

The wordings of `tool_choice=none`, of `json_object` and of tools declared in mid-conversation are not published; ours follow
the pattern of those that are.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from moonlet.errors import DataError, nearest_name
from moonlet.text.tokenizer import SPECIAL_TOKENS, Tokenizer

OPEN, CLOSE, SEP, END_OF_MESSAGE = "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"
EFFORTS = ("low", "high", "max")

Message = Mapping[str, Any]
Effort = Literal["low", "high", "max"]

_TOOLS = "# Tools\nHere are the available tools, described in JSONSchema.\n\n```json\n{tools}\n```"
_NEW_TOOLS = "## New Tools Available\n\n```json\n{tools}\n```"
_EFFORT = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the response channel), "
    "supported values include `low`, `medium`, `high`, and `max`.\n"
    "Now the system is invoked with `thinking_effort={effort}`."
)
_TOOL_CHOICE = {
    "required": "The system is invoked with `tool_choice=required`.\nYou MUST call tools in the next message.",
    "none": "The system is invoked with `tool_choice=none`.\nYou MUST NOT call tools in the next message.",
}
_RESPONSE_FORMAT = (
    "The system is invoked with `response_format={kind}`.\n"
    "Your response must be raw JSON data without markdown code blocks (```json) or any additional formatting."
)
_SCHEMA = "\nThe JSON data must match the following schema:\n```json\n{schema}\n```"
_CONTROL = re.compile("|".join(re.escape(name) for name in SPECIAL_TOKENS))
_ROLES = ("system", "user", "assistant", "tool")


class Segment(NamedTuple):
    """A piece that is encoded on its own. `is_control`: special tokens in it are recognised."""

    text: str
    is_control: bool
    is_generated: bool = False  # by the model: what training on conversations learns


@dataclass(frozen=True)
class ChatOptions:
    """What a request says beside its messages.

    Attributes:
        tools: OpenAI's tool declarations.
        effort: None sends no thinking-effort message.
        thinking: False drops the think channels of the history and asks for a response at once.
        tool_choice: 'auto', 'required', 'none', or OpenAI's object that names a function (as 'required').
        response_format: OpenAI's object of type json_object or json_schema.
        image_prompts: what stands for each image of the conversation, in order.
        add_generation_prompt: end with the open channel that the model continues.
    """

    tools: Sequence[Mapping[str, Any]] = ()
    effort: Effort | None = None
    thinking: bool = True
    tool_choice: str | Mapping[str, Any] | None = None
    response_format: Mapping[str, Any] | None = None
    image_prompts: Sequence[str] = ()
    add_generation_prompt: bool = True


@dataclass
class _Writer:
    """Segments so far; `is_generated` marks those that the assistant would write itself."""

    segments: list[Segment] = field(default_factory=list)
    is_generated: bool = False

    def control(self, text: str) -> None:
        self.segments.append(Segment(text, True, self.is_generated))

    def text(self, text: str) -> None:
        if text:
            self.segments.append(Segment(text, False, self.is_generated))

    def open(self, name: str, /, **attributes: str) -> None:
        self.control(OPEN)
        self.text(name)
        for key, value in attributes.items():
            for piece in (f" {key}", '="', value.replace("&", "&amp;").replace('"', "&quot;"), '"'):
                self.text(piece)
        self.control(SEP)

    def close(self, name: str) -> None:
        self.control(CLOSE)
        self.text(name)
        self.control(SEP)

    def element(self, name: str, text: str, /, **attributes: str) -> None:
        self.open(name, **attributes)
        self.text(text)
        self.close(name)

    def end_message(self) -> None:
        self.close("message")
        self.control(END_OF_MESSAGE)

    def system(self, text: str, /, **attributes: str) -> None:
        self.open("message", role="system", **attributes)
        self.text(text)
        self.end_message()


def build_segments(messages: Sequence[Message], options: ChatOptions = ChatOptions()) -> list[Segment]:
    """The conversation as the model reads it.

    Raises:
        DataError: an unknown role, effort or content part; the message names it.
    """
    if options.effort is not None and options.effort not in EFFORTS:
        raise DataError(f"thinking effort '{options.effort}' is not one of {', '.join(EFFORTS)}")
    writer, images = _Writer(), iter(options.image_prompts)
    if options.tools:
        writer.system(_TOOLS.format(tools=_compact(options.tools)), type="tool-declare")
    if options.effort is not None and options.thinking:
        writer.system(_EFFORT.format(effort=options.effort), type="thinking-effort")
    calls: Sequence[Mapping[str, Any]] = ()
    for message in _in_call_order(messages):
        if message.get("role") == "assistant":
            calls = message.get("tool_calls") or ()
        _write_message(writer, message, calls, options, images)
    _write_wishes(writer, options)
    if options.add_generation_prompt:
        writer.open("message", role="assistant")
        writer.open("think" if options.thinking else "response")
    return writer.segments


def _write_message(
    writer: _Writer, message: Message, calls: Sequence[Mapping[str, Any]], options: ChatOptions, images: Any
) -> None:
    role = message.get("role")
    if role not in _ROLES:
        raise DataError(f"a message has the role {role!r}{nearest_name(str(role), _ROLES)}; known: {', '.join(_ROLES)}")
    name = {"name": str(message["name"])} if message.get("name") and role != "tool" else {}
    if role == "assistant":
        writer.open("message", role="assistant", **name)
        _write_assistant(writer, message, options)
        return
    if role == "system" and message.get("tools"):
        writer.system(_NEW_TOOLS.format(tools=_compact(message["tools"])), type="tool-declare")
        if not message.get("content"):
            return
    if role == "tool":
        index = message["index"]
        tool = calls[index - 1]["function"]["name"] if index <= len(calls) else str(message.get("name", ""))
        writer.open("message", role="tool", tool=tool, index=str(index))
    else:
        writer.open("message", role=role, **name)
    _write_content(writer, message.get("content"), images)
    writer.end_message()


def _write_assistant(writer: _Writer, message: Message, options: ChatOptions) -> None:
    """Channels of an assistant's message; the first one's opening belongs to the prompt, the rest to the model."""
    first = "think" if options.thinking else "response"
    writer.open(first)
    writer.is_generated = True
    if options.thinking:
        writer.text(str(message.get("reasoning_content") or message.get("reasoning") or ""))
        writer.close("think")
        writer.open("response")
    _write_content(writer, message.get("content"), iter(()))
    writer.close("response")
    if message.get("tool_calls"):
        writer.open("tools")
        for index, call in enumerate(message["tool_calls"], 1):
            _write_call(writer, call["function"], index)
        writer.close("tools")
    writer.end_message()
    writer.is_generated = False


def _write_call(writer: _Writer, function: Mapping[str, Any], index: int) -> None:
    writer.open("call", tool=str(function["name"]), index=str(index))
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except ValueError:
            parsed = None
        if not isinstance(parsed, dict):
            writer.element("json", arguments, type="object")
            writer.close("call")
            return
        arguments = parsed
    for key, value in arguments.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        writer.element("argument", text, key=str(key), type=_type_name(value))
    writer.close("call")


def _type_name(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    for kind, name in ((str, "string"), (int | float, "number"), (Mapping, "object")):
        if isinstance(value, kind):
            return name
    return "array"


def _write_content(writer: _Writer, content: Any, images: Any) -> None:
    """Text, or a list of parts: text and images."""
    if content is None or isinstance(content, str):
        writer.text(content or "")
        return
    for part in content:
        match part.get("type"):
            case "text":
                writer.text(part["text"])
            case "image_url" | "image":
                prompt = next(images, None)
                if prompt is None:
                    raise DataError("a message holds an image, but no prompt was prepared for it (image_prompts)")
                writer.control(prompt)
            case other:
                raise DataError(f"a message has a content part of type {other!r}; known: text, image_url")


def _write_wishes(writer: _Writer, options: ChatOptions) -> None:
    """The messages that say how the next one must be: with tools or without, as JSON."""
    choice = options.tool_choice if isinstance(options.tool_choice, str | None) else "required"
    if choice in _TOOL_CHOICE:
        writer.system(_TOOL_CHOICE[choice], type="tool-choice")
    wanted = options.response_format or {"type": "text"}
    kind = wanted.get("type")
    if kind in ("json_object", "json_schema"):
        text = _RESPONSE_FORMAT.format(kind=kind)
        if kind == "json_schema":
            text += _SCHEMA.format(schema=_compact(wanted["json_schema"].get("schema", {})))
        writer.system(text, type="response-format")


def _in_call_order(messages: Sequence[Message]) -> Iterable[Message]:
    """Every run of tool results in the order of the calls that it answers, each with its 1-based `index`.

    Results are matched by tool_call_id. A run that does not match stays as it was given, and counts by position.
    """
    calls: Sequence[Mapping[str, Any]] = ()
    for is_result, run in itertools.groupby(messages, lambda message: message.get("role") == "tool"):
        if is_result:
            yield from _indexed(list(run), calls)
            continue
        for message in run:
            calls = (message.get("tool_calls") or ()) if message.get("role") == "assistant" else calls
            yield message


def _indexed(run: list[Message], calls: Sequence[Mapping[str, Any]]) -> list[Message]:
    place = {call.get("id"): index for index, call in enumerate(calls, 1) if call.get("id") is not None}
    found = [place.get(message.get("tool_call_id")) for message in run]
    if None in found or len(set(found)) < len(found):
        return [{**message, "index": index} for index, message in enumerate(run, 1)]
    return [{**message, "index": index} for index, message in sorted(zip(found, run), key=lambda pair: pair[0] or 0)]


def _compact(value: Any) -> str:
    """JSON without spaces, keys sorted at every depth."""
    return json.dumps(value, separators=(",", ":"), sort_keys=True, ensure_ascii=False)


def encode_segments(tokenizer: Tokenizer, segments: Iterable[Segment]) -> list[int]:
    """Ids of segments, each encoded on its own."""
    return [token for segment in segments for token in _encode_segment(tokenizer, segment)]


def _encode_segment(tokenizer: Tokenizer, segment: Segment) -> list[int]:
    if not segment.is_control:
        return tokenizer.encode(segment.text)
    ids, start = [], 0
    for marker in _CONTROL.finditer(segment.text):
        ids += tokenizer.encode(segment.text[start : marker.start()])
        ids.append(tokenizer.special_id(marker.group()))
        start = marker.end()
    return ids + tokenizer.encode(segment.text[start:])


class EncodedChat(NamedTuple):
    """Ids of a conversation, and which of them the assistant wrote (what a loss is computed on)."""

    ids: list[int]
    is_generated: list[bool]


def encode_chat(tokenizer: Tokenizer, messages: Sequence[Message], options: ChatOptions = ChatOptions()) -> EncodedChat:
    """A conversation as token ids. Raises DataError as `build_segments`."""
    ids: list[int] = []
    marks: list[bool] = []
    for segment in build_segments(messages, options):
        piece = _encode_segment(tokenizer, segment)
        ids += piece
        marks += [segment.is_generated] * len(piece)
    return EncodedChat(ids, marks)
