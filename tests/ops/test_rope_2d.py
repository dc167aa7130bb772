"""2-D rotary positions: the definition, and what a rotation must keep."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moonlet.ops.rope_2d import plane_angles, rotate_pairs, rotate_plane_plain

sizes = st.integers(1, 5)


@settings(max_examples=30, deadline=None)
@given(height=sizes, width=sizes, quarters=sizes, heads=st.integers(1, 3))
def test_fast_form_equals_the_definition(height, width, quarters, heads):
    x = torch.randn(height * width, heads, 4 * quarters, generator=torch.Generator().manual_seed(height))
    fast = rotate_pairs(x, plane_angles(height, width, x.shape[-1]))
    torch.testing.assert_close(fast.double(), rotate_plane_plain(x, height, width), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(fast.norm(dim=-1), x.norm(dim=-1))


def test_scores_depend_on_the_offset_only():
    """Shifting query and key by the same rows and columns leaves their product alone."""
    query, key = torch.randn(2, 1, 1, 16, generator=torch.Generator().manual_seed(0))
    angles = plane_angles(6, 7, 16).view(6, 7, -1)

    def score(query_at, key_at):
        return (rotate_pairs(query, angles[query_at][None]) * rotate_pairs(key, angles[key_at][None])).sum()

    torch.testing.assert_close(score((0, 1), (2, 4)), score((3, 3), (5, 6)), atol=1e-5, rtol=1e-5)
    assert not torch.isclose(score((0, 1), (2, 4)), score((1, 0), (4, 2)), atol=1e-3), "rows and columns differ"


def test_head_dim_must_hold_both_axes():
    with pytest.raises(ValueError, match="multiple of 4"):
        plane_angles(2, 2, 6)
