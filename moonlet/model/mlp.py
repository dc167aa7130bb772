"""The gated MLP of the dense layer and of the shared experts."""

from __future__ import annotations

from torch import Tensor, nn

from moonlet.config import ModelConfig
from moonlet.model.norm import linear
from moonlet.ops.situ import situ_glu, situ_glu_packed, swiglu


def glu(config: ModelConfig, gate: Tensor, up: Tensor) -> Tensor:
    """The model's gated activation: SiTU-GLU in K3, SwiGLU in Kimi Linear."""
    if config.hidden_act == "silu":
        return swiglu(gate, up)
    assert config.activation_situ_beta is not None and config.activation_situ_linear_beta is not None
    return situ_glu(gate, up, config.activation_situ_beta, config.activation_situ_linear_beta)


def glu_packed(config: ModelConfig, gate_up: Tensor) -> Tensor:
    """`glu` of the two halves of one product [..., 2I], gate first."""
    if config.hidden_act == "silu":
        return swiglu(*gate_up.chunk(2, dim=-1))
    assert config.activation_situ_beta is not None and config.activation_situ_linear_beta is not None
    return situ_glu_packed(gate_up, config.activation_situ_beta, config.activation_situ_linear_beta)


class MLP(nn.Module):
    """down(glu(gate(x), up(x)))."""

    def __init__(self, config: ModelConfig, inner: int) -> None:
        super().__init__()
        self.config = config
        self.gate_proj = linear(config.hidden_size, inner)
        self.up_proj = linear(config.hidden_size, inner)
        self.down_proj = linear(inner, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(glu(self.config, self.gate_proj(x), self.up_proj(x)))
