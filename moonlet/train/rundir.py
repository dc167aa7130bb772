"""A run directory: what a run writes, and one run in it at a time.

    config.resolved.toml  metrics.jsonl  events.jsonl  data/  checkpoints/step_N/  eval/  logs/attempt_k/  report.html

`latest` beside it points to the run that was opened last.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from moonlet.config import RunConfig, dump_toml
from moonlet.errors import ConfigError, StorageError

CONFIG_FILE = "config.resolved.toml"
_LOCK_FILE = ".lock"


@dataclass(frozen=True)
class RunDirectory:
    """Paths of a run. `attempt` counts how often it was started or resumed."""

    root: Path
    attempt: int = 1

    @property
    def config_path(self) -> Path:
        return self.root / CONFIG_FILE

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def data(self) -> Path:
        return self.root / "data"

    @property
    def logs(self) -> Path:
        return self.root / "logs" / f"attempt_{self.attempt}"

    def record(self, config: RunConfig) -> None:
        """Write the resolved recipe. A resumed run does it once the recipe has proved to belong to its checkpoint."""
        _replace_text(self.config_path, dump_toml(config))


@contextlib.contextmanager
def open_run(root: Path, config: RunConfig, resume: bool = False) -> Iterator[RunDirectory]:
    """Make or reopen the run directory `root` and keep others out of it inside the `with` block.

    Raises:
        ConfigError: a run is there already and `resume` is not given.
        StorageError: another process works in it, or it cannot be written.
    """
    with contextlib.ExitStack() as stack:
        try:
            root = root.resolve()
            root.mkdir(parents=True, exist_ok=True)
            stack.enter_context(_locked(root))
            if not resume and (root / CONFIG_FILE).exists():
                raise ConfigError(
                    f"'{root}' holds a run already: go on with it by --resume, or name another directory by --out"
                )
            run = RunDirectory(root, _next_attempt(root))
            run.logs.mkdir(parents=True)
            if not run.config_path.exists():
                run.record(config)
            _point_latest_at(root)
        except OSError as error:
            raise StorageError(f"cannot write the run directory '{root}': {error}") from error
        yield run


@contextlib.contextmanager
def _locked(root: Path) -> Iterator[None]:
    """The lock belongs to the open file, so a killed process leaves none behind."""
    with (root / _LOCK_FILE).open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            owner = file.read().strip() or "unknown"
            raise StorageError(
                f"process {owner} is working in '{root}': wait for it, or name another directory by --out"
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def _next_attempt(root: Path) -> int:
    taken = [path.name.removeprefix("attempt_") for path in (root / "logs").glob("attempt_*")]
    return max((int(number) for number in taken if number.isdigit()), default=0) + 1


def _replace_text(path: Path, text: str) -> None:
    draft = path.with_name(f"{path.name}.tmp")
    draft.write_text(text, encoding="utf-8")
    os.replace(draft, path)


def _point_latest_at(root: Path) -> None:
    link, draft = root.parent / "latest", root.parent / f".latest.{os.getpid()}"
    if link.exists() and not link.is_symlink():
        return  # somebody's own folder of that name
    draft.unlink(missing_ok=True)
    draft.symlink_to(root.name)
    os.replace(draft, link)
