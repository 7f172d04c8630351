"""PackedSeqParams: what it accepts, what it derives, and what it refuses in one line."""

import pytest
import torch

from mla_attention import MLASelfAttention, PackedSeqParams
from mla_attention.configs import tiny


def offsets(*values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype)


def test_lengths_rows_and_padding_are_derived():
    packed = PackedSeqParams(offsets(0, 3, 3, 8))
    assert packed.host_lengths == (3, 0, 5)
    assert packed.max_seqlen_q == packed.max_seqlen_kv == 5
    assert packed.num_sequences == 3
    assert packed.cu_seqlens_kv is packed.cu_seqlens_q
    assert not packed.has_padding(8)
    assert packed.has_padding(9)
    assert packed.token_rows(10).tolist() == [True] * 8 + [False] * 2


def test_padded_offsets_place_the_rows():
    packed = PackedSeqParams(offsets(0, 3, 5), cu_seqlens_q_padded=offsets(0, 4, 8))
    assert packed.row_offsets.tolist() == [0, 4, 8]
    assert packed.longest_rows == 4
    assert packed.max_seqlen_q == 3
    assert packed.token_rows(9).tolist() == [True, True, True, False, True, True, False, False, False]
    sequence, offset = packed.sequence_of_row(9)
    assert sequence.tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 2]
    assert offset.tolist()[:8] == [0, 1, 2, 3, 0, 1, 2, 3]


def test_empty_sequences_and_no_sequences():
    packed = PackedSeqParams(offsets(0, 0, 2, 2, 2))
    assert packed.sequence_of_row(2)[0].tolist() == [1, 1]
    nothing = PackedSeqParams(offsets(0))
    assert nothing.max_seqlen_q == 0
    assert nothing.token_rows(3).tolist() == [False] * 3


def test_lists_and_int64_are_accepted():
    assert PackedSeqParams([0, 2, 4]).max_seqlen_q == 2
    assert PackedSeqParams(offsets(0, 2, 4, dtype=torch.int64)).max_seqlen_q == 2


def test_without_validation_nothing_is_read_on_the_host():
    packed = PackedSeqParams(torch.tensor([0, 2, 4], device="meta", dtype=torch.int32), max_seqlen_q=2, validate=False)
    assert packed.host_lengths is None
    assert packed.has_padding(4)
    assert packed.longest_rows == 2


def test_offsets_rewritten_in_place_are_read_anew_where_the_host_never_read_them():
    cu = offsets(0, 2, 4)
    packed = PackedSeqParams(cu, max_seqlen_q=8, validate=False)
    assert packed.token_rows(8).sum() == 4
    cu.copy_(offsets(0, 3, 7))
    assert packed.token_rows(8).sum() == 7


GOOD = offsets(0, 3, 8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(cu_seqlens_q=offsets(1, 3)), "cu_seqlens_q: starts at 1"),
        (dict(cu_seqlens_q=offsets(0, 5, 3)), "cu_seqlens_q: falls from 5 to 3"),
        (dict(cu_seqlens_q=offsets(0.0, 1.0, dtype=torch.float32)), "cu_seqlens_q: given dtype torch.float32"),
        (dict(cu_seqlens_q=GOOD[None]), r"cu_seqlens_q: given shape \(1, 3\)"),
        (dict(cu_seqlens_q=offsets()), r"cu_seqlens_q: given shape \(0,\)"),
        (dict(cu_seqlens_q="0,3"), "cu_seqlens_q: given str"),
        (dict(cu_seqlens_q=GOOD, cu_seqlens_kv=offsets(0, 4, 8)), "cu_seqlens_kv: given .*self-attention"),
        (dict(cu_seqlens_q=GOOD, cu_seqlens_kv=offsets(0, 8)), "cu_seqlens_kv: given 2 entries"),
        (dict(cu_seqlens_q=GOOD, cu_seqlens_q_padded=offsets(0, 2, 8)), "sequence 0 has room for 2 rows.*its 3 tokens"),
        (dict(cu_seqlens_q=GOOD, cu_seqlens_kv_padded=offsets(0, 4, 8)), "without cu_seqlens_q_padded"),
        (
            dict(cu_seqlens_q=GOOD, cu_seqlens_q_padded=offsets(0, 4, 9), cu_seqlens_kv_padded=offsets(0, 3, 9)),
            "cu_seqlens_kv_padded: given",
        ),
        (dict(cu_seqlens_q=GOOD, max_seqlen_q=4), "max_seqlen_q: given 4, .*5"),
        (dict(cu_seqlens_q=GOOD, max_seqlen_q=True), "max_seqlen_q: given True"),
        (dict(cu_seqlens_q=GOOD, qkv_format="sbhd"), "qkv_format: given 'sbhd'"),
        (dict(cu_seqlens_q=GOOD, validate=False), "max_seqlen_q: not given"),
        (dict(cu_seqlens_q=GOOD, cu_seqlens_kv=GOOD.to("meta")), "cu_seqlens_kv: given on meta"),
    ],
)
def test_bad_offsets_are_named(arguments, message):
    with pytest.raises(ValueError, match=message) as error:
        PackedSeqParams(**arguments)
    assert "\n" not in str(error.value)


def test_rows_that_the_offsets_reach_past_are_refused():
    with pytest.raises(ValueError, match="offsets end at 8, allowed is at most the 7 rows"):
        PackedSeqParams(GOOD).check_rows(7, torch.device("cpu"))
    with pytest.raises(ValueError, match="cu_seqlens_q: given on cpu"):
        PackedSeqParams(GOOD).check_rows(8, torch.device("meta"))


@pytest.mark.parametrize("fused", [False, True])
def test_padded_offsets_that_nobody_read_may_have_more_rows_than_the_longest_sequence_has_tokens(fused):
    torch.manual_seed(0)
    layer = MLASelfAttention(tiny(apply_rope_fusion=fused))
    starts, padded = torch.tensor([0, 3, 7]), torch.tensor([0, 5, 10])
    read = PackedSeqParams(starts, cu_seqlens_q_padded=padded)
    unread = PackedSeqParams(starts, cu_seqlens_q_padded=padded, max_seqlen_q=4, validate=False)
    assert (read.longest_within(10), unread.longest_within(10)) == (5, 10)
    hidden = torch.randn(10, 1, layer.config.hidden_size, requires_grad=True)
    outputs = [layer(hidden, packed_seq_params=packed)[0] for packed in (read, unread)]
    torch.testing.assert_close(*outputs)
    leaves = [hidden, *layer.parameters()]
    for gradients in zip(*(torch.autograd.grad(output.square().sum(), leaves) for output in outputs), strict=True):
        torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("backend", ["auto", "sdpa", "reference"])
@pytest.mark.parametrize(("starts", "rows"), [([0, 0], 5), ([0], 5), ([0, 0], 0), ([0, 2], 5)])
def test_every_parameter_has_a_gradient_whatever_a_pack_holds(backend, starts, rows):
    """As data-parallel wrappers expect."""
    layer = MLASelfAttention(tiny(core_attention_backend=backend))
    hidden = torch.randn(rows, 1, layer.config.hidden_size, requires_grad=True)
    layer(hidden, packed_seq_params=PackedSeqParams(starts))[0].sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        assert bool(parameter.grad.any()) == (starts[-1] > 0), name
