"""The safetensors files of a checkpoint folder: their index, their headers, and tensors one at a time.

Opening checks that every file named in the index is there and whole; nothing but headers is read until a tensor is
asked for. A few files stay mapped at a time, so that a folder larger than memory streams through.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from safetensors import SafetensorError, safe_open
from torch import Tensor

from moonlet.errors import CheckpointError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_OPEN_AT_ONCE = 4


class Header(NamedTuple):
    """What a file says of one tensor."""

    shape: tuple[int, ...]
    dtype: str  # in safetensors' names: BF16, F32, U8, ...


class CheckpointFiles:
    """Tensors of a folder by name; use it as a context manager.

    Attributes:
        weight_map: tensor name -> file name.
        headers: tensor name -> shape and type.
        has_packed: some weights are MXFP4.

    Raises:
        CheckpointError: no index and no single file; a file is missing or cut short; the index and the files name
            different tensors.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: OrderedDict[str, Any] = OrderedDict()
        indexed = self._read_index()
        names = sorted(set(indexed.values())) if indexed is not None else [SINGLE_NAME]
        self._check_present(names)
        self.weight_map: dict[str, str] = {}
        self.headers: dict[str, Header] = {}
        for name in names:
            self._read_header(name)
        if indexed is not None:
            self._check_index(indexed)
        self.has_packed = any(name.endswith(".weight_packed") for name in self.weight_map)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self._open.clear()

    def tensor(self, name: str) -> Tensor:
        """Read one tensor into memory of its own."""
        try:
            return self._file(self.weight_map[name]).get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"'{self.folder / self.weight_map[name]}': cannot read {name}: {error}") from None

    def _file(self, name: str) -> Any:
        if name not in self._open:
            try:
                self._open[name] = safe_open(self.folder / name, framework="pt")
            except (SafetensorError, OSError) as error:
                raise CheckpointError(
                    f"'{self.folder / name}' is cut short or not a safetensors file ({error}): fetch it again"
                ) from None
            if len(self._open) > _OPEN_AT_ONCE:
                self._open.popitem(last=False)
        self._open.move_to_end(name)
        return self._open[name]

    def _read_index(self) -> dict[str, str] | None:
        path = self.folder / INDEX_NAME
        if not path.is_file():
            if (self.folder / SINGLE_NAME).is_file():
                return None
            raise CheckpointError(f"there is neither {INDEX_NAME} nor {SINGLE_NAME} in '{self.folder}'")
        try:
            return dict(json.loads(path.read_text(encoding="utf-8"))["weight_map"])
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"'{path}' is not an index with a weight_map: {error!r}") from None

    def _check_present(self, names: list[str]) -> None:
        absent = [name for name in names if not (self.folder / name).is_file()]
        if absent:
            raise CheckpointError(f"'{self.folder}' lacks {len(absent)} of {len(names)} files: {', '.join(absent)}")

    def _read_header(self, name: str) -> None:
        file = self._file(name)
        for key in file.keys():  # noqa: SIM118 (not a dict: it has no iterator)
            if key in self.weight_map:
                raise CheckpointError(f"'{self.folder}': {key} is in both {self.weight_map[key]} and {name}")
            part = file.get_slice(key)
            self.weight_map[key] = name
            self.headers[key] = Header(tuple(part.get_shape()), part.get_dtype())

    def _check_index(self, indexed: dict[str, str]) -> None:
        wrong = [key for key in indexed.keys() | self.weight_map.keys() if indexed.get(key) != self.weight_map.get(key)]
        if wrong:
            shown = ", ".join(sorted(wrong)[:10])
            raise CheckpointError(
                f"'{self.folder / INDEX_NAME}' and the files disagree about {len(wrong)} tensors: {shown}"
            )
