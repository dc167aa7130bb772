"""Stores by name, as a configuration file or a command line writes them.

ram:256MiB
disk:PATH?size=4GiB
redis://HOST:PORT/DB?ttl_s=86400        also rediss:// (TLS), valkey://, and unix:///SOCKET
mooncake://HOST:PORT?segment=1GiB       the master's address
s3://BUCKET/PREFIX
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal
from urllib.parse import parse_qsl

from moonlet.errors import ConfigError, nearest_name
from moonlet.serve.state_store.archive_tier import ArchiveTier
from moonlet.serve.state_store.disk_tier import DiskTier
from moonlet.serve.state_store.mooncake_tier import MooncakeConfig, MooncakeTier
from moonlet.serve.state_store.protocol import StateStore
from moonlet.serve.state_store.ram_tier import RamTier
from moonlet.serve.state_store.redis_tier import RedisTier
from moonlet.serve.state_store.tier import Tier
from moonlet.serve.state_store.tiered import TieredStore

_UNITS = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
_UNITS |= {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_DISK_BYTES = 4 << 30


def open_store(urls: str | Sequence[str], *, write: Literal["back", "through"] = "back") -> StateStore:
    """The store of one tier or of several, the fastest first; see the head of this file for their names.

    A server that is not up is no error: it is tried again from time to time.

    Raises:
        ConfigError: a name, an option or a size makes no sense.
        StorageError: a directory cannot be used.
        MissingDependencyError: a tier needs a package that is not installed.
    """
    listed = [urls] if isinstance(urls, str) else list(urls)
    if not listed:
        raise ConfigError("a state store needs at least one tier, such as ram:256MiB")
    if write not in ("back", "through"):
        raise ConfigError(f"write = '{write}': a state store writes 'back' or 'through'")
    tiers = [_open_tier(url) for url in listed]
    for number, tier in enumerate(tiers):
        if same := sum(other.name.split("-")[0] == tier.name for other in tiers[:number]):
            tier.name += f"-{same + 1}"
    return TieredStore(tiers, write=write)


def parse_bytes(text: str) -> int:
    """'256MiB', '4 GB' or '1000' in bytes.

    Raises:
        ConfigError: it is no size above zero.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)", text.strip())
    size = int(float(match[1]) * _UNITS[match[2].lower()]) if match and match[2].lower() in _UNITS else 0
    if size <= 0:
        raise ConfigError(f"'{text}' is no size; write one like 256MiB or 4GiB")
    return size


def _open_tier(url: str) -> Tier:
    scheme, colon, rest = url.partition(":")
    if not colon or scheme not in _OPENERS:
        known = ", ".join(_OPENERS)
        raise ConfigError(f"'{scheme}' is no kind of state store{nearest_name(scheme, _OPENERS)}; there are {known}")
    place, _, query = rest.partition("?")
    if scheme not in ("ram", "disk") and not place.startswith("//"):
        raise ConfigError(f"'{scheme}:{place}' is no address: write {scheme}://...")
    try:
        options = dict(parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query)))
    except ValueError as error:
        raise ConfigError(f"{scheme}: the options '{query}' are not NAME=VALUE&...: {error}") from None
    return _OPENERS[scheme](scheme, place, options)


def _ram(scheme: str, place: str, options: dict[str, str]) -> Tier:
    _refuse_unknown(scheme, options, ())
    return RamTier(parse_bytes(place))


def _disk(scheme: str, place: str, options: dict[str, str]) -> Tier:
    _refuse_unknown(scheme, options, ("size",))
    if not place:
        raise ConfigError("a disk tier needs a directory: disk:PATH?size=4GiB")
    size = parse_bytes(options["size"]) if "size" in options else _DISK_BYTES
    return DiskTier(Path(place).expanduser().absolute(), size)


def _redis(scheme: str, place: str, options: dict[str, str]) -> Tier:
    _refuse_unknown(scheme, options, ("ttl_s", "timeout_s", "prefix", "part", "db"))
    chosen: dict[str, Any] = {"name": scheme} if scheme == "valkey" else {}
    if "ttl_s" in options:
        chosen["ttl_s"] = _number("ttl_s", options["ttl_s"], int)
    if "timeout_s" in options:
        chosen["timeout_s"] = _number("timeout_s", options["timeout_s"], float)
    if "part" in options:
        chosen["part_bytes"] = parse_bytes(options["part"])
    if "prefix" in options:
        chosen["prefix"] = options["prefix"]
    url = f"{'redis' if scheme == 'valkey' else scheme}:{place}"
    try:
        return RedisTier(url + (f"?db={options['db']}" if "db" in options else ""), **chosen)
    except ValueError as error:
        raise ConfigError(f"the Redis tier's address is not understood: {error}") from None


def _mooncake(scheme: str, place: str, options: dict[str, str]) -> Tier:
    sizes = {"segment": "segment_bytes", "buffer": "buffer_bytes"}
    texts = ("host", "protocol", "devices", "metadata", "prefix")
    _refuse_unknown(scheme, options, (*sizes, *texts))
    chosen: dict[str, Any] = {name: options[name] for name in texts if name in options}
    chosen |= {field: parse_bytes(options[name]) for name, field in sizes.items() if name in options}
    return MooncakeTier(MooncakeConfig(place.removeprefix("//"), **chosen))


def _s3(scheme: str, place: str, options: dict[str, str]) -> Tier:
    _refuse_unknown(scheme, options, ())
    return ArchiveTier(f"{scheme}:{place}")


def _refuse_unknown(scheme: str, options: dict[str, str], known: Sequence[str]) -> None:
    for name in options:
        if name not in known:
            there_are = f"there are {', '.join(known)}" if known else "it has none"
            raise ConfigError(f"'{name}' is no option of {scheme}{nearest_name(name, known)}; {there_are}")


def _number(name: str, text: str, kind: Callable[[str], Any]) -> Any:
    try:
        value = kind(text)
    except ValueError:
        value = 0
    if not value > 0:
        raise ConfigError(f"{name} = '{text}' is no number above zero")
    return value


_OPENERS: dict[str, Callable[[str, str, dict[str, str]], Tier]] = {
    "ram": _ram,
    "disk": _disk,
    "redis": _redis,
    "rediss": _redis,
    "unix": _redis,
    "valkey": _redis,
    "mooncake": _mooncake,
    "s3": _s3,
}
