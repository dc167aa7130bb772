"""A model without weights: memory of the right shapes and types on any device, none of it initialised."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from moonlet.config import ModelConfig, VisionConfig
from moonlet.errors import ConfigError
from moonlet.model.hf_layout import TEXT_PREFIX, layout
from moonlet.model.k3 import K3
from moonlet.model.multimodal import K3Multimodal


class _SkipInit(TorchFunctionMode):
    """Leaves out `torch.nn.init`: the values are about to be overwritten, and on the meta device there are none."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__module__", None) == torch.nn.init.__name__:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


def build_empty(
    config: ModelConfig,
    vision: VisionConfig | None = None,
    media_token_id: int | None = None,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> K3 | K3Multimodal:
    """A model whose every weight must be filled; those that are released as F32 stay float32 in any `dtype`.

    Raises:
        ConfigError: there is a vision half, but no id of its placeholder token.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device), _SkipInit():
            model = _build(config, vision, media_token_id)
    finally:
        torch.set_default_dtype(before)
    _keep_float32(model, config)
    return model


def _build(config: ModelConfig, vision: VisionConfig | None, media_token_id: int | None) -> K3 | K3Multimodal:
    if vision is None:
        return K3(config)
    if media_token_id is None:
        raise ConfigError("a model with vision needs media_placeholder_token_id")
    return K3Multimodal(config, vision, media_token_id)


def tensors_of(model: K3 | K3Multimodal) -> dict[str, torch.Tensor]:
    """Everything that a checkpoint holds, by name; text names start with `language_model.` whatever the model is."""
    prefix = TEXT_PREFIX if isinstance(model, K3) else ""
    named = dict(model.named_parameters()) | dict(model.named_buffers())
    return {prefix + name: value for name, value in named.items()}


def _keep_float32(model: K3 | K3Multimodal, config: ModelConfig) -> None:
    tensors = tensors_of(model)
    for entry in layout(config):
        if entry.dtype == "F32":
            for weight in entry.weights():
                tensor = tensors[TEXT_PREFIX + weight.parameter]
                tensor.data = tensor.data.float()
