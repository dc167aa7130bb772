"""Blobs in a Redis or Valkey server, which several hosts may share.

    <prefix><key as hex>                 b"V" + blob, or b"M" + manifest (JSON) of a blob in parts
    <prefix><key as hex>:<digest>:<n>    part n of such a blob

The parts are written first and the manifest last. The server's `maxmemory` and its policy decide what makes room.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moonlet.errors import MissingDependencyError
from moonlet.serve.state_store.frame import HEADER_BYTES
from moonlet.serve.state_store.tier import Tier

_VALUE, _MANIFEST = b"V", b"M"
_HEAD_BYTES = 256  # a manifest is shorter
_MOST_PARTS = 1 << 16
_BATCH_BYTES = 64 << 20


@dataclass(frozen=True)
class _Manifest:
    """Header of a blob's frame, and how many parts the blob is in."""

    head: bytes
    num_parts: int


class RedisTier(Tier):
    """Blobs of a server at `url` (redis://, rediss:// or unix://). It need not be up yet.

    Args:
        prefix: of all keys; services with one prefix share their blobs.
        ttl_s: blobs are forgotten after this time; None keeps them as long as the server does.
        part_bytes: larger blobs are split, since one huge value blocks a server for all.
        timeout_s: of one answer of the server.
    Raises:
        MissingDependencyError: without the extra `store`.
        ValueError: the URL is none.
    """

    def __init__(
        self,
        url: str,
        *,
        prefix: str = "moonlet:",
        ttl_s: int | None = None,
        part_bytes: int = 16 << 20,
        timeout_s: float = 5.0,
        name: str = "redis",
    ) -> None:
        try:
            import redis
            from redis.backoff import NoBackoff
            from redis.retry import Retry
        except ImportError:
            raise MissingDependencyError("redis", "store", "the state store's Redis tier") from None
        self.name = name
        self._prefix, self._ttl_s, self._part_bytes = prefix.encode(), ttl_s, part_bytes
        self._client: Any = redis.Redis.from_url(
            url,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            # One more try, at once: a connection that the server closed while it idled is no failure.
            retry=Retry(NoBackoff(), 1),
        )

    def read(self, keys: Sequence[bytes], until: float) -> dict[bytes, bytes]:
        found = {}
        for key, stored in zip(keys, self._run(("get", self._name(key)) for key in keys)):
            if stored is not None:
                found[key] = self._joined(key, stored) if stored[:1] == _MANIFEST else stored[1:]
        return found

    def write(self, blobs: Mapping[bytes, bytes], until: float) -> None:
        old = self._old_parts(list(blobs))
        batch: list[tuple] = []
        num_bytes = 0
        for key, blob in blobs.items():
            if len(blob) > self._part_bytes:
                old -= self._write_parts(key, blob)
                continue
            batch.append(self._set(self._name(key), _VALUE + blob))
            num_bytes += len(blob)
            if num_bytes > _BATCH_BYTES:
                self._run(batch)
                batch, num_bytes = [], 0
        self._run(batch)
        self._run([("delete", *old)] if old else [])

    def contains(self, keys: Sequence[bytes], until: float) -> set[bytes]:
        return {key for key, has in zip(keys, self._run(("exists", self._name(key)) for key in keys)) if has}

    def remove(self, keys: Sequence[bytes], until: float) -> None:
        names = {self._name(key) for key in keys} | self._old_parts(keys)
        self._run([("delete", *names)] if names else [])

    def heads(self, keys: Sequence[bytes], num_bytes: int, until: float) -> dict[bytes, bytes]:
        found = {}
        for key, stored in zip(keys, self._stored_heads(keys)):
            if stored[:1] == _VALUE:
                found[key] = stored[1 : 1 + num_bytes]
            elif (what := _read_manifest(stored)) is not None:
                found[key] = what.head[:num_bytes]
        return found

    def close(self) -> None:
        self._client.close()

    def _joined(self, key: bytes, stored: bytes) -> bytes:
        """A blob in parts; an empty one, which no checksum fits, where a part is gone or the manifest is damaged."""
        what = _read_manifest(stored)
        parts = [] if what is None else self._run(("get", name) for name in self._parts(key, what))
        return b"" if None in parts else b"".join(parts)

    def _write_parts(self, key: bytes, blob: bytes) -> set[bytes]:
        """Write the parts, then the manifest; the parts' names."""
        manifest = _Manifest(blob[:HEADER_BYTES], -(-len(blob) // self._part_bytes))
        names = self._parts(key, manifest)
        for number, name in enumerate(names):
            at = number * self._part_bytes
            self._run([self._set(name, blob[at : at + self._part_bytes])])
        described = json.dumps({"head": manifest.head.hex(), "parts": manifest.num_parts})
        self._run([self._set(self._name(key), _MANIFEST + described.encode())])
        return set(names)

    def _parts(self, key: bytes, manifest: _Manifest) -> list[bytes]:
        # The head ends in the checksum: other contents get other parts, so no reader joins parts of two blobs.
        digest = manifest.head[-16:].hex().encode()
        return [b"%s:%s:%d" % (self._name(key), digest, number) for number in range(manifest.num_parts)]

    def _old_parts(self, keys: Sequence[bytes]) -> set[bytes]:
        """Names of the parts of blobs that are to be replaced or removed."""
        manifests = [(key, _read_manifest(stored)) for key, stored in zip(keys, self._stored_heads(keys))]
        return {part for key, manifest in manifests if manifest for part in self._parts(key, manifest)}

    def _stored_heads(self, keys: Sequence[bytes]) -> list[bytes]:
        return self._run(("getrange", self._name(key), 0, _HEAD_BYTES - 1) for key in keys)

    def _name(self, key: bytes) -> bytes:
        return self._prefix + key.hex().encode()

    def _set(self, name: bytes, value: bytes) -> tuple:
        return ("set", name, value) if self._ttl_s is None else ("set", name, value, self._ttl_s)

    def _run(self, commands: Iterable[tuple]) -> list[Any]:
        """Results of commands that are sent in one go."""
        pipe = self._client.pipeline(transaction=False)
        for method, *arguments in commands:
            getattr(pipe, method)(*arguments)
        return pipe.execute()


def _read_manifest(stored: bytes) -> _Manifest | None:
    """The manifest of a blob in parts, if `stored` is a sound one."""
    try:
        what = json.loads(stored[1:]) if stored[:1] == _MANIFEST else {}
        manifest = _Manifest(bytes.fromhex(what["head"]), int(what["parts"]))
    except (ValueError, KeyError, TypeError):
        return None
    return manifest if len(manifest.head) == HEADER_BYTES and 0 < manifest.num_parts <= _MOST_PARTS else None
