"""Packed sequences through the sparse layer: each as if alone, whatever its neighbours and the padding hold."""

import pytest
import torch

from mla_attention import PackedSeqParams
from tests.mla_attention.dsa.oracle import build, dsa_config, oracle

LENGTHS = [1, 2, 63, 64, 65]
LOSS = {"dsa_indexer_loss_coeff": 1.0}


def offsets(lengths):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


def tokens(count, seed=2):
    return torch.randn(count, 1, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def gradients_of(layer, hidden, packed, direction):
    """Output, indices and the input's gradient, the attached loss in it (though none of it reaches the input)."""
    hidden = hidden.clone().requires_grad_()
    output, _, aux = layer(hidden, packed_seq_params=packed, return_aux=True)
    (gradient,) = torch.autograd.grad((output * direction).sum(), hidden)
    return output, aux.topk_indices, gradient


@pytest.mark.parametrize("topk", [7, 64, 2048])
@pytest.mark.parametrize("sparse_loss", [False, True])
def test_each_sequence_is_as_if_alone(topk, sparse_loss):
    layer = build(dsa_config(dsa_indexer_topk=topk, dsa_indexer_use_sparse_loss=sparse_loss, **LOSS))
    hidden, start, divergence = tokens(sum(LENGTHS)), 0, []
    output, _, aux = layer(hidden, packed_seq_params=PackedSeqParams(offsets(LENGTHS)), return_aux=True)
    assert aux.topk_indices.shape == (1, sum(LENGTHS), min(topk, 65))
    assert aux.topk_indices.dtype == torch.int64
    for length in LENGTHS:
        rows = slice(start, start + length)
        alone, _, own = layer(hidden[rows], return_aux=True)
        torch.testing.assert_close(output[rows], alone, rtol=1e-10, atol=1e-10)
        indices = aux.topk_indices[0, rows]
        expected = torch.where(own.topk_indices[0] >= 0, own.topk_indices[0] + start, -1)
        assert torch.equal(indices[:, : expected.shape[-1]], expected)
        assert (indices[:, expected.shape[-1] :] == -1).all()
        divergence.append(own.indexer_loss * length)
        start += length
    torch.testing.assert_close(aux.indexer_loss, sum(divergence) / sum(LENGTHS), rtol=1e-10, atol=1e-10)


def test_packed_sequences_equal_the_oracle():
    layer, hidden, start = build(dsa_config()), tokens(sum(LENGTHS)), 0
    output, _, aux = layer(hidden, packed_seq_params=PackedSeqParams(offsets(LENGTHS)), return_aux=True)
    for length in LENGTHS:
        rows = slice(start, start + length)
        expected = oracle(layer, hidden[rows, 0])
        torch.testing.assert_close(output[rows, 0], expected.output, rtol=1e-9, atol=1e-9)
        own = torch.where(expected.indices >= 0, expected.indices + start, -1)
        assert torch.equal(aux.topk_indices[0, rows, : own.shape[-1]], own)
        start += length


@pytest.mark.parametrize("changed", range(len(LENGTHS)))
@pytest.mark.parametrize("topk", [7, 2048])
def test_one_sequence_changed_leaves_the_others_bit_for_bit(changed, topk):
    layer = build(dsa_config(dsa_indexer_topk=topk, **LOSS))
    packed, hidden = PackedSeqParams(offsets(LENGTHS)), tokens(sum(LENGTHS))
    direction = torch.randn_like(hidden)
    bounds = offsets(LENGTHS).tolist()
    other = hidden.clone()
    own = slice(bounds[changed], bounds[changed + 1])
    other[own] = 50 * torch.randn_like(other[own])
    before, after = (gradients_of(layer, x, packed, direction) for x in (hidden, other))
    untouched = torch.ones(sum(LENGTHS), dtype=torch.bool)
    untouched[own] = False
    assert torch.equal(before[0][untouched], after[0][untouched])
    assert torch.equal(before[1][0, untouched], after[1][0, untouched])
    assert torch.equal(before[2][untouched], after[2][untouched])
    assert not torch.equal(before[0][own], after[0][own])


@pytest.mark.parametrize("topk", [7, 2048])
@pytest.mark.parametrize("inside", [False, True], ids=["behind the last", "behind each"])
def test_padding_gives_zeros_takes_no_gradient_and_leaks_no_nan(topk, inside):
    layer = build(dsa_config(dsa_indexer_topk=topk, **LOSS))
    lengths = [5, 20, 0, 11]
    if inside:
        packed = PackedSeqParams(offsets(lengths), cu_seqlens_q_padded=offsets([8, 32, 4, 12]))
        places = [*range(5), *range(8, 28), *range(44, 55)]
    else:
        packed, places = PackedSeqParams(offsets(lengths)), list(range(36))
    held = torch.zeros(60, dtype=torch.bool)
    held[places] = True
    hidden = torch.full((60, 1, 64), torch.nan, dtype=torch.float64)
    hidden[held] = tokens(36)
    hidden.requires_grad_()
    output, _, aux = layer(hidden, packed_seq_params=packed, return_aux=True)
    (output.sum() + aux.indexer_loss).backward()
    assert torch.equal(output[~held], torch.zeros(24, 1, 64, dtype=torch.float64))
    assert torch.equal(hidden.grad[~held], torch.zeros(24, 1, 64, dtype=torch.float64))
    assert (aux.topk_indices[0, ~held] == -1).all()
    assert all(torch.isfinite(p.grad).all() for p in layer.parameters())

    twin = build(layer.config)
    clean = tokens(36).requires_grad_()
    expected, _, own = twin(clean, packed_seq_params=PackedSeqParams(offsets(lengths)), return_aux=True)
    (expected.sum() + own.indexer_loss).backward()
    torch.testing.assert_close(output[held], expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(aux.indexer_loss, own.indexer_loss, rtol=1e-10, atol=1e-10)  # padded rows count nowhere
    torch.testing.assert_close(hidden.grad[held], clean.grad, rtol=1e-9, atol=1e-9)
    for (name, found), wanted in zip(layer.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-8, atol=1e-8, msg=name)


@pytest.mark.parametrize("topk", [7, 2048])
def test_no_sequences_and_nothing_but_padding(topk):
    layer = build(dsa_config(dsa_indexer_topk=topk, **LOSS))
    for lengths, rows in (([], 0), ([], 3), ([0, 0], 0), ([0, 0], 9)):
        hidden = torch.full((rows, 1, 64), torch.nan, dtype=torch.float64, requires_grad=True)
        output, _, aux = layer(hidden, packed_seq_params=PackedSeqParams(offsets(lengths)), return_aux=True)
        assert torch.equal(output, torch.zeros_like(output))
        assert aux.indexer_loss.item() == 0.0
        assert aux.topk_indices.shape == (1, rows, 0)
        (output.sum() + aux.indexer_loss).backward()
        assert torch.equal(hidden.grad, torch.zeros_like(hidden))


def test_offsets_that_the_host_never_read():
    layer, hidden = build(dsa_config()), tokens(sum(LENGTHS))
    unread = PackedSeqParams(offsets(LENGTHS), max_seqlen_q=400, validate=False)
    output, _, aux = layer(hidden, packed_seq_params=unread, return_aux=True)
    expected, _, own = layer(hidden, packed_seq_params=PackedSeqParams(offsets(LENGTHS)), return_aux=True)
    assert torch.equal(output, expected)
    assert torch.equal(aux.topk_indices, own.topk_indices)


def test_a_longest_sequence_that_is_overstated():
    layer, hidden = build(dsa_config(dsa_indexer_topk=64)), tokens(36)
    overstated = PackedSeqParams(offsets([16, 20]), max_seqlen_q=400)
    output, _, aux = layer(hidden, packed_seq_params=overstated, return_aux=True)
    expected, _, own = layer(hidden, packed_seq_params=PackedSeqParams(offsets([16, 20])), return_aux=True)
    torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-10)
    assert aux.topk_indices.shape == (1, 36, 64)  # min(K, max_seqlen)
    assert torch.equal(aux.topk_indices[..., :20], own.topk_indices)
    assert (aux.topk_indices[..., 20:] == -1).all()


def test_shared_indices_stay_inside_their_sequence():
    layer, hidden, packed = build(dsa_config()), tokens(sum(LENGTHS)), PackedSeqParams(offsets(LENGTHS))
    output, _, aux = layer(hidden, packed_seq_params=packed, return_aux=True)
    torch.testing.assert_close(
        layer(hidden, packed_seq_params=packed, topk_indices=aux.topk_indices)[0], output, rtol=1e-12, atol=1e-12
    )
    leaking = torch.cat([aux.topk_indices, torch.zeros(1, sum(LENGTHS), 1, dtype=torch.int64)], -1)
    leaking[0, :1, -1] = -1  # the first sequence may see row 0, once
    torch.testing.assert_close(
        layer(hidden, packed_seq_params=packed, topk_indices=leaking)[0], output, rtol=1e-12, atol=1e-12
    )


def test_a_neighbours_key_under_validation(monkeypatch):
    monkeypatch.setenv("MLA_ATTENTION_VALIDATE", "1")
    layer, hidden, packed = build(dsa_config()), tokens(36), PackedSeqParams(offsets([16, 20]))
    indices = torch.full((1, 36, 2), -1)
    indices[0, 20, 1] = 15
    with pytest.raises(ValueError, match=r"topk_indices: given 15 at \[0, 20, 1\], allowed are -1 and .* 16..20"):
        layer(hidden, packed_seq_params=packed, topk_indices=indices)


def test_indices_of_the_batched_shape_are_refused():
    with pytest.raises(ValueError, match=r"given shape \[36, 3\], allowed is \[1, T, k\] = \[1, 36, k\]"):
        build(dsa_config())(
            tokens(36),
            packed_seq_params=PackedSeqParams(offsets([16, 20])),
            topk_indices=torch.zeros(36, 3, dtype=torch.int64),
        )


def test_position_ids_of_a_pack():
    layer, hidden = build(dsa_config()), tokens(36)
    positions = torch.randint(0, 77, (36,))
    output = layer(hidden, packed_seq_params=PackedSeqParams(offsets([16, 20])), position_ids=positions)[0]
    for rows in (slice(0, 16), slice(16, 36)):
        expected = oracle(layer, hidden[rows, 0], positions=positions[rows]).output
        torch.testing.assert_close(output[rows, 0], expected, rtol=1e-9, atol=1e-9)
