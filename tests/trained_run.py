"""A whole run that takes seconds: a corpus of prose and planted facts, a tiny model, a few optimiser steps."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path

import tiny_run

from moonlet.cli.progress import open_sink
from moonlet.config import RunConfig
from moonlet.data.corpus import prepare_corpus
from moonlet.eval.measure import stage_lines
from moonlet.train.pretrain import pretrain
from moonlet.train.rundir import open_run

SENTENCE = (
    "about above after again along among apart begin below bring build carry cause chase class clean clear close cloud "
    "crane dance dream"
)
VOCAB = 420
MAX_POSITIONS = 160


def recipe(texts: Path) -> RunConfig:
    """Two stages of three steps, then an evaluation of every kind."""
    return tiny_run.config(
        texts,
        data={
            "sources": [{"name": "text", "kind": "text", "path": str(texts)}, {"name": "planted", "kind": "planted"}],
            "min_characters": 10,
            "heldout_fraction": 0.2,
        },
        stages=[
            {"name": "short", "seq_len": 64, "tokens": 768, "batch_tokens": 256, "mixture": {"text": 1, "planted": 1}},
            {"name": "long", "seq_len": 128, "tokens": 768, "batch_tokens": 256, "mixture": {"text": 1, "planted": 1}},
        ],
        model={
            "vocab_size": VOCAB,
            "pad_token_id": VOCAB - 1,
            "bos_token_id": VOCAB - 16,
            "eos_token_id": VOCAB - 14,
            "max_position_embeddings": MAX_POSITIONS,
        },
        eval={
            "recall_distances": [20, 60],
            "recall_probes": 12,
            "prompts": ["about ", "x = 1\n"],
            "sample_tokens": 6,
        },
    )


def make(root: Path) -> Path:
    """Write texts, prepare, train; returns the run directory."""
    draw = random.Random(0)
    (root / "texts").mkdir()
    for number in range(50):
        lines = [" ".join(draw.choices(SENTENCE.split(), k=draw.randint(3, 30))) for _ in range(draw.randint(1, 12))]
        (root / "texts" / f"{number}.txt").write_text(f"text {number} \u00fc\n " + ".\n ".join(lines))
    config = recipe(root / "texts")
    with open_run(root / "run", config) as directory:
        prepare_corpus(config, directory.data, config.seed)
        pretrain(config, directory, open_sink=open_sink, measure=partial(stage_lines, max_tokens=None))
    return root / "run"
