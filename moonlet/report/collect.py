"""The figures of a run, gathered from its directory: what `results.json` holds and what the report draws.

Every piece may be absent, because a run may have crashed at any point; each absence is named in `missing`.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

from moonlet.config import RunConfig, resolve_run
from moonlet.errors import ConfigError, DataError
from moonlet.report.metrics import EVENTS_FILE, METRICS_FILE, plain_values, read_events, read_metrics

FORMAT = 1
CONFIG_FILE = "config.resolved.toml"

_TRAIN_COLUMNS = tuple(
    ["step", "stage", "tokens", "loss", "lr", "muon_lr", "grad_norm", "tokens_per_s", "seconds", "qk_max_logit"]
)
_HELDOUT_COLUMNS = ("step", "stage", "tokens", "loss", "bits_per_byte")

Table = dict[str, Any]


def collect_results(run_dir: Path) -> Table:
    """Everything that can be said about a run, as plain JSON values.

    Keys: format, run, headline, stages, train, heldout (columns), experts, depth, gradient_by_depth, recall, samples,
    config, missing.

    Raises DataError when `run_dir` is no run directory.
    """
    if not any((run_dir / name).exists() for name in (CONFIG_FILE, METRICS_FILE, EVENTS_FILE, "eval")):
        known = f"none of {CONFIG_FILE}, {METRICS_FILE}, {EVENTS_FILE}, eval/ is there"
        raise DataError(f"'{run_dir}' is not a run directory: {known}; name a folder that moonlet run made")
    missing: list[str] = []
    config, recipe = _read_config(run_dir, missing)
    lines = read_metrics(run_dir)
    train = [line for line in lines if line.get("kind") == "train"]
    heldout = [line for line in lines if line.get("kind") == "heldout"]
    if not train:
        missing.append(f"training figures: {METRICS_FILE} has no training line; the run stopped before its first one")
    evaluation = _evaluation(run_dir, recipe, missing)
    stages = _stages(train, heldout, recipe)
    results = {
        "format": FORMAT,
        "run": _run_facts(run_dir, train, heldout, recipe),
        "headline": _headline(train, heldout, evaluation["heldout"], evaluation["recall"]),
        "stages": stages,
        "train": _columns(train, _TRAIN_COLUMNS),
        "heldout": _columns(heldout, _HELDOUT_COLUMNS),
        "experts": _experts(train, missing),
        "depth": _depth(lines, recipe, missing),
        "gradient_by_depth": _gradient_by_depth(train),
        "recall": evaluation["recall"],
        "samples": evaluation["samples"] or [],
        "config": config,
        "missing": missing,
    }
    return plain_values(results)


def _read_config(run_dir: Path, missing: list[str]) -> tuple[Table | None, RunConfig | None]:
    """The resolved configuration as a table, and parsed where this version understands it."""
    path = run_dir / CONFIG_FILE
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        missing.append(f"configuration: {CONFIG_FILE} cannot be read ({_reason(error)})")
        return None, None
    try:
        return table, resolve_run(table)
    except ConfigError as error:
        missing.append(f"configuration: {CONFIG_FILE} is not of this version ({error})")
        return table, None


def _read_json(path: Path, missing: list[str]) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        missing.append(f"evaluation: there is no {path.name} yet; moonlet eval writes it")
    except (OSError, ValueError) as error:
        missing.append(f"evaluation: {path.name} cannot be read ({_reason(error)}); moonlet eval writes it anew")
    return None


def _evaluation(run_dir: Path, recipe: RunConfig | None, missing: list[str]) -> Table:
    """Contents of eval/*.json by stem; None for what is absent, which is a lack only if the recipe asks for it."""
    asked = {"heldout": True, "recall": True, "samples": True}
    if recipe is not None:
        asked |= {"recall": bool(recipe.eval.recall_distances), "samples": bool(recipe.eval.prompts)}
    paths = {name: run_dir / "eval" / f"{name}.json" for name in asked}
    return {name: _read_json(path, missing) if asked[name] or path.exists() else None for name, path in paths.items()}


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def _columns(lines: list[Table], names: tuple[str, ...]) -> Table:
    """Lines turned into columns; a name that no line has is left out."""
    return {name: [line.get(name) for line in lines] for name in names if any(name in line for line in lines)}


def _largest(lines: list[Table], name: str) -> Any:
    """The largest value under `name`; None where no line has it."""
    return max((line[name] for line in lines if line.get(name) is not None), default=None)


def _run_facts(run_dir: Path, train: list[Table], heldout: list[Table], recipe: RunConfig | None) -> Table:
    events = read_events(run_dir)
    last = train[-1] if train else {}
    reached = [*train, *heldout]
    times = [event["time"] for event in events if isinstance(event.get("time"), int | float)]
    start = next((event for event in events if event.get("event") == "start"), {})
    return {
        "name": recipe.name if recipe else run_dir.resolve().name,
        "folder": run_dir.resolve().name,
        "status": "finished" if events and events[-1].get("event") == "done" else "unfinished",
        "seed": recipe.seed if recipe else None,
        "step": _largest(reached, "step") or 0,
        "total_steps": recipe.num_steps if recipe else None,
        "tokens": _largest(reached, "tokens") or 0,
        "training_seconds": last.get("seconds"),
        "started": times[0] if times else None,
        "ended": times[-1] if times else None,
        "resumes": sum(event.get("event") == "resume" for event in events),
        "warnings": [str(event.get("message", event)) for event in events if event.get("event") == "warning"],
        "facts": {key: value for key, value in start.items() if key not in ("time", "event")},
    }


def _headline(train: list[Table], heldout: list[Table], evaluation: Any, recall: Any) -> Table:
    """The numbers that a reader looks for first; None where the run has not come that far."""
    evaluation = evaluation or {}
    rates = [line["tokens_per_s"] for line in train if line.get("tokens_per_s")]
    headline: Table = {
        "bits_per_byte": evaluation.get("bits_per_byte"),
        "compressors": evaluation.get("compressors", {}),
        "heldout_tokens": evaluation.get("tokens"),
        "heldout_bytes": evaluation.get("bytes"),
        "train_loss": train[-1].get("loss") if train else None,
        "tokens_per_s": sorted(rates)[len(rates) // 2] if rates else None,
        "recall": None,
    }
    if headline["bits_per_byte"] is None and heldout:
        headline["bits_per_byte"] = heldout[-1].get("bits_per_byte")
    if recall and recall.get("distances"):
        headline["recall"] = {"distance": recall["distances"][-1], "accuracy": recall["accuracy"][-1]}
    return headline


def _stages(train: list[Table], heldout: list[Table], recipe: RunConfig | None) -> list[Table]:
    """Stages in the order planned, those reached with their span in steps and tokens."""
    planned = list(recipe.stages) if recipe else []
    reached = list(dict.fromkeys(line["stage"] for line in train if "stage" in line))
    names = [stage.name for stage in planned] or reached
    start_tokens, stages = 0, []
    for position, name in enumerate(names):
        lines = [line for line in train if line.get("stage") == name]
        ends = [line for line in heldout if line.get("stage") == name]
        last_tokens = _largest([*lines, *ends], "tokens")
        stage = {"name": name, "first_tokens": start_tokens, "last_tokens": last_tokens}
        stage["last_step"] = _largest([*lines, *ends], "step")
        stage["bits_per_byte"] = ends[-1].get("bits_per_byte") if ends else None
        stage["seq_len"] = planned[position].seq_len if planned else None
        stage["planned_tokens"] = planned[position].tokens if planned else None
        stages.append(stage)
        start_tokens = last_tokens if last_tokens is not None else start_tokens
    return stages


def _experts(train: list[Table], missing: list[str]) -> Table:
    """Largest violation of each router by step, and the tokens of each expert at the steps where they were logged."""
    lines = [line for line in train if line.get("max_violation")]
    routers = list(dict.fromkeys(name for line in lines for name in line["max_violation"]))
    loads = [{"step": line.get("step"), "routers": line["expert_load"]} for line in train if line.get("expert_load")]
    if lines and not loads:
        missing.append("expert load: no line has the tokens of each expert yet")
    return {
        "step": [line.get("step") for line in lines],
        "tokens": [line.get("tokens") for line in lines],
        "max_violation": {name: [line["max_violation"].get(name) for line in lines] for name in routers},
        "load": loads,
    }


def _depth(lines: list[Table], recipe: RunConfig | None, missing: list[str]) -> list[Table]:
    """Depth attention at the end of each stage: how much each site reads from each source."""
    found = []
    for line in lines:
        if line.get("kind") == "depth" and line.get("sites") and line.get("weights"):
            found.append({key: line.get(key) for key in ("step", "stage", "sites", "sources", "weights")})
    has_mixes = recipe is None or recipe.model.attn_res_block_size is not None
    if has_mixes and not found:
        missing.append("depth attention: it is measured at the end of each stage, and no stage has ended")
    return found


def _gradient_by_depth(train: list[Table]) -> Table:
    lines = [line for line in train if line.get("grad_norm_by_layer")]
    return {
        "step": [line.get("step") for line in lines],
        "norms": [line["grad_norm_by_layer"] for line in lines],
    }
