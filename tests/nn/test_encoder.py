"""Positions by hand, post-norm blocks against torch's own, input that cannot be encoded."""

from __future__ import annotations

import math

import pytest
import torch

from budgetformer.errors import UsageError
from budgetformer.nn import AllHeads, BudgetedEncoder
from budgetformer.nn.encoder import Embedding, padding_mask, sinusoids


def encoder(layers: int = 2) -> BudgetedEncoder:
    return BudgetedEncoder([AllHeads(4) for _ in range(layers)], vocab=50, width=16, inner=32, positions=12).eval()


def test_sinusoids_by_hand() -> None:
    table = sinusoids(3, 4)
    assert table[0].tolist() == [0, 1, 0, 1]
    expected = [math.sin(2), math.cos(2), math.sin(0.02), math.cos(0.02)]
    torch.testing.assert_close(table[2], torch.tensor(expected))
    assert sinusoids(3, 5).shape == (3, 5)


def test_the_standard_encoder_equals_torchs_own() -> None:
    ours = encoder()
    layer = torch.nn.TransformerEncoderLayer(16, 4, 32, 0.0, batch_first=True, norm_first=False)
    theirs = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    with torch.no_grad():
        for a, b in zip(ours.blocks, theirs.layers, strict=True):
            b.self_attn.in_proj_weight.copy_(a.attention.qkv.weight.view(4, 3, 4, 16).transpose(0, 1).reshape(48, 16))
            b.self_attn.in_proj_bias.copy_(a.attention.qkv.bias.view(4, 3, 4).transpose(0, 1).reshape(48))
            b.self_attn.out_proj.load_state_dict(a.attention.out.state_dict())
            b.linear1.load_state_dict(a.inner.state_dict())
            b.linear2.load_state_dict(a.outer.state_dict())
    ids, mask = torch.randint(0, 50, (3, 9)), torch.ones(3, 9, dtype=torch.bool)
    mask[2, 5:] = False
    embedded = ours.embedding.tokens(ids) + sinusoids(12, 16)[:9]
    torch.testing.assert_close(ours.embedding(ids), embedded)
    expected = theirs(embedded, src_key_padding_mask=~mask)
    torch.testing.assert_close(ours(ids, mask, 0.0).hidden[mask], expected[mask], atol=1e-5, rtol=1e-5)


def test_padding_mask_is_checked_and_dropped_where_nothing_is_padded() -> None:
    assert padding_mask(None) is None
    assert padding_mask(torch.ones(2, 3)) is None
    mask = padding_mask(torch.tensor([[1, 1, 0], [1, 1, 1]]))
    assert mask is not None
    assert mask.dtype == torch.bool
    with pytest.raises(UsageError, match="sample 1 has no real token"):
        padding_mask(torch.tensor([[1, 1, 0], [0, 0, 0]]))


def test_maps_of_the_wanted_heads_only() -> None:
    ids = torch.randint(0, 50, (2, 6))
    encoded = encoder()(ids, None, 0.0, map_heads={1: [2, 0]})
    assert set(encoded.maps) == {1}
    assert encoded.maps[1].shape == (2, 2, 6, 6)
    torch.testing.assert_close(encoded.maps[1].sum(-1), torch.ones(2, 2, 6))
    with pytest.raises(UsageError, match="layer 2 does not exist: layers are 0 to 1"):
        encoder()(ids, None, 0.0, map_heads={2: [0]})


def test_a_text_longer_than_the_positions_is_refused() -> None:
    with pytest.raises(UsageError, match="13 tokens but the model has 12 positions: truncate"):
        encoder()(torch.ones(1, 13, dtype=torch.long), None, 0.0)


def test_segments_tell_the_texts_of_a_pair_apart() -> None:
    embedding = Embedding(50, 16, 12, 0.0, scale=False, segments=True).eval()
    assert embedding.segments is not None
    ids = torch.tensor([[3, 4, 3]])
    first, second = embedding.segments.weight
    plain = embedding.tokens(ids) + sinusoids(12, 16)[:3]
    torch.testing.assert_close(embedding(ids), plain + first)
    torch.testing.assert_close(embedding(ids, torch.tensor([[0, 0, 1]]))[0, 2], plain[0, 2] + second)
