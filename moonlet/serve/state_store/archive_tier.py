"""Blobs in a bucket of an S3 store, through fsspec: slow and large, for what should outlive the machines.

Nothing is ever evicted there; a lifecycle rule of the bucket removes what is old.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from moonlet.errors import ConfigError, MissingDependencyError
from moonlet.serve.state_store.tier import Tier

_CLIENT = {"connect_timeout": 5, "read_timeout": 20, "retries": {"max_attempts": 1}}


class ArchiveTier(Tier):
    """Blobs below `s3://bucket/prefix`; credentials and endpoint are those of the environment, as for every S3 client.

    Raises:
        MissingDependencyError: without the extra `store`.
        ConfigError: the URL names no bucket.
    """

    def __init__(self, url: str, *, name: str = "s3") -> None:
        try:
            import fsspec

            # An instance of our own: closing it, or its settings, must not be anybody else's.
            file_system, root = fsspec.core.url_to_fs(
                url, use_listings_cache=False, skip_instance_cache=True, config_kwargs=_CLIENT
            )
        except ImportError as error:
            raise MissingDependencyError(error.name or "s3fs", "store", "the state store's S3 tier") from None
        self.name = name
        self._fs: Any = file_system
        self._root = root.rstrip("/")
        if not self._root:
            raise ConfigError(f"'{url}' names no bucket: write s3://BUCKET/PREFIX")

    def read(self, keys: Sequence[bytes], until: float) -> dict[bytes, bytes]:
        return self._present(keys, self._fs.cat([self._path(key) for key in keys], on_error="return"))

    def write(self, blobs: Mapping[bytes, bytes], until: float) -> None:
        self._fs.pipe({self._path(key): blob for key, blob in blobs.items()})

    def contains(self, keys: Sequence[bytes], until: float) -> set[bytes]:
        return set(self.heads(keys, 1, until))

    def remove(self, keys: Sequence[bytes], until: float) -> None:
        for key in keys:
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(self._path(key))

    def heads(self, keys: Sequence[bytes], num_bytes: int, until: float) -> dict[bytes, bytes]:
        paths = [self._path(key) for key in keys]
        answers = self._fs.cat_ranges(paths, 0, num_bytes, on_error="return")
        return self._present(keys, dict(zip(paths, answers)))

    def _present(self, keys: Sequence[bytes], answers: Mapping[str, Any]) -> dict[bytes, bytes]:
        """What was found. A blob that is absent is no error; anything else that went wrong is."""
        found = {}
        for key in keys:
            answer = answers[self._path(key)]
            if isinstance(answer, BaseException):
                if not isinstance(answer, FileNotFoundError):
                    raise answer
            else:
                found[key] = answer
        return found

    def _path(self, key: bytes) -> str:
        text = key.hex()
        return f"{self._root}/{text[:2]}/{text}"
