"""Bodies of the control API: what E2B's clients send and what they read, to and from the types of the seam.

What E2B has no word for travels in metadata under `moonlet.` when a sandbox is created (any client can send it, any other
service keeps it unread) and comes back as the object `moonlet`, which other clients skip.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Any

from pydantic import BaseModel, Field

from moonlet.errors import ConfigError, nearest_name
from moonlet.sandbox.api import Caps, FailReason, Limits, SandboxInfo, SandboxSpec, State
from moonlet.sandbox.server.config import ENVD_VERSION, ServerConfig

OPTION_PREFIX = "moonlet."
AUTO_RESUME = OPTION_PREFIX + "auto_resume"  # in the metadata of a sandbox that its traffic may wake
_LIMITS: dict[str, type] = {"cpus": float} | {
    name: int for name in ("memory_bytes", "disk_bytes", "processes", "open_files", "output_bytes")
}
_OPTIONS = ("backend", "allow_hosts", "idle_pause_s", "ttl", "auto_resume", *_LIMITS)
_NEVER = datetime(9999, 1, 1, tzinfo=UTC)

# E2B knows two states. A sandbox in transition is shown as what it was before the transition or will be after it,
# whichever lets a client go on: calls to a sandbox that resumes wait, calls to one that pauses are refused.
_STATES = {State.PAUSING: "paused", State.PAUSED: "paused", State.FAILED: "failed", State.KILLING: "killing"}


Seconds = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]


class Network(BaseModel):
    allowOut: list[str] = Field(default_factory=list, max_length=256)
    denyOut: list[str] = Field(default_factory=list, max_length=256)


class AutoResume(BaseModel):
    enabled: bool = False


class NewSandbox(BaseModel):
    templateID: str = Field(max_length=256)
    timeout: Seconds | None = None
    metadata: dict[str, str] = Field(default_factory=dict)
    envVars: dict[str, str] = Field(default_factory=dict)
    autoPause: bool | None = None
    autoResume: AutoResume | None = None
    network: Network | None = None
    volumeMounts: list[Any] = Field(default_factory=list)
    mcp: dict[str, Any] | None = None
    iam: dict[str, Any] | None = None


class Timeout(BaseModel):
    """`null` is ours: it lives until it is killed."""

    timeout: Seconds | None


class Connect(BaseModel):
    timeout: Seconds | None = None
    memory: bool | None = None


class Refresh(BaseModel):
    duration: Seconds | None = None


class Fork(BaseModel):
    timeout: Seconds | None = None
    count: int = Field(default=1, ge=1)


class NewSnapshot(BaseModel):
    name: str | None = Field(default=None, max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*([.:/][A-Za-z0-9_-]+)*$")
    memory: bool | None = None


def spec_of(body: NewSandbox, config: ServerConfig, default_ttl_s: float) -> SandboxSpec:
    """The spec that a request asks for; ConfigError for what this service cannot do or does not know."""
    for name in ("volumeMounts", "mcp", "iam"):
        if getattr(body, name):
            raise ConfigError(f"this service has no '{name}'; leave it out")
    bounds = config.bounds
    if len(body.metadata) > bounds.metadata_entries or len(body.envVars) > bounds.env_entries:
        raise ConfigError(f"at most {bounds.metadata_entries} metadata entries and {bounds.env_entries} variables")
    for what, mapping in (("metadata", body.metadata), ("envVars", body.envVars)):
        if sum(len(key) + len(value) for key, value in mapping.items()) > bounds.mapping_chars:
            raise ConfigError(f"{what} holds more than {bounds.mapping_chars} characters")
    for name in body.envVars:
        if not name or "=" in name or "\0" in name + body.envVars[name]:
            raise ConfigError(f"{name!r} cannot be an environment variable")
    options = _options(body.metadata)
    limits = {name: options.pop(name) for name in _LIMITS if name in options}
    hosts = [*options.get("allow_hosts", ()), *allow_hosts(body.network)]
    ttl_s = default_ttl_s if body.timeout is None else body.timeout
    return SandboxSpec(
        template=config.templates.get(body.templateID, body.templateID),
        backend=options.get("backend", "auto"),
        limits=Limits(**limits),
        env=body.envVars,
        metadata=body.metadata | ({AUTO_RESUME: "1"} if body.autoResume and body.autoResume.enabled else {}),
        allow_hosts=tuple(dict.fromkeys(hosts)),
        ttl_s=None if options.get("ttl") == "none" else ttl_s,
        on_timeout="pause" if body.autoPause else "kill",
        idle_pause_s=options.get("idle_pause_s"),
    )


def allow_hosts(network: Network | None) -> list[str]:
    """The hosts of a network configuration. Nothing is reachable that is not listed, so the deny list needs no reading."""
    hosts = network.allowOut if network else []
    for host in hosts:
        if "/" in host or not host or any(character.isspace() for character in host):
            raise ConfigError(
                f"'{host}' in allowOut: this service allows hosts by name (packages.example.org, *.example.org:443)"
            )
    return hosts


def _options(metadata: Mapping[str, str]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for key, value in metadata.items():
        name = key.removeprefix(OPTION_PREFIX)
        if name == key:
            continue
        if name not in _OPTIONS:
            raise ConfigError(f"metadata '{key}' is not an option{nearest_name(name, _OPTIONS)}")
        try:
            options[name] = _parse_option(name, value)
        except ValueError:
            raise ConfigError(f"metadata '{key}' is '{value}', which is not a number") from None
    return options


def _parse_option(name: str, value: str) -> Any:
    if name == "allow_hosts":
        return [host for host in value.split(",") if host]
    if name in _LIMITS or name == "idle_pause_s":
        number = _LIMITS.get(name, float)(value)
        if not (math.isfinite(number) and number > 0):
            raise ConfigError(f"metadata '{OPTION_PREFIX}{name}' is {value}; it must be above 0")
        return number
    return value


def option_metadata(spec: SandboxSpec) -> dict[str, str]:
    """The metadata entries that carry what E2B's request has no field for; only what differs from the defaults."""
    options: dict[str, str] = {}
    if spec.backend != "auto":
        options["backend"] = spec.backend
    if spec.allow_hosts:
        options["allow_hosts"] = ",".join(spec.allow_hosts)
    if spec.idle_pause_s is not None:
        options["idle_pause_s"] = str(spec.idle_pause_s)
    if spec.ttl_s is None:
        options["ttl"] = "none"
    for name in _LIMITS:
        value = getattr(spec.limits, name)
        if value != getattr(Limits(), name):
            options[name] = str(value)
    return {OPTION_PREFIX + name: value for name, value in options.items()}


