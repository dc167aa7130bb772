"""From a checkpoint back to a model, and what is refused on the way."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from train_tasks import first_rows

from moonlet.data.corpus import Corpus
from moonlet.errors import CheckpointError, NoCheckpointError
from moonlet.train.checkpoint import Checkpoint, save_checkpoint
from moonlet.train.loop import Run, run_checkpoint
from moonlet.train.restore import changed_keys, check_belongs, load_model_for_inference, load_weights
from moonlet.train.rundir import RunDirectory
from moonlet.train.step import train_step


@pytest.fixture
def trained(recipe: Any, parts: Any, corpus_folder: Path) -> tuple[Run, Checkpoint]:
    """A run after one step, and its checkpoint."""
    config = recipe()
    built = parts(config)
    train_step(built, first_rows(config, corpus_folder), 1, 1.0)
    run = Run(built, Corpus(corpus_folder), RunDirectory(corpus_folder), None, None, data_state={}, step=1)  # type: ignore[arg-type]
    return run, run_checkpoint(run)


def test_the_model_comes_back_from_a_run_or_a_checkpoint(trained: tuple[Run, Checkpoint], tmp_path: Path):
    run, checkpoint = trained
    path = save_checkpoint(tmp_path / "checkpoints", checkpoint)
    ids = torch.randint(0, 300, (1, 20))
    expected = run.parts.model.eval()(ids)
    for place in (tmp_path, path):
        model, config, tokenizer = load_model_for_inference(place)
        assert not model.training
        assert config == run.parts.config
        assert tokenizer.hash == run.corpus.tokenizer.hash
        assert torch.equal(model(ids), expected)
        assert torch.equal(
            model.routers()["model.layers.2"].e_score_correction_bias,
            run.parts.model.routers()["model.layers.2"].e_score_correction_bias,
        )


def test_a_checkpoint_with_another_tokenizer_beside_it(trained: tuple[Run, Checkpoint], tmp_path: Path):
    _, checkpoint = trained
    other = replace(checkpoint, tokenizer=checkpoint.tokenizer.replace(b"\n", b" ") + b"\n")
    save_checkpoint(tmp_path / "checkpoints", other)
    with pytest.raises(CheckpointError, match="tokenizer"):
        load_model_for_inference(tmp_path)


def test_nothing_there(tmp_path: Path):
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(NoCheckpointError):
            load_model_for_inference(path)
    with pytest.raises(CheckpointError, match="does not exist"):
        load_model_for_inference(tmp_path / "checkpoints" / "step_5")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: model.pop("model.norm.weight"), r"missing 'model\.norm\.weight'"),
        (lambda model: model.update(extra=torch.zeros(1)), "unexpected 'extra'"),
        (
            lambda model: model.update({"lm_head.weight": torch.zeros(3, 2)}),
            r"'lm_head\.weight' has shape \(3, 2\) instead",
        ),
    ],
)
def test_weights_that_do_not_fit_are_listed(trained: tuple[Run, Checkpoint], parts: Any, change: Any, message: str):
    saved = dict(trained[1].model)
    change(saved)
    model = parts().model
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=message):
        load_weights(model, saved)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_what_a_resumed_run_may_change(trained: tuple[Run, Checkpoint], recipe: Any):
    run, checkpoint = trained
    good = run.corpus.tokenizer.hash
    assert check_belongs(checkpoint, recipe(), good) == []
    assert check_belongs(checkpoint, recipe(train={"log_every": 3}, seed=5), good) == ["seed", "train.log_every"]
    with pytest.raises(CheckpointError, match="another tokenizer"):
        check_belongs(checkpoint, recipe(), "0" * 64)
    with pytest.raises(CheckpointError, match=r"model\.activation_situ_beta changed"):
        check_belongs(checkpoint, recipe(model={"activation_situ_beta": 3.0}), good)


def test_changed_keys_are_dotted_paths():
    before = {"a": 1, "b": {"c": [1, {"d": 2}], "e": 0}, "gone": 1}
    after = {"a": 1, "b": {"c": [1, {"d": 3}], "e": None}, "new": [1]}
    assert changed_keys(before, after) == ["b.c.1.d", "b.e", "gone", "new"]
    assert changed_keys([1, 2], [1]) == [""]
