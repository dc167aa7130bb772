"""MoonViT-V2 and the projector against the golden vectors, and the properties that the equations promise."""

from __future__ import annotations

import pytest
import torch
from conftest import golden_stems

from moonlet.config import VisionConfig
from moonlet.config.vision import load_vision_preset
from moonlet.model.moonvit import Grid, MoonViT, as_grids
from moonlet.model.projector import Projector

SMALL = {"init_pos_emb_height": 8, "init_pos_emb_width": 8, "vt_num_attention_heads": 2, "vt_num_hidden_layers": 2}
SMALL |= {"vt_hidden_size": 16, "vt_intermediate_size": 32, "qkv_hidden_size": 24, "mm_hidden_size": 16}
SMALL |= {"text_hidden_size": 20, "patch_size": 2}
TOLERANCE = {"atol": 5e-6, "rtol": 5e-6}


def parse(values) -> VisionConfig:
    return VisionConfig.parse({key: value for key, value in values.items() if not key.startswith("_")})


@pytest.fixture
def small() -> MoonViT:
    released = load_vision_preset("k3")
    assert released is not None
    torch.manual_seed(0)
    return MoonViT(VisionConfig.parse(released.model_dump() | SMALL))


def load(golden, stem) -> tuple[MoonViT, Projector]:
    vision, weights = parse(golden.info(stem)["vision_config"]), golden.tensors(f"{stem}.weights")
    tower, projector = MoonViT(vision), Projector(vision)
    for module, prefix in ((tower, "vision_tower."), (projector, "mm_projector.")):
        module.load_state_dict(
            {key.removeprefix(prefix): value for key, value in weights.items() if key.startswith(prefix)}
        )
    return tower, projector


def vision_cases(golden, stem) -> list[str]:
    return sorted({name.split("/")[0] for name in golden.tensors(stem) if name.endswith("/encoder_out")})


@pytest.mark.golden
@pytest.mark.parametrize("stem", golden_stems("h_vision*"))
def test_golden_images_and_clips(golden, stem):
    tower, projector = load(golden, stem)
    for case in vision_cases(golden, stem):
        want = golden.tensors(stem, case)
        grids = as_grids(want["grid_thws"])
        embedded = tower.patch_embed(want["pixel_values"], grids)
        merged = tower(want["pixel_values"], grids)
        got = {
            "patch_embed_out": embedded,
            "encoder_out": tower.encoder(embedded, grids),
            "merged_feats": torch.cat(merged),
            "proj_out": projector(torch.cat(merged)),
        }
        for name in got.keys() & want.keys():
            torch.testing.assert_close(
                got[name], want[name], **TOLERANCE, msg=lambda text, at=f"{case} {name}": f"{at}: {text}"
            )
        assert [len(item) for item in merged] == golden.info(stem)[case]["tokens_per_item"]


@pytest.mark.golden
@pytest.mark.parametrize("stem", golden_stems("h_vision*"))
def test_golden_gradients(golden, stem):
    tower, projector = load(golden, stem)
    case, norms = golden.tensors(stem, "gradcase"), golden.info(stem)["gradcase_grad_norms"]
    out = projector(torch.cat(tower(case["pixel_values"], as_grids(case["grid_thws"]))))
    torch.testing.assert_close(out, case["y"], **TOLERANCE)
    out.backward(case["cotangent"])
    named = {f"vision_tower.{name}": p for name, p in tower.named_parameters()}
    named |= {f"mm_projector.{name}": p for name, p in projector.named_parameters()}
    assert named.keys() == norms.keys()
    for name, want in norms.items():
        assert named[name].grad.norm().item() == pytest.approx(want, rel=1e-3), name
    torch.testing.assert_close(tower.patch_embed.pos_emb.weight.grad, case["grad_pos_emb"], atol=1e-5, rtol=1e-3)


def pixels(grids: list[Grid]) -> torch.Tensor:
    return torch.randn(sum(grid.patches for grid in grids), 3, 2, 2, generator=torch.Generator().manual_seed(1))


def test_items_never_see_each_other(small):
    grids = [Grid(1, 4, 2), Grid(2, 2, 6), Grid(1, 2, 2)]
    together = pixels(grids)
    changed = together.clone()
    changed[8 + 24 :] += 1
    before, after = small(together, grids), small(changed, grids)
    assert torch.equal(before[0], after[0]) and torch.equal(before[1], after[1])
    assert not torch.equal(before[2], after[2])
    torch.testing.assert_close(small(together[:8], grids[:1])[0], before[0])


def test_time_is_added_to_clips_only(small):
    """A still clip of two frames is not the image; two frames that differ attend to each other."""
    frame = pixels([Grid(1, 4, 4)])
    image = small(frame, [Grid(1, 4, 4)])[0]
    clip = small(frame.repeat(2, 1, 1, 1), [Grid(2, 4, 4)])[0]
    assert clip.shape == image.shape and not torch.allclose(clip, image, atol=1e-3)
    embedded = small.patch_embed(frame.repeat(2, 1, 1, 1), [Grid(2, 4, 4)])
    assert not torch.allclose(embedded[:16], small.patch_embed(frame, [Grid(1, 4, 4)]), atol=1e-3), "frame 0 has time"


def test_bad_grids_are_refused(small):
    with pytest.raises(ValueError, match="do not fill"):
        small(pixels([Grid(1, 4, 4)]), [Grid(1, 4, 2)])
    with pytest.raises(ValueError, match="tiles"):
        small(pixels([Grid(1, 3, 4)]), [Grid(1, 3, 4)])
    with pytest.raises(ValueError, match="at most 4 frames"):
        small(pixels([Grid(5, 2, 2)]), [Grid(5, 2, 2)])
