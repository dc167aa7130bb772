"""All measurements of a run: eval/heldout.json, recall.json, samples.json and depth.json in its directory."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moonlet.config import EvalConfig, RunConfig, StageConfig
from moonlet.data.corpus import Corpus
from moonlet.errors import CheckpointError, StorageError
from moonlet.eval.depth import depth_attention
from moonlet.eval.perplexity import choose_heldout, compressors, heldout_bits_per_byte
from moonlet.eval.recall import RecallPlan, recall_by_distance
from moonlet.eval.samples import Sampling, draw_sample
from moonlet.model.k3 import K3
from moonlet.report.console import Phase
from moonlet.report.metrics import plain_values, read_metrics
from moonlet.text.tokenizer import Tokenizer
from moonlet.train.restore import find_checkpoint, load_model_for_inference
from moonlet.train.stages import find_place

DEPTH_DOCUMENTS = 4  # held-out documents behind the depth figures, the start of each


@dataclass(frozen=True)
class Subject:
    """What is measured: a trained model with its run, at optimiser step `step`."""

    run: Path
    config: RunConfig
    model: K3
    tokenizer: Tokenizer
    corpus: Corpus
    step: int

    @property
    def stage(self) -> StageConfig:
        """The stage that the last step belongs to."""
        return self.config.stages[find_place(self.config, max(0, self.step - 1)).index]


def load_subject(run: Path, settings: EvalConfig | None = None) -> Subject:
    """The newest complete checkpoint of a run directory (or the checkpoint folder named), with the run's corpus.

    Raises:
        DataError: the corpus is missing or damaged.
        CheckpointError: there is no complete checkpoint, or it cannot be used, or it has another tokenizer.
    """
    checkpoint = find_checkpoint(run)
    model, config, tokenizer = load_model_for_inference(checkpoint)
    run = checkpoint.parents[1]
    corpus = Corpus(run / "data")
    if corpus.tokenizer.hash != tokenizer.hash:
        raise CheckpointError(
            f"'{corpus.folder}' was written with another tokenizer than the one that '{checkpoint}' was trained with"
        )
    if settings is not None:
        config = config.model_copy(update={"eval": settings})
    return Subject(run, config, model, tokenizer, corpus, int(checkpoint.name.removeprefix("step_")))


def stage_lines(
    model: K3, corpus: Corpus, stage: StageConfig, is_over: bool, *, max_tokens: int | None = None
) -> list[dict[str, Any]]:
    """What training records of a stage: its held-out score, and the depth attention where it is over.

    For `train.pretrain(measure=...)`; the score is the one of `measure_heldout`, at the window of the stage.
    """
    score = heldout_bits_per_byte(model, corpus, seq_len=stage.seq_len, max_tokens=max_tokens)
    lines = [{"kind": "heldout", "bits_per_byte": score.bits_per_byte, "loss": score.nats_per_token}]
    if is_over and (depth := _depth(model, corpus))["sites"]:
        lines.append({"kind": "depth", **depth})
    return lines


def measure_run(
    run: Path, distances: Sequence[int] | None = None, settings: EvalConfig | None = None
) -> dict[str, Any]:
    """Measure a run and write eval/*.json. Returns the contents by file stem.

    Args:
        settings: instead of the [eval] of the recipe in the checkpoint.
        distances: of the recall, instead of the recipe's.

    Raises:
        MoonletError: as `load_subject`; StorageError where a file cannot be written.
    """
    subject = load_subject(run, settings)
    pieces = {
        "heldout": measure_heldout(subject),
        "depth": measure_depth(subject),
        "samples": measure_samples(subject),
    }
    if chosen := subject.config.eval.recall_distances if distances is None else distances:
        pieces["recall"] = measure_recall(subject, chosen)
    return pieces


def measure_heldout(subject: Subject) -> dict[str, Any]:
    documents, settings = choose_heldout(subject.corpus, subject.config.eval.heldout_tokens), subject.config.eval
    with Phase("held-out text", sum(len(document.tokens) for document in documents), "tokens") as phase:
        score = heldout_bits_per_byte(
            subject.model,
            subject.corpus,
            seq_len=subject.stage.seq_len,
            max_tokens=settings.heldout_tokens,
            progress=phase,
        )
    rivals = compressors(b"".join(document.text.encode() for document in documents))
    found = {
        "step": subject.step,
        **asdict(score),
        "documents": len(documents),
        "compressors": rivals,
        "by_stage": _by_stage(subject.run),
    }
    return _save(subject.run, "heldout", found)


def measure_recall(subject: Subject, distances: Sequence[int]) -> dict[str, Any]:
    text = np.concatenate([document.tokens for document in subject.corpus.heldout] or [np.zeros(0, dtype=np.int64)])
    plan = RecallPlan(distances, subject.config.eval.recall_probes, subject.config.seed)
    with Phase("recall", len(set(distances)) * plan.probes, "questions") as phase:
        found = recall_by_distance(subject.model, subject.tokenizer, text, plan, phase)
    return _save(subject.run, "recall", {"step": subject.step, **found})


def measure_samples(subject: Subject) -> list[dict[str, Any]]:
    settings = subject.config.eval
    is_python = any(source.kind == "stdlib" for source in subject.config.data.sources)
    samples = []
    with Phase("samples", len(settings.prompts), "prompts") as phase:
        for index, prompt in enumerate(settings.prompts):
            sample = draw_sample(
                subject.model,
                subject.tokenizer,
                prompt,
                max_tokens=settings.sample_tokens,
                sampling=Sampling(settings.temperature, subject.config.seed + index),
                is_python=is_python,
            )
            samples.append(asdict(sample))
            phase(len(samples))
    return _save(subject.run, "samples", samples)


def measure_depth(subject: Subject) -> dict[str, Any]:
    return _save(subject.run, "depth", {"step": subject.step, **_depth(subject.model, subject.corpus)})


def _depth(model: K3, corpus: Corpus) -> dict[str, Any]:
    documents = [torch.from_numpy(document.tokens) for document in corpus.heldout[:DEPTH_DOCUMENTS]]
    return depth_attention(model, documents)


def _by_stage(run: Path) -> list[dict[str, Any]]:
    """The last held-out score that training recorded in each stage."""
    scores = {line.get("stage"): line.get("bits_per_byte") for line in read_metrics(run, "heldout")}
    return [{"stage": stage, "bits_per_byte": bits} for stage, bits in scores.items()]


def _save(run: Path, stem: str, found: Any) -> Any:
    """Write eval/STEM.json in one move. Returns `found`. Raises StorageError where it cannot be written."""
    path = run / "eval" / f"{stem}.json"
    draft = path.with_suffix(".draft")
    try:
        path.parent.mkdir(exist_ok=True)
        draft.write_text(json.dumps(plain_values(found), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        os.replace(draft, path)
    except OSError as error:
        raise StorageError(f"cannot write '{path}': {error.strerror}; free some space and measure again") from error
    return found
