"""Blobs in a Mooncake Store: the memory of many hosts as one pool, over TCP or RDMA.

A master (`mooncake_master`) knows where each object lies; clients lend the pool a segment of their memory, or none.
The store has no passwords: keep its ports inside a trusted network.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moonlet.errors import ConfigError, StorageError
from moonlet.serve.state_store.tier import Tier

_CONNECT_S = 2.0

# Clients whose master is gone. Closing one, or letting it be collected, would stop every thread for ten seconds.
_LEFT: list[Any] = []


@dataclass(frozen=True)
class MooncakeConfig:
    """Where the pool is and what this client brings.

    Attributes:
        master: host:port of `mooncake_master`.
        host: a name of this host that the other clients reach.
        segment_bytes: memory that this client lends to the pool; 0 for none.
        buffer_bytes: memory for objects on their way; no object may be larger.
        protocol, devices: tcp, or rdma and its devices.
        metadata: P2PHANDSHAKE, or the URL of a metadata server.
    """

    master: str
    host: str = "127.0.0.1"
    segment_bytes: int = 0
    buffer_bytes: int = 256 << 20
    protocol: str = "tcp"
    devices: str = ""
    metadata: str = "P2PHANDSHAKE"
    prefix: str = "moonlet:"


class MooncakeTier(Tier):
    """Blobs of the pool, written whole or not at all by its two-phase put. The master need not be up yet.

    Raises:
        ConfigError: no wheel of Mooncake that runs here is installed, or `master` has no port.
    """

    def __init__(self, config: MooncakeConfig, *, name: str = "mooncake") -> None:
        # Its own log, on stderr, has several lines for every connection.
        os.environ.setdefault("GLOG_minloglevel", "2")
        try:
            from mooncake.store import MooncakeDistributedStore
        except ImportError as error:
            raise ConfigError(
                f"the state store's Mooncake tier cannot load its client ({error}): pip install "
                "mooncake-transfer-engine where there is CUDA, else mooncake-transfer-engine-non-cuda"
            ) from error
        host, _, port = config.master.rpartition(":")
        if not host or not port.isdigit():
            raise ConfigError(f"'{config.master}' is no address of a Mooncake master: write mooncake://HOST:PORT")
        self.name = name
        self.max_blob_bytes = config.buffer_bytes // 2
        self._config = config
        self._address = (host, int(port))
        self._new_client: Any = MooncakeDistributedStore
        self._client: Any = None
        self._lock = threading.Lock()

    def read(self, keys: Sequence[bytes], until: float) -> dict[bytes, bytes]:
        found = {}
        for key in self.contains(keys, until):
            if time.monotonic() >= until:
                break
            # Empty where the object has gone in between, or the host whose memory held it has.
            if blob := self._connected().get(self._name(key)):
                found[key] = blob
        return found

    def write(self, blobs: Mapping[bytes, bytes], until: float) -> None:
        client = self._connected()
        for key, blob in blobs.items():
            if (code := client.upsert(self._name(key), blob)) != 0:
                raise StorageError(f"Mooncake refuses an object of {len(blob):,} bytes with code {code}")

    def contains(self, keys: Sequence[bytes], until: float) -> set[bytes]:
        codes = self._connected().batch_is_exist([self._name(key) for key in keys])
        if any(code < 0 for code in codes):
            raise StorageError(f"the Mooncake master at {self._config.master} answers with code {min(codes)}")
        return {key for key, code in zip(keys, codes) if code == 1}

    def remove(self, keys: Sequence[bytes], until: float) -> None:
        present = [self._name(key) for key in self.contains(keys, until)]
        codes = self._connected().batch_remove(present, force=True) if present else []
        if any(codes):
            raise StorageError(f"Mooncake does not remove an object: code {min(codes)}")

    def close(self) -> None:
        with self._lock:
            client, self._client = self._client, None
        if client is not None and self._master_answers():
            client.close()
        elif client is not None:
            _LEFT.append(client)

    def _connected(self) -> Any:
        with self._lock:
            if self._client is None:
                # Without a master, joining would go on for a minute and a half.
                if not self._master_answers():
                    raise StorageError(f"no Mooncake master at {self._config.master}")
                client, config = self._new_client(), self._config
                code = client.setup(
                    *(config.host, config.metadata, config.segment_bytes, config.buffer_bytes),
                    *(config.protocol, config.devices, config.master),
                )
                if code != 0:
                    raise StorageError(f"cannot join the Mooncake pool at {config.master}: code {code}")
                self._client = client
            return self._client

    def _master_answers(self) -> bool:
        try:
            socket.create_connection(self._address, _CONNECT_S).close()
        except OSError:
            return False
        return True

    def _name(self, key: bytes) -> str:
        return self._config.prefix + key.hex()
