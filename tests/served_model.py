"""A tiny model with a tokenizer of its own, served on a free loopback port, and OpenAI's client for it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import openai
from tiny_engine import engine

from moonlet.cli.serve import listen
from moonlet.config import resolve_model
from moonlet.model.init import init_weights
from moonlet.model.k3 import K3
from moonlet.serve.engine_thread import EngineThread
from moonlet.serve.openai import ServeConfig, build_app
from moonlet.text.tokenizer import Tokenizer, train_tokenizer

VOCAB = 320


def small_tokenizer() -> Tokenizer:
    return train_tokenizer(["the moon is a small cold world that the sun lights from one side"] * 8, VOCAB)


def small_model(tokenizer: Tokenizer, seed: int = 0) -> K3:
    names = {"pad_token_id": "[PAD]", "bos_token_id": "[BOS]", "eos_token_id": "[EOS]"}
    ids = {key: tokenizer.special_id(name) for key, name in names.items()}
    model = K3(resolve_model({"preset": "nano", "vocab_size": VOCAB, **ids}))
    init_weights(model, seed)
    return model.eval()


@dataclass
class Served:
    thread: EngineThread
    tokenizer: Tokenizer
    url: str

    def client(self, key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0)

    def in_engine(self, job):
        return self.thread.call(job).result()


@contextmanager
def serving(model: K3, tokenizer: Tokenizer, config: ServeConfig | None = None, **changes) -> Iterator[Served]:
    import uvicorn

    listener = listen("127.0.0.1", 0)
    with EngineThread(engine(model, "replay", **changes)) as thread:
        settings = uvicorn.Config(
            build_app(thread, tokenizer, config or ServeConfig()),
            lifespan="off",
            http="h11",
            log_level="warning",
            access_log=False,
        )
        server = uvicorn.Server(settings)
        running = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        running.start()
        try:
            yield Served(thread, tokenizer, f"http://127.0.0.1:{listener.getsockname()[1]}")
        finally:
            server.should_exit = True
            running.join()
            listener.close()
