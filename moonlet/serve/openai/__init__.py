"""The engine behind OpenAI's API, and behind what reinforcement learning needs beside it."""

from moonlet.serve.openai.app import build_app
from moonlet.serve.openai.service import ServeConfig

__all__ = ["ServeConfig", "build_app"]
