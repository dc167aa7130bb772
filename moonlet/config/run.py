"""What a run is: a recipe in TOML, checked key by key. `moonlet/config/load.py` reads one."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from moonlet.config.model import ModelConfig
from moonlet.config.strict import Strict


class SourceConfig(Strict):
    """One source of documents."""

    name: str
    kind: Literal["stdlib", "text", "jsonl", "parquet", "huggingface", "planted"]
    path: str | None = None  # file, folder or glob; the dataset's name for huggingface
    field: str = "text"  # the column or key that holds the text
    split: str = "train"  # huggingface only
    facts: int = Field(default=4, ge=1)  # planted only: facts for each 256 tokens of a document


class DataConfig(Strict):
    sources: list[SourceConfig] = Field(min_length=1)
    heldout_fraction: float = Field(default=0.05, gt=0, lt=1)  # share of documents held out, by content hash
    exact_dedup: bool = True
    near_dedup: bool = True
    near_threshold: float = Field(default=0.8, gt=0, le=1)  # estimated Jaccard similarity of 5-word shingles
    min_characters: int = Field(default=200, ge=0)
    max_bytes: int | None = Field(default=None, gt=0)  # stop reading a source after so many bytes
    tokenizer: str | None = None  # an existing tokenizer.json; None: train one


class StageConfig(Strict):
    """One stage of the context curriculum."""

    name: str
    seq_len: int = Field(ge=16)  # tokens in a row
    tokens: int = Field(gt=0)  # tokens that this stage trains on
    batch_tokens: int = Field(gt=0)  # tokens in an optimiser step
    mixture: dict[str, float]  # source name -> weight

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.batch_tokens % self.seq_len:
            raise ValueError(f"stage '{self.name}': batch_tokens must be a multiple of seq_len")
        if not self.mixture or any(weight < 0 for weight in self.mixture.values()) or not any(self.mixture.values()):
            raise ValueError(f"stage '{self.name}': mixture needs at least one positive weight and no negative one")
        return self

    @property
    def num_steps(self) -> int:
        return max(1, round(self.tokens / self.batch_tokens))


class OptimConfig(Strict):
    muon_lr: float = Field(default=0.03, gt=0)
    adam_lr: float = Field(default=6e-3, gt=0)
    muon_momentum: float = Field(default=0.95, ge=0, lt=1)
    newton_schulz_steps: int = Field(default=5, gt=0)
    adam_betas: tuple[float, float] = (0.9, 0.95)
    adam_eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.1, ge=0)
    schedule: Literal["cosine", "wsd"] = "cosine"
    warmup_fraction: float = Field(default=0.01, ge=0, lt=1)
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    decay_fraction: float = Field(default=0.2, gt=0, le=1)  # wsd only: the share of steps that decays
    clip_grad_norm: float = Field(default=1.0, gt=0)
    qk_clip_threshold: float | None = Field(default=100.0, gt=0)  # None: off
    groups: dict[str, Literal["muon", "muon_per_head", "adamw"]] = {}  # glob over parameter names -> group, overrides


class BalanceConfig(Strict):
    """Quantile Balancing of the routers."""

    method: Literal["histogram", "exact", "off"] = "histogram"
    bins: int = Field(default=1000, ge=16)


class TrainConfig(Strict):
    micro_batch_tokens: int = Field(default=4096, gt=0)
    num_processes: int = Field(default=1, ge=1)  # data-parallel ranks on this machine, one thread each
    precision: Literal["auto", "fp32", "bf16"] = "auto"  # auto: bf16 where the hardware multiplies it
    activation_checkpointing: bool = False
    loss_chunk_tokens: int = Field(default=1024, gt=0)
    log_every: int = Field(default=10, gt=0)
    heldout_every: int = Field(default=0, ge=0)  # steps between held-out losses; 0: at the end of each stage only
    checkpoint_every: int = Field(default=200, gt=0)
    keep_last: int = Field(default=2, ge=1)  # rolling checkpoints
    keep_every: int = Field(default=0, ge=0)  # permanent ones, by step; 0: only the end of each stage


class EvalConfig(Strict):
    heldout_tokens: int | None = Field(default=None, gt=0)  # None: all of them
    recall_distances: list[int] = []  # tokens between a planted fact and its question
    recall_probes: int = Field(default=100, gt=0)  # at each distance
    prompts: list[str] = []
    sample_tokens: int = Field(default=120, gt=0)
    temperature: float = Field(default=0.8, ge=0)


class RunConfig(Strict):
    name: str
    seed: int = Field(default=0, ge=0)
    model: ModelConfig
    data: DataConfig
    stages: list[StageConfig] = Field(min_length=1)
    optim: OptimConfig = OptimConfig()
    balance: BalanceConfig = BalanceConfig()
    train: TrainConfig = TrainConfig()
    eval: EvalConfig = EvalConfig()

    @model_validator(mode="after")
    def _check(self) -> Self:
        names = [source.name for source in self.data.sources]
        if len(set(names)) != len(names):
            raise ValueError(f"two sources have the same name: {names}")
        stages = [stage.name for stage in self.stages]
        if len(set(stages)) != len(stages):
            raise ValueError(f"two stages have the same name: {stages}")
        for stage in self.stages:
            for name in stage.mixture:
                if name not in names:
                    raise ValueError(
                        f"stage '{stage.name}' mixes a source '{name}' that data.sources does not have {names}"
                    )
            if stage.seq_len > self.model.max_position_embeddings:
                raise ValueError(f"stage '{stage.name}': seq_len exceeds the model's max_position_embeddings")
        return self

    @property
    def num_steps(self) -> int:
        return sum(stage.num_steps for stage in self.stages)