def state_word(info: SandboxInfo) -> str:
    return _STATES.get(info.state, "running")


def sandbox_body(info: SandboxInfo, token: str, domain: str | None) -> dict[str, Any]:
    """What create, connect and fork answer: all that a client needs to talk to the sandbox."""
    return {
        "sandboxID": info.id,
        "templateID": info.template,
        "clientID": "moonlet",
        "envdVersion": ENVD_VERSION,
        "envdAccessToken": token,
        "domain": domain,
        "moonlet": extension(info),
    }


def detail_body(info: SandboxInfo) -> dict[str, Any]:
    """A sandbox as lists show it; it holds no secret."""
    mib = 1 << 20
    ends = datetime.fromtimestamp(info.expires_at, UTC) if info.expires_at is not None else _NEVER
    return {
        "sandboxID": info.id,
        "templateID": info.template,
        "clientID": "moonlet",
        "envdVersion": ENVD_VERSION,
        "startedAt": rfc3339(info.created_at),
        "endAt": ends.isoformat().replace("+00:00", "Z"),
        "cpuCount": max(1, math.ceil(info.limits.cpus)),
        "memoryMB": info.limits.memory_bytes // mib,
        "diskSizeMB": info.limits.disk_bytes // mib,
        "state": state_word(info),
        "metadata": dict(info.metadata),
        "network": {"allowOut": list(info.allow_hosts), "denyOut": ["0.0.0.0/0"]},
        "moonlet": extension(info),
    }


def rfc3339(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def extension(info: SandboxInfo) -> dict[str, Any]:
    """Everything of a `SandboxInfo`, for `info_of`."""
    body = {field.name: getattr(info, field.name) for field in dataclasses.fields(info)}
    return body | {
        "state": info.state.value,
        "reason": info.reason.value if info.reason else None,
        "caps": dataclasses.asdict(info.caps),
        "limits": dataclasses.asdict(info.limits),
        "metadata": dict(info.metadata),
    }


def info_of(body: Mapping[str, Any]) -> SandboxInfo:
    """The `SandboxInfo` in an `extension`; fields that a newer service adds are skipped."""

    def pick(kind: Any, values: Mapping[str, Any]) -> dict[str, Any]:
        names = {field.name for field in dataclasses.fields(kind)}
        return {name: value for name, value in values.items() if name in names}

    fields = pick(SandboxInfo, body)
    caps = pick(Caps, body["caps"])
    caps["notes"] = tuple(caps.get("notes", ()))
    fields["caps"] = Caps(**caps)
    fields["limits"] = Limits(**pick(Limits, body["limits"]))
    fields["state"] = State(body["state"])
    fields["reason"] = FailReason(body["reason"]) if body.get("reason") else None
    fields["allow_hosts"] = tuple(body.get("allow_hosts", ()))
    return SandboxInfo(**fields)
