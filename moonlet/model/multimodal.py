"""K3 with eyes: MoonViT, projector and text model, and the merge of their sequences (k3_model.md section 1).

B sequences, T tokens, M tokens after the merge, D text width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moonlet.config import ModelConfig, VisionConfig
from moonlet.errors import ConfigError
from moonlet.model.k3 import K3
from moonlet.model.moonvit import MoonViT, as_grids
from moonlet.model.projector import Projector

IGNORED = -100


@dataclass(frozen=True)
class Merged:
    """Text and images as one sequence."""

    ids_BM: Tensor  # image rows keep the id of their placeholder, padding has the pad id
    embeddings_BMD: Tensor
    attention_mask_BM: Tensor  # int64, 0 for padding
    labels_BM: Tensor | None  # -100 on image rows and padding

    @property
    def positions_BM(self) -> Tensor:
        """Index of each token in its sequence (1 on padding), as released; K3 rotates nothing and does not use it."""
        index = self.attention_mask_BM.cumsum(-1) - 1
        return index.masked_fill(self.attention_mask_BM == 0, 1)


class K3Multimodal(nn.Module):
    """ids and pixels -> logits. Parameters carry the released names.

    Args:
        config: the text model.
        vision: tower and projector.
        media_token_id: the placeholder `<|media_pad|>`, one for each image or clip.
    """

    def __init__(self, config: ModelConfig, vision: VisionConfig, media_token_id: int) -> None:
        super().__init__()
        if (width := vision.text_hidden_size) != config.hidden_size:
            raise ConfigError(
                f"vision text_hidden_size {width} is not the text model's hidden_size {config.hidden_size}"
            )
        self.config, self.vision_config, self.media_token_id = config, vision, media_token_id
        self.language_model = K3(config)
        self.vision_tower = MoonViT(vision)
        self.mm_projector = Projector(vision)

    def forward(
        self,
        ids_BT: Tensor,
        pixels_LCPP: Tensor | None = None,
        grids: Tensor | Sequence[Sequence[int]] = (),
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """Logits [B, M, V] of the merged sequences, in float32; zero on padding."""
        features = [] if pixels_LCPP is None else self.image_rows(pixels_LCPP, grids)
        return self.logits(self.merge(ids_BT, features, attention_mask))

    def image_rows(self, pixels_LCPP: Tensor, grids: Tensor | Sequence[Sequence[int]]) -> list[Tensor]:
        """Rows [h*w/4, D] of each image or clip."""
        features = self.vision_tower(pixels_LCPP, as_grids(grids))
        return list(self.mm_projector(torch.cat(features)).split([len(item) for item in features]))

    def logits(self, merged: Merged) -> Tensor:
        mask, embeddings = merged.attention_mask_BM, merged.embeddings_BMD
        return self.language_model(merged.ids_BM, attention_mask=mask, embeddings=embeddings)

    def merge(
        self,
        ids_BT: Tensor,
        features: list[Tensor],
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> Merged:
        """Replace each placeholder, in reading order, by the rows of its image.

        Rows of the batch are padded on the left, unless one of them ends in padding already.

        Raises:
            ValueError: the number of placeholders is not that of the images.
        """
        if (placeholders := int((ids_BT == self.media_token_id).sum())) != len(features):
            raise ValueError(f"the text has {placeholders} image placeholders, but there are {len(features)} images")
        mask = torch.ones_like(ids_BT) if attention_mask is None else attention_mask.long()
        mask = mask.masked_fill(ids_BT == self.media_token_id, 1)
        targets = torch.full_like(ids_BT, IGNORED) if labels is None else labels
        remaining = iter(features)
        rows = [self._merge_row(*row, remaining) for row in zip(ids_BT, mask, targets)]
        left = not bool((ids_BT[:, -1] == self.config.pad_token_id).any())
        fills = (self.config.pad_token_id, 0, IGNORED, 0.0)
        ids, mask, targets, embeddings = (_pad_rows(part, fill, left) for part, fill in zip(zip(*rows), fills))
        return Merged(ids, embeddings, mask, None if labels is None else targets)

    def _merge_row(
        self, ids_T: Tensor, mask_T: Tensor, labels_T: Tensor, features: Iterator[Tensor]
    ) -> tuple[Tensor, ...]:
        is_media = ids_T == self.media_token_id
        images = [next(features) for _ in range(int(is_media.sum()))]
        counts = torch.ones_like(ids_T)
        counts[is_media] = torch.tensor([len(image) for image in images], device=ids_T.device, dtype=counts.dtype)
        ids, mask, labels = (part.repeat_interleave(counts) for part in (ids_T, mask_T, labels_T))
        embeddings = self.language_model.model.embed_tokens(ids)
        if images:
            here = (ids == self.media_token_id)[:, None]
            embeddings = embeddings.masked_scatter(here, torch.cat(images).to(embeddings.dtype))
        return ids, mask, labels.masked_fill(ids == self.media_token_id, IGNORED), embeddings


def multimodal_loss(logits_BMV: Tensor, merged: Merged) -> Tensor:
    """Mean cross-entropy of the next token, between real tokens and where the label is not -100.

    The released loss also counts what the padding before a left-padded sequence predicts for its first token. That
    is an accident (a fully masked query attends to everything), so ours leaves it out; unpadded batches agree.

    Raises:
        ValueError: the sequences were merged without labels.
    """
    if merged.labels_BM is None:
        raise ValueError("the sequences were merged without labels")
    is_real = (merged.attention_mask_BM[:, 1:] * merged.attention_mask_BM[:, :-1]) != 0
    return F.cross_entropy(logits_BMV[:, :-1][is_real], merged.labels_BM[:, 1:][is_real], ignore_index=IGNORED)


def _pad_rows(rows: Sequence[Tensor], fill: float, left: bool) -> Tensor:
    """Rows [M_b, ...] as one tensor [B, max M_b, ...]."""
    longest = max(len(row) for row in rows)
    padded = []
    for row in rows:
        padding = row.new_full((longest - len(row), *row.shape[1:]), fill)
        padded.append(torch.cat([padding, row] if left else [row, padding]))
    return torch.stack(padded)
