"""Which parameter is trained by which rule: the one place that decides. `moonlet train --explain RECIPE` prints it.

The report (section 3) gives Muon to matrices and Per-Head Muon to the query, key and value projections; it does not
say what becomes of gates, embeddings, routers and expert stacks. Ours:

- muon_per_head: query, key and value projections, each head orthogonalised alone. KDA: q, k, v. MLA: the query
  projection by head; kv_b_proj by head with the head's key rows and value rows apart, for they feed different things.
- muon: the other matrices. Expert stacks are orthogonalised expert by expert, and w13 as w1 and w3.
- adamw: embedding, head, routers, gates (output, decay, beta), convolutions, depth queries, norms and other vectors.
  Their rows or entries are used one by one, so a common orthogonal direction means nothing for them.

Weight decay is decoupled and goes to matrices of either rule; vectors (norms, biases, depth queries, convolution taps)
are not decayed, since zero is not a neutral value for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

from torch import nn

from moonlet.config import OptimConfig
from moonlet.errors import ConfigError, nearest_name
from moonlet.model.gated_mla import GatedMLA
from moonlet.model.kda import KimiDeltaAttention
from moonlet.model.latent_moe import Experts

Group = Literal["muon", "muon_per_head", "adamw"]


@dataclass(frozen=True)
class Assignment:
    """How one parameter is trained.

    Attributes:
        block_rows: heights of the blocks of rows that Muon orthogonalises one by one; they add up to the rows of the
            matrix (of each matrix of a stack). Empty for adamw.
        role: what the parameter is, for people.
    """

    group: Group
    shape: tuple[int, ...]
    block_rows: tuple[int, ...]
    decays: bool
    role: str

    @property
    def blocks(self) -> dict[tuple[int, int], int]:
        """Number of orthogonalised blocks by shape (rows, columns)."""
        count: dict[tuple[int, int], int] = {}
        for rows in self.block_rows:
            shape = (rows, self.shape[-1])
            count[shape] = count.get(shape, 0) + (self.shape[0] if len(self.shape) == 3 else 1)
        return count


# What a parameter is: `head_rows` where it has heads, `whole_rows` where it is a matrix (or a stack of them) at all.
@dataclass(frozen=True)
class _Role:
    role: str
    group: Group
    head_rows: tuple[int, ...] = ()
    whole_rows: tuple[int, ...] = ()

    def rows(self, group: Group) -> tuple[int, ...]:
        return {"adamw": (), "muon": self.whole_rows, "muon_per_head": self.head_rows}[group]


_ADAMW_MATRICES = {
    "embed_tokens.weight": "embedding",
    "lm_head.weight": "head",
    "gate.weight": "router",
    "g_proj.weight": "output gate",
    "g_a_proj.weight": "output gate",
    "g_b_proj.weight": "output gate",
    "f_a_proj.weight": "decay gate",
    "f_b_proj.weight": "decay gate",
    "b_proj.weight": "beta gate",
}
_ADAMW_VECTORS = {"_res_proj.weight": "depth query", "conv1d.weight": "convolution"}


def assign_groups(model: nn.Module, config: OptimConfig) -> dict[str, Assignment]:
    """Parameter name -> how it is trained, in the model's order. Works on the meta device.

    Raises:
        ConfigError: a pattern of `config.groups` matches no parameter, or asks for what a parameter cannot have.
    """
    owners = dict(model.named_modules())
    roles = {name: _role(name, parameter, owners) for name, parameter in model.named_parameters()}
    chosen = _overridden_groups(roles, config.groups)
    assignments = {}
    for name, parameter in model.named_parameters():
        role, group = roles[name], chosen[name]
        if group != "adamw" and not role.rows(group):
            lacking = "heads in its rows" if role.whole_rows else "a matrix"
            has = "no " if role.whole_rows else "not "
            raise ConfigError(f"optim.groups puts '{name}' ({role.role}) into '{group}', but it has {has}{lacking}")
        decays = bool(role.whole_rows)
        assignments[name] = Assignment(group, tuple(parameter.shape), role.rows(group), decays, role.role)
    return assignments


def _overridden_groups(roles: Mapping[str, _Role], patterns: Mapping[str, Group]) -> dict[str, Group]:
    chosen: dict[str, Group] = {name: role.group for name, role in roles.items()}
    for pattern, group in patterns.items():
        matched = [name for name in chosen if fnmatchcase(name, pattern)]
        if not matched:
            hint = nearest_name(pattern, roles)
            raise ConfigError(
                f"optim.groups: '{pattern}' matches no parameter{hint}; `moonlet train --explain` lists them"
            )
        chosen.update(dict.fromkeys(matched, group))
    return chosen


def _role(name: str, parameter: nn.Parameter, owners: Mapping[str, nn.Module]) -> _Role:
    shape, leaf = tuple(parameter.shape), name.split(".")
    whole = (shape[-2],) if len(shape) == 2 else ()
    last = ".".join(leaf[-2:])
    if last in _ADAMW_MATRICES:
        return _Role(_ADAMW_MATRICES[last], "adamw", whole_rows=whole)
    for ending, role in _ADAMW_VECTORS.items():
        if name.endswith(ending):
            return _Role(role, "adamw")
    for kind, find in _OWNED.items():
        for depth in (1, 2):
            owner = owners.get(".".join(leaf[:-depth]))
            if isinstance(owner, kind) and (found := find(owner, leaf[-depth], shape)) is not None:
                return found
    return (
        _Role("matrix", "muon", whole_rows=whole) if whole else _Role("norm" if "norm" in last else "vector", "adamw")
    )


def _kda_role(owner: Any, leaf: str, shape: tuple[int, ...]) -> _Role | None:
    if leaf not in ("q_proj", "k_proj", "v_proj"):
        return None
    return _Role(f"KDA {leaf[0]}, by head", "muon_per_head", (owner.head_dim,) * owner.num_heads, (shape[0],))


def _mla_role(owner: Any, leaf: str, shape: tuple[int, ...]) -> _Role | None:
    if leaf in ("q_proj", "q_b_proj"):
        rows = (owner.nope_dim + owner.rope_dim,) * owner.num_heads
        return _Role("MLA q, by head", "muon_per_head", rows, (shape[0],))
    if leaf == "kv_b_proj":
        rows = (owner.nope_dim, owner.value_dim) * owner.num_kv_heads
        return _Role("MLA k and v, by head", "muon_per_head", rows, (shape[0],))
    return None


def _expert_role(owner: Any, leaf: str, shape: tuple[int, ...]) -> _Role | None:
    if leaf == "w13":
        return _Role("experts, w1 and w3", "muon", whole_rows=(shape[1] // 2,) * 2)
    return _Role("experts, w2", "muon", whole_rows=(shape[1],)) if leaf == "w2" else None


_OWNED: dict[type[nn.Module], Callable[[Any, str, tuple[int, ...]], _Role | None]] = {
    KimiDeltaAttention: _kda_role,
    GatedMLA: _mla_role,
    Experts: _expert_role,
}


def explain_groups(assignments: Mapping[str, Assignment]) -> str:
    """A table, one parameter a line: name, group, shape, what is orthogonalised, decay, role; then totals by group."""
    rows = [("parameter", "group", "shape", "orthogonalised", "decay", "role")]
    for name, a in assignments.items():
        blocks = " + ".join(f"{count} x {rows}x{columns}" for (rows, columns), count in a.blocks.items())
        shape = "x".join(map(str, a.shape)) or "scalar"
        rows.append((name, a.group, shape, blocks or "-", "yes" if a.decays else "no", a.role))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    return "\n".join([*lines, "", *_totals(assignments)])


def _totals(assignments: Mapping[str, Assignment]) -> list[str]:
    totals: dict[str, tuple[int, int]] = {}
    for a in assignments.values():
        tensors, numbers = totals.get(a.group, (0, 0))
        size = 1
        for length in a.shape:
            size *= length
        totals[a.group] = tensors + 1, numbers + size
    return [f"{group}: {tensors} tensors, {numbers:,} numbers" for group, (tensors, numbers) in sorted(totals.items())]
