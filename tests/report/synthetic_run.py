"""A run directory in the formats of a real one, with invented numbers: for tests and for looking at the report."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

from moonlet.config import dump_toml, resolve_run
from moonlet.config.run import RunConfig
from moonlet.report.metrics import MetricsLog

_STAGES = (("short", 256, 2_000_000), ("middle", 1024, 900_000), ("long", 4096, 450_000))
_LAYERS, _EXPERTS, _BATCH = 4, 16, 4096
_SAMPLES = [
    {
        "prompt": "def read_lines(",
        "text": "path):\n    with open(path) as f:\n        return f.readlines()\n",
        "parses": True,
    },
    {"prompt": '"""Parse <b>HTML</b> & such', "text": ' of a file."""\nimport re\n\nclass Parser(\n', "parses": False},
    {"prompt": "# zebra = 7\n# zebra ? ", "text": "7\n", "parses": None},
]


def synthetic_config() -> RunConfig:
    stages = [
        {"name": name, "seq_len": window, "tokens": tokens, "batch_tokens": _BATCH, "mixture": {"stdlib": 1.0}}
        for name, window, tokens in _STAGES
    ]
    source = {"name": "stdlib", "kind": "stdlib"}
    table = {"name": "laptop", "seed": 7, "model": {"preset": "nano"}, "data": {"sources": [source]}, "stages": stages}
    return resolve_run({**table, "eval": {"recall_distances": [64, 256, 1024, 2048, 3500], "prompts": ["def "]}})


def write_synthetic_run(folder: Path, share: float = 1.0) -> Path:
    """A run that came as far as `share` of its steps; evaluation and the event `done` exist only at 1.0."""
    config = synthetic_config()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.resolved.toml").write_text(dump_toml(config))
    rng = random.Random(3)
    last = int(share * config.num_steps)
    with MetricsLog(folder) as log:
        log.event(
            "start", parameters=2_012_345, active_parameters=1_234_567, kernels="native", processes=2, precision="fp32"
        )
        step = 0
        for name, _, tokens in _STAGES:
            log.event("stage", name=name, step=step)
            for _ in range(round(tokens / _BATCH)):
                step += 1
                if step > last:
                    return folder
                if step % 5 == 0 or step == 1:
                    _write_train_line(log, rng, step, name, config.num_steps)
            _write_stage_end(log, rng, step, name)
        log.event("warning", message="2 files were not UTF-8 and were passed over")
        log.event("done")
    _write_evaluation(folder)
    _stretch_time(folder / "events.jsonl")
    return folder


def _write_train_line(log: MetricsLog, rng: random.Random, step: int, stage: str, total: int) -> None:
    done = step / total
    loss = 3.0 + 4.6 * math.exp(-step / 40) - 0.9 * done + rng.gauss(0, 0.08)
    speed = {"short": 9000, "middle": 7800, "long": 6100}[stage] * rng.uniform(0.9, 1.05)
    decay = 0.5 * (1 + math.cos(math.pi * done))
    values = {
        "stage": stage,
        "tokens": step * _BATCH,
        "loss": loss,
        "lr": 6e-3 * min(1, step / 8) * decay,
        "muon_lr": 3e-2 * min(1, step / 8) * decay,
        "grad_norm": 0.4 + 3 * math.exp(-step / 15) + abs(rng.gauss(0, 0.08)),
        "tokens_per_s": speed,
        "seconds": step * _BATCH / speed,
        "max_violation": {
            f"model.layers.{layer}": 0.12 + 9 * math.exp(-step / 6) + abs(rng.gauss(0, 0.05))
            for layer in range(1, _LAYERS)
        },
        "grad_norm_by_layer": [0.3 / (1 + 0.2 * layer) + rng.uniform(0, 0.05) for layer in range(_LAYERS)],
        "qk_max_logit": 8 + 20 * done + rng.gauss(0, 1),
    }
    if step == 1 or step % 100 == 0:
        values["expert_load"] = {
            name: [round(1024 * math.exp(rng.gauss(0, 0.12 + 1.2 * math.exp(-step / 30)))) for _ in range(_EXPERTS)]
            for name in values["max_violation"]
        }
    log.metrics(step, kind="train", **values)


def _write_stage_end(log: MetricsLog, rng: random.Random, step: int, stage: str) -> None:
    bits = {"short": 1.78, "middle": 1.67, "long": 1.61}[stage]
    log.metrics(step, kind="heldout", stage=stage, tokens=step * _BATCH, bits_per_byte=bits, loss=bits * 1.36)
    sites = [f"layer{layer}.pre_{kind}" for layer in range(_LAYERS) for kind in ("attn", "ffn")]
    weights: list[list[float | None]] = []
    for index in range(len(sites) + 1):
        raw = [rng.random() ** 2 + 0.02 for _ in range(2 + index // 4)]
        weights.append([value / sum(raw) for value in raw])
    log.metrics(step, kind="depth", stage=stage, sites=[*sites, "output"], weights=weights)
    log.event("checkpoint", step=step)


def _write_evaluation(folder: Path) -> None:
    heldout = {
        "bits_per_byte": 1.612,
        "nats_per_token": 2.19,
        "tokens": 410_000,
        "bytes": 801_234,
        "compressors": {"xz": 1.713, "bz2": 1.709, "gzip": 1.981},
        "by_stage": [{"stage": "short", "bits_per_byte": 1.78}],
    }
    distances, accuracy = [64, 256, 1024, 2048, 3500], [0.98, 0.93, 0.71, 0.52, 0.34]
    recall = {
        "chance": 0.1,
        "probes": 200,
        "distances": distances,
        "accuracy": accuracy,
        "low": [max(0, share - 0.06) for share in accuracy],
        "high": [min(1, share + 0.06) for share in accuracy],
    }
    (folder / "eval").mkdir(exist_ok=True)
    for name, value in (("heldout", heldout), ("recall", recall), ("samples", _SAMPLES)):
        (folder / "eval" / f"{name}.json").write_text(json.dumps(value))


def _stretch_time(path: Path) -> None:
    """Events a minute apart, as in a real run."""
    events = [json.loads(line) for line in path.read_text().splitlines()]
    lines = [json.dumps({**event, "time": 1_750_000_000 + 62 * index}) for index, event in enumerate(events)]
    path.write_text("\n".join(lines) + "\n")
