"""Which parameter is trained by which rule: the golden list of the nano model, overrides, and the printed table."""

from pathlib import Path

import pytest
import torch
from torch import nn

from moonlet.config import OptimConfig, resolve_model
from moonlet.errors import ConfigError
from moonlet.model.k3 import K3
from moonlet.optim.groups import Assignment, assign_groups, explain_groups

GOLDEN_LIST = Path(__file__).with_name("nano_groups.txt")


def nano(**changes: object) -> K3:
    with torch.device("meta"):
        return K3(resolve_model({"preset": "nano", **changes}))


def assigned(model: nn.Module, **groups: str) -> dict[str, Assignment]:
    return assign_groups(model, OptimConfig.parse({"groups": groups}))


def test_golden_list_of_the_nano_model():
    """B35: name, group, heights of the orthogonalised blocks, decay."""
    lines = [
        f"{name} {a.group} {'x'.join(map(str, a.block_rows)) or '-'} {'decay' if a.decays else '-'}"
        for name, a in assigned(nano()).items()
    ]
    assert lines == GOLDEN_LIST.read_text().splitlines()


@pytest.mark.parametrize("preset", ["nano", "micro", "mini", "k3"])
def test_blocks_tile_every_matrix(preset: str):
    for name, a in assigned(nano(preset=preset)).items():
        if a.group == "adamw":
            assert a.block_rows == ()
        else:
            assert len(a.shape) in (2, 3) and sum(a.block_rows) == a.shape[-2], name


def test_shapes_other_than_k3():
    """No q-lora, low-rank output gate, no latent: the names differ and the rules hold."""
    linear = {"use_full_rank_gate": False}
    groups = assigned(nano(q_lora_rank=None, routed_expert_hidden_size=None, linear_attn_config=linear))
    mla, kda = "model.layers.3.self_attn", "model.layers.0.self_attn"
    assert groups[f"{mla}.q_proj.weight"].block_rows == (96, 96)
    assert groups[f"{kda}.q_proj.weight"].block_rows == (64, 64)
    assert groups[f"{kda}.g_a_proj.weight"].group == groups[f"{kda}.g_b_proj.weight"].group == "adamw"


def test_overrides_later_ones_win():
    groups = assigned(nano(), **{"*_proj.weight": "adamw", "*.o_proj.weight": "muon", "lm_head.weight": "muon"})
    assert groups["model.layers.0.self_attn.q_proj.weight"].group == "adamw"
    assert groups["model.layers.0.self_attn.o_proj.weight"].block_rows == (128,)
    assert groups["lm_head.weight"].group == "muon"
    whole = assigned(nano(), **{"*.q_proj.weight": "muon"})["model.layers.0.self_attn.q_proj.weight"]
    assert whole.block_rows == (128,)
    assert assigned(nano(), **{"*experts.w13": "muon"})["model.layers.1.block_sparse_moe.experts.w13"].block_rows == (
        64,
        64,
    )


@pytest.mark.parametrize(
    ("pattern", "group", "message"),
    [
        ("model.layers.0.self_attn.q_proj.wieght", "muon", r"matches no parameter \(did you mean '.*q_proj.weight'"),
        ("*.experts.7.w1", "adamw", "matches no parameter"),
        ("*.o_proj.weight", "muon_per_head", "o_proj.weight.*no heads in its rows"),
        ("*.A_log", "muon", "A_log.*not a matrix"),
        ("*conv1d.weight", "muon", "conv1d.weight.*not a matrix"),
    ],
)
def test_impossible_overrides_are_named(pattern: str, group: str, message: str):
    with pytest.raises(ConfigError, match=message):
        assigned(nano(), **{pattern: group})


def test_any_module_gets_matrices_to_muon_and_vectors_to_adamw():
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Conv2d(1, 2, 3))
    assert [a.group for a in assigned(model).values()] == ["muon", *["adamw"] * 5]


def test_explain_names_every_parameter_once_with_its_group():
    groups = assigned(nano())
    lines = explain_groups(groups).splitlines()
    table = {line.split()[0]: line.split()[1] for line in lines[1 : 1 + len(groups)]}
    assert table == {name: a.group for name, a in groups.items()}
    assert any("32 x 64x64" in line for line in lines)  # 16 experts, w1 and w3
    assert "4 x 64x64" in next(line for line in lines if "kv_b_proj" in line)
    numbers = sum(int(line.split()[-2].replace(",", "")) for line in lines[-3:])
    assert numbers == sum(p.numel() for p in nano().parameters())
