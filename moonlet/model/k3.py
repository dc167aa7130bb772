"""The K3 text model (k3_model.md section 1). Its parameters carry the released names; only experts are stacked.

B sequences, T tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moonlet.config import ModelConfig
from moonlet.model.attn_residuals import BlockAttentionResiduals, DepthTrace, PlainResiduals, ResidualStream, make_site
from moonlet.model.block import DecoderLayer
from moonlet.model.latent_moe import LatentMoE
from moonlet.model.norm import RMSNorm, linear
from moonlet.model.padding import repad, unpad
from moonlet.model.router import Router
from moonlet.model.state import DecodeState
from moonlet.ops.backend import kernels

SeqLens = tuple[int, ...] | None


class Decoder(nn.Module):
    """Embedding, layers, final norm: the part of the released tree under `model.`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id)
        self.layers = nn.ModuleList(DecoderLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if config.attn_res_block_size is not None:
            self.output_attn_res_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
            self.output_attn_res_proj = linear(config.hidden_size, 1)


class K3(nn.Module):
    """ids [B, T] -> logits [B, T, V] in float32.

    Attributes:
        activation_checkpointing: recompute each sub-layer in the backward pass.
        depth_form: 'auto' takes the two-phase form of Block AttnRes where no gradient is needed and no native kernel runs.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        if not config.tie_word_embeddings:
            self.lm_head = linear(config.hidden_size, config.vocab_size)
        self.activation_checkpointing = False
        self.depth_form: Literal["auto", "plain", "two_phase"] = "auto"

    @property
    def output_weight(self) -> Tensor:
        """The [V, D] matrix of the language-model head."""
        return self.model.embed_tokens.weight if self.config.tie_word_embeddings else self.lm_head.weight

    def forward(self, ids_BT: Tensor, **options: Any) -> Tensor:
        """Logits; options as for `hidden`."""
        return F.linear(self.hidden(ids_BT, **options), self.output_weight).float()

    def hidden(
        self,
        ids_BT: Tensor,
        *,
        seq_lens: SeqLens = None,
        attention_mask: Tensor | None = None,
        state: DecodeState | None = None,
        forced_routing: Mapping[int, Tensor] | None = None,
        trace: DepthTrace | None = None,
        embeddings: Tensor | None = None,
    ) -> Tensor:
        """Hidden states after the final norm, [B, T, D].

        Args:
            seq_lens: lengths of the documents packed in the one row (B = 1); they never see each other.
            attention_mask: [B, T], 0 for padding. Such a batch is packed, computed and put back; padded places give 0.
            state: continue from it and update it in place.
            forced_routing: layer -> expert indices [B*T, k] to use instead of the router's choice.
            trace: collects what each depth mix read.
            embeddings: [B, T, D] to use instead of the table's rows (images); `ids_BT` then only marks padding.
        Raises:
            ValueError: two boundary contracts at once, or lengths that do not add up.
        """
        if attention_mask is not None and not bool(attention_mask.all()):
            self._refuse_with_mask(seq_lens, state)
            packed_ids, lengths = unpad(ids_BT, attention_mask)
            packed = None if embeddings is None else unpad(embeddings, attention_mask)[0]
            if forced_routing is not None:
                valid = attention_mask.bool().flatten()
                forced_routing = {layer: indices[valid] for layer, indices in forced_routing.items()}
            out = self.hidden(
                packed_ids, seq_lens=lengths, forced_routing=forced_routing, trace=trace, embeddings=packed
            )
            return repad(out, attention_mask)
        self._check_lengths(ids_BT, seq_lens, state)
        embedded = self.model.embed_tokens(ids_BT) if embeddings is None else embeddings
        stream = self._stream(embedded, trace)
        valid = ids_BT != self.config.pad_token_id if self.training else None
        for index, layer in enumerate(self.model.layers):
            forced = None if forced_routing is None else forced_routing.get(index)
            self._layer(layer, stream, seq_lens, None if state is None else state.layers[index], (valid, forced), trace)
        if state is not None:
            state.length += ids_BT.shape[1]
        return self.model.norm(stream.output())

    def _layer(
        self, layer: Any, stream: ResidualStream, seq_lens: SeqLens, state: Any, routing: Any, trace: Any
    ) -> None:
        attended = self._sublayer(layer.attention, stream.enter_layer(layer.index), seq_lens, state)
        stream.add(attended)
        fed = self._sublayer(layer.feed_forward, stream.read(), *routing)
        stream.add(fed)
        if trace is not None:
            trace.sublayers[f"layer{layer.index}.attn_out"] = attended
            trace.sublayers[f"layer{layer.index}.ffn_out"] = fed
            trace.sums.append(stream.current)

    def _sublayer(self, function: Any, *arguments: Any) -> Tensor:
        if self.activation_checkpointing and torch.is_grad_enabled():
            return checkpoint(function, *arguments, use_reentrant=False)
        return function(*arguments)

    def _stream(self, embedded: Tensor, trace: DepthTrace | None) -> ResidualStream:
        block_size = self.config.attn_res_block_size
        if block_size is None:
            return PlainResiduals(embedded)
        sites = [site for layer in self.model.layers for site in layer.sites()]  # type: ignore[union-attr]
        sites.append(make_site("output", self.model.output_attn_res_norm, self.model.output_attn_res_proj))
        two_phase = self.depth_form == "two_phase" or (self.depth_form == "auto" and self._scans_blocks())
        eps = self.config.rms_norm_eps
        return BlockAttentionResiduals(
            embedded, sites, block_size, eps, two_phase=two_phase and trace is None, trace=trace
        )

    @staticmethod
    def _scans_blocks() -> bool:
        """Inference scans finished blocks once, unless the native mix does it as fast with the bits of training."""
        return not torch.is_grad_enabled() and kernels() != "native"

    @staticmethod
    def _refuse_with_mask(seq_lens: SeqLens, state: DecodeState | None) -> None:
        if seq_lens is not None:
            raise ValueError("give either attention_mask or seq_lens, not both: they say the same thing twice")
        if state is not None:
            raise ValueError("a padded batch cannot continue from a state: give sequences of equal length")

    @staticmethod
    def _check_lengths(ids_BT: Tensor, seq_lens: SeqLens, state: DecodeState | None) -> None:
        if seq_lens is None:
            return
        if ids_BT.shape[0] != 1 or sum(seq_lens) != ids_BT.shape[1] or min(seq_lens) < 1:
            raise ValueError(
                f"seq_lens {seq_lens} must be positive and add up to one row, got ids of shape {tuple(ids_BT.shape)}"
            )
        if state is not None:
            raise ValueError("packed documents cannot continue from a state: decode them as a batch")

    def new_state(self, batch_size: int, weights_version: int = 0) -> DecodeState:
        """The state before the first token of `batch_size` sequences."""
        layers = [layer.self_attn.new_state(batch_size) for layer in self.model.layers]  # type: ignore[union-attr]
        return DecodeState(layers, weights_version=weights_version)

    def routers(self) -> dict[str, Router]:
        """Routers by the name of their layer."""
        return {
            name.removesuffix(".block_sparse_moe"): module.gate
            for name, module in self.named_modules()
            if isinstance(module, LatentMoE)
        }

    def collect_routing(self) -> None:
        """Count the routing of the last forward pass; once per micro-batch of training."""
        for router in self.routers().values():
            router.collect()

    def update_balance(self, all_reduce: Callable[[list[Tensor]], None] | None = None) -> dict[str, Tensor]:
        """Quantile Balancing after an optimiser step. Returns the load of each router's experts in this step.

        Args:
            all_reduce: sums integer tensors over the ranks in place; called once, with the counts of all routers.
        """
        routers = self.routers()
        if all_reduce is not None:
            all_reduce([total for router in routers.values() for total in router.totals()])
        return {name: router.update() for name, router in routers.items()}
