"""B45: training and decoding agree at far positions, also after the window has changed between stages."""

from pathlib import Path
from typing import Any

import torch

from moonlet.data.batches import BatchStream
from moonlet.data.corpus import Corpus
from moonlet.train.step import train_step

POSITIONS = (0, 2047, 8191)


def test_train_forward_equals_decoding_after_a_stage_change(recipe: Any, parts: Any, corpus_folder: Path):
    config = recipe()
    built, corpus = parts(config), Corpus(corpus_folder)
    for step, stage in enumerate(config.stages):
        train_step(built, BatchStream(corpus, stage, config.seed).next_rows(), step + 1, 0.5)
    model, length = built.model, POSITIONS[-1] + 1
    ids = torch.randint(0, 300, (1, length), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        trained = model.train()(ids, seq_lens=(length,))[0, list(POSITIONS)]
        model.eval()
        state, start = model.new_state(1), 0
        for place, position in enumerate(POSITIONS):
            if position > start:
                model(ids[:, start:position], state=state)  # prefill up to the token before
            decoded = model(ids[:, position : position + 1], state=state)[0, -1]
            start = position + 1
            torch.testing.assert_close(decoded, trained[place], atol=1e-5, rtol=0)
