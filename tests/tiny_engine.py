"""A tiny model, engines over it, and what holds of every answer."""

from __future__ import annotations

import random

import torch

from moonlet.config import resolve_model
from moonlet.model.init import init_weights
from moonlet.model.k3 import K3
from moonlet.ops.backend import kernels
from moonlet.serve.engine import Engine, EngineConfig
from moonlet.serve.scheduler import SchedulerConfig
from moonlet.serve.sequence import Request
from moonlet.serve.state_store import StateStore

VOCAB, BLOCK, PAGE = 200, 8, 32


def tiny_model(seed: int = 0) -> K3:
    model = K3(
        resolve_model(
            {"preset": "nano", "vocab_size": VOCAB, "pad_token_id": VOCAB - 1, "eos_token_id": 1, "bos_token_id": 0}
        )
    )
    init_weights(model, seed)
    return model.eval()


def engine(model: K3, mode: str = "replay", **changes) -> Engine:
    schedule = {"prefill_piece": 32, "prefill_budget": 64, **changes.pop("schedule", {})}
    sizes = {"num_pages": 64, "page_rows": PAGE, "hash_block": BLOCK, **changes}
    return Engine(model, EngineConfig(mode=mode, scheduler=SchedulerConfig(**schedule), **sizes))


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(2, VOCAB - 1), k=length)


def check_against_plain(model: K3, request: Request, completion, atol: float = 0.0) -> None:
    """Log-probabilities are those of one plain forward pass over prompt and answer."""
    length = len(request.ids) + len(completion.ids)
    ids = torch.tensor([[*request.ids, *completion.ids, 0, 0, 0]])  # fewer than 4 rows take another path
    with torch.inference_mode():
        logits = model(ids)[0, len(request.ids) - 1 : length - 1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(completion.ids).unsqueeze(1)).squeeze(1)
    got = torch.tensor(completion.logprobs)
    if kernels() != "native":
        atol = 1e-5
    assert torch.allclose(got, expected, atol=atol, rtol=0), (got - expected).abs().max()


def check_empty(served: Engine) -> None:
    """Nothing runs: every page is free or the cache's alone."""
    assert not served.has_work
    held = {node.page for node in served.cache.nodes.values()}
    assert served.pool.num_free == served.config.num_pages - 1 - len(held)
    for page in held:
        assert served.pool.references(page) == sum(node.page == page for node in served.cache.nodes.values())


def engine_over(model: K3, store: StateStore, mode: str = "replay", **changes) -> Engine:
    """An engine with an external store."""
    return Engine(model, engine(model, mode, **changes).config, store=store)
