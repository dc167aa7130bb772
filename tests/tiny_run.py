"""A tiny model, corpus and recipe, and whole runs of it that a spawned process can import by name."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

from moonlet.config import RunConfig, resolve_run
from moonlet.data.corpus import prepare_corpus
from moonlet.train.loop import Sink
from moonlet.train.pretrain import pretrain
from moonlet.train.rundir import RunDirectory

MODEL = {
    "preset": "nano",
    "vocab_size": 320,
    "pad_token_id": 319,
    "bos_token_id": 304,
    "eos_token_id": 306,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_experts": 8,
    "num_experts_per_token": 2,
    "moe_intermediate_size": 16,
    "routed_expert_hidden_size": 16,
    "linear_attn_config": {"head_dim": 16, "num_heads": 2},
}


def config(texts: Path, **changes: Any) -> RunConfig:
    """Two stages of ten steps. `changes` replace sections; in `train` and `optim` they replace single keys."""
    table: dict[str, Any] = {
        "name": "tiny",
        "model": MODEL,
        "data": {"sources": [{"name": "text", "kind": "text", "path": str(texts)}], "min_characters": 10},
        "stages": [
            {"name": "short", "seq_len": 32, "tokens": 2560, "batch_tokens": 256, "mixture": {"text": 1}},
            {"name": "long", "seq_len": 64, "tokens": 2560, "batch_tokens": 256, "mixture": {"text": 1}},
        ],
        "train": {"micro_batch_tokens": 128, "log_every": 1, "checkpoint_every": 5, "keep_last": 2},
        "optim": {"muon_lr": 0.02, "adam_lr": 0.005},
    }
    for key, value in changes.items():
        table[key] = {**table[key], **value} if key in ("train", "optim", "model") else value
    return resolve_run(table)


def write_texts(folder: Path) -> None:
    """Sixty short texts of few words."""
    words = ["moon", "let", "reads", "its", "own", "source", "and", "learns", "a", "little", "more", "each", "night"]
    draw = random.Random(0)
    for number in range(60):
        lines = [" ".join(draw.choices(words, k=draw.randint(3, 12))) for _ in range(draw.randint(1, 8))]
        (folder / f"{number}.txt").write_text(f"text {number}\n" + ".\n".join(lines))


def prepare(root: Path) -> Path:
    """Write texts to `root/texts` and the corpus to `root/data`; returns the latter."""
    (root / "texts").mkdir()
    write_texts(root / "texts")
    prepare_corpus(config(root / "texts"), root / "data")
    return root / "data"


class JsonSink:
    """Appends what it is told to `told.jsonl`; kills the run's first process before step `kill_at` is told."""

    def __init__(self, path: Path, kill_at: int | None) -> None:
        self.file, self.kill_at = path.open("a"), kill_at

    def metrics(self, step: int, /, **values: Any) -> None:
        if step == self.kill_at:
            self._kill()
        self._tell({"step": step, **values})

    def event(self, event: str, /, **values: Any) -> None:
        self._tell({"event": event, **values})

    def close(self) -> None:
        self.file.close()

    def _tell(self, line: dict[str, Any]) -> None:
        print(json.dumps(line), file=self.file, flush=True)

    def _kill(self) -> None:
        is_spawned = multiprocessing.parent_process() is not None
        os.kill(os.getppid() if is_spawned else os.getpid(), signal.SIGKILL)
        time.sleep(60)  # a spawned rank dies with its parent


def open_told(run: RunDirectory, config: RunConfig, resume_step: int) -> Sink:
    kill_at = os.environ.get("TINY_RUN_KILL_AT")
    return JsonSink(run.root / "told.jsonl", int(kill_at) if kill_at else None)


def told(root: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (root / "told.jsonl").read_text().splitlines()]


def losses(root: Path) -> dict[int, float]:
    """Loss by step; a step that was trained twice must have had the same loss."""
    found: dict[int, float] = {}
    for line in told(root):
        if line.get("kind") == "train":
            assert found.setdefault(line["step"], line["loss"]) == line["loss"]
    return found


def main() -> None:
    """`python tiny_run.py CONFIG.json RUN resume|fresh`."""
    table, root, how = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    config = resolve_run(json.loads(table.read_text()))
    try:
        pretrain(config, RunDirectory(root), resume=how == "resume", open_sink=open_told)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
