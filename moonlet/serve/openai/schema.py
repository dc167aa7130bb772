"""What clients send. Fields that we do not know are ignored: OpenAI's clients send many."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Bias = Annotated[float, Field(ge=-100, le=100)]
StopString = Annotated[str, Field(min_length=1, max_length=1000)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="ignore", protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, data: Any) -> Any:
        """Clients send null for what they leave open."""
        if not isinstance(data, dict):
            return data
        return {key: value for key, value in data.items() if value is not None}


class SamplingFields(_Body):
    temperature: float = 1.0
    top_k: int = Field(0, description="0 or -1 keeps all")
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, Bias] = Field({}, max_length=1024)
    seed: Seed | None = None


class StreamOptions(_Body):
    include_usage: bool = False


class Asked(SamplingFields):
    """What chats and completions have in common. `return_token_ids` adds ids to the answer, as in vLLM."""

    model: str | None = None
    n: Literal[1] = 1
    max_tokens: int | None = None
    stop: StopString | list[StopString] = Field([], max_length=16)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    return_token_ids: bool = False

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop


class CompletionBody(Asked):
    prompt: str | list[int] | list[str] | list[list[int]]
    max_tokens: int | None = 16
    logprobs: int | None = Field(None, ge=0, le=20)

    @model_validator(mode="after")
    def _one_prompt(self) -> CompletionBody:
        if isinstance(self.prompt, list) and len(self.prompt) > 1 and not isinstance(self.prompt[0], int):
            raise ValueError("one prompt a request; send several requests, they run together")
        return self


class Part(_Body):
    type: str
    text: str = ""


class Function(_Body):
    name: str
    arguments: str | dict[str, Any] = ""


class Call(_Body):
    id: str | None = None
    function: Function


class ToolFunction(BaseModel):
    model_config = ConfigDict(extra="allow")
    name: str = Field(min_length=1, max_length=256)


class Tool(BaseModel):
    """Kept as it was sent: the model reads the whole declaration."""

    model_config = ConfigDict(extra="allow")
    type: Literal["function"]
    function: ToolFunction

    def as_sent(self) -> dict[str, Any]:
        return self.model_dump(exclude_unset=True)


class Message(_Body):
    role: str
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[Call] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tools: list[Tool] | None = None

    def as_sent(self) -> dict[str, Any]:
        """For `encode_chat`."""
        role = "system" if self.role == "developer" else self.role
        tools = {"tools": [tool.as_sent() for tool in self.tools]} if self.tools else {}
        return {**self.model_dump(exclude_none=True, exclude={"tools"}), "role": role, **tools}


class ChosenFunction(_Body):
    name: str


class ToolChoice(_Body):
    type: Literal["function"]
    function: ChosenFunction


class ResponseFormat(_Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> ResponseFormat:
        if self.type == "json_schema" and not isinstance((self.json_schema or {}).get("schema"), dict):
            raise ValueError("a response_format of type json_schema needs json_schema.schema, an object")
        return self


class Thinking(_Body):
    type: Literal["enabled", "disabled"]


class ChatBody(Asked):
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = None
    tools: list[Tool] = Field([], max_length=1024)
    tool_choice: Literal["auto", "required", "none"] | ToolChoice = "auto"
    reasoning_effort: Literal["low", "high", "max"] | None = None
    thinking: Thinking = Thinking(type="enabled")
    response_format: ResponseFormat | None = None
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)

    @model_validator(mode="after")
    def _known_tool(self) -> ChatBody:
        names = [tool.function.name for tool in self.tools]
        if isinstance(self.tool_choice, ToolChoice) and self.tool_choice.function.name not in names:
            raise ValueError(
                f"tool_choice names '{self.tool_choice.function.name}', which is none of the tools {names}"
            )
        if self.tool_choice == "required" and not self.tools:
            raise ValueError("tool_choice is 'required', but there are no tools")
        return self


class GenerateBody(SamplingFields):
    """Tokens in, tokens out: nothing is added, banned or cut beyond what is asked for."""

    ids: list[int]
    max_tokens: int = 256
    stop_ids: list[int] = Field([], max_length=1024)
    banned_ids: list[int] = []
    num_top: int = Field(0, ge=0, le=100)
    deadline_s: float | None = Field(None, gt=0)
    priority: int = Field(0, ge=-(2**31), lt=2**31)


class UpdateWeightsBody(_Body):
    path: str = Field(min_length=1)
    version: int = Field(ge=0, lt=2**63)
    keep_states: bool = False
