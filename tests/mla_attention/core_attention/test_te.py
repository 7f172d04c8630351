"""Core attention on Transformer Engine, with a stand-in for it: what it is called with, and what is refused."""

import copy
import pickle
import sys
from types import SimpleNamespace

import pytest
import torch

from mla_attention import MLASelfAttention, PackedSeqParams
from mla_attention.communication import Communication
from mla_attention.configs import tiny
from mla_attention.core_attention.eager import EagerAttention
from mla_attention.core_attention.te import TEAttention
from mla_attention.token_layout import TokenLayout
from tests.mla_attention.layers import fake_transformer_engine as fake

CUDA = torch.device("cuda")
GLM5, V3 = (256, 256), (192, 128)


@pytest.fixture
def te(monkeypatch):
    yield fake.install(monkeypatch)
    sys.modules.pop(fake.OURS, None)


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))


def operands(*shape):
    make = lambda width: torch.randn(*shape, width, requires_grad=True)  # noqa: E731
    return make(24), make(24), make(16)


def layout(rows, batch, packed=None, cp_size=1):
    return TokenLayout(batch, rows, torch.empty(0), torch.empty(0), packed, cp_size=cp_size)


def exchanging(cp_comm_type="p2p"):
    """On one of two ranks that are not there."""
    core = TEAttention(24, 16, 0.3, cp_comm_type=cp_comm_type)
    core.exchange_over(SimpleNamespace(group="the group", ranks=(4, 6), size=2))
    return core


def assert_like_eager(tensors, tokens, keep=slice(None)):
    found, expected = (cls(24, 16, 0.3)(*tensors, tokens) for cls in (TEAttention, EagerAttention))
    torch.testing.assert_close(found[keep], expected[keep])
    direction = torch.zeros_like(expected)
    direction[keep] = torch.randn_like(expected[keep])
    gradients = (torch.autograd.grad(output, tensors, direction) for output in (found, expected))
    for left, right in zip(*gradients, strict=True):
        torch.testing.assert_close(left, right)
    return found


def test_sbhd(te):
    tensors = operands(9, 2, 3)
    assert_like_eager(tensors, layout(9, 2))


@pytest.mark.parametrize("validate", [False, True])
def test_packed_with_padding_and_rows_beyond_the_last_offset(te, validate):
    offsets, padded = [0, 4, 4, 9], [0, 6, 6, 11]
    packed = PackedSeqParams(offsets, cu_seqlens_q_padded=padded, max_seqlen_q=6, validate=validate)
    keep = [0, 1, 2, 3, 6, 7, 8, 9, 10]
    found = assert_like_eager(operands(14, 3), layout(14, 1, packed), keep)
    assert torch.equal(found[11:], torch.zeros_like(found[11:]))


@pytest.mark.parametrize("offsets", [[0], [0, 0]])
def test_packs_without_a_token(te, offsets):
    packed = PackedSeqParams(offsets, max_seqlen_q=0)
    tensors = operands(3, 2)
    output = TEAttention(24, 16, 0.3)(*tensors, layout(3, 1, packed))
    assert torch.equal(output, torch.zeros(3, 2, 16))
    output.sum().backward()
    assert TEAttention(24, 16, 0.3)(*operands(0, 2), layout(0, 1, packed)).shape == (0, 2, 16)


def test_it_is_built_once_and_stays_out_of_state_and_copies(te):
    core = TEAttention(24, 16, 0.3)
    tensors = operands(5, 1, 2)
    first = core(*tensors, layout(5, 1))
    built = dict(core._built)
    core(*tensors, layout(5, 1))
    assert core._built == built
    assert core.state_dict() == {}
    assert list(core.modules()) == [core]
    for copied in (copy.deepcopy(core), pickle.loads(pickle.dumps(core))):
        assert copied._built == {}
        assert torch.equal(copied(*tensors, layout(5, 1)), first)


@pytest.mark.parametrize("cudnn", [(9, 14, 0), (9, 18, 1)])
def test_wide_packed_heads_are_refused_on_older_cudnn(monkeypatch, cudnn):
    fake.install(monkeypatch, cudnn=cudnn)
    version = ".".join(map(str, cudnn))
    with pytest.raises(
        ValueError,
        match=rf"qk dim 256, v dim 256, thd on cuda \(compute capability 9\.0\); .* cuDNN {version}.* 9\.19 or newer",
    ) as raised:
        TEAttention(*GLM5, 1.0).check(CUDA, packed=True)
    assert "\n" not in str(raised.value)
    TEAttention(*GLM5, 1.0).check(CUDA, packed=False)
    TEAttention(*V3, 1.0).check(CUDA, packed=True)


def test_wide_packed_heads_are_served_on_newer_cudnn(te):
    TEAttention(*GLM5, 1.0).check(CUDA, packed=True)


def test_auto_avoids_what_is_refused(monkeypatch):
    fake.install(monkeypatch, cudnn=(9, 14, 0))
    layer = MLASelfAttention(tiny(qk_head_dim=192, v_head_dim=256), backend="te")
    hidden = torch.randn(8, 1, 64)
    plain, packed = (
        layer._token_layout(hidden, None, params, None, None) for params in (None, PackedSeqParams([0, 8]))
    )
    assert layer.core_attention.choice(CUDA, plain) == "te"
    with pytest.warns(UserWarning, match=r"'auto' goes without 'te': .*cuDNN 9\.14\.0"):
        assert layer.core_attention.choice(CUDA, packed) in ("sdpa", "varlen")
    sys.modules.pop(fake.OURS, None)


def test_context_parallel_ranks_are_refused_without_an_exchange(te):
    core = TEAttention(*V3, 1.0)
    core.exchange_over(SimpleNamespace(group="the group", ranks=(4, 6), size=2))
    for unserved in (core, TEAttention(*V3, 1.0, cp_comm_type="p2p")):  # without a way, without ranks
        with pytest.raises(ValueError, match=r"context parallelism allowed are .* 'te' with a cp_comm_type") as caught:
            unserved.check(CUDA, packed=False, cp_size=2)
        assert "\n" not in str(caught.value)
        unserved.check(CUDA, packed=False)
    exchanging().check(CUDA, packed=False, cp_size=2)


@pytest.mark.parametrize("cp_comm_type", ["p2p", "all_gather", "a2a"])
def test_the_ranks_are_handed_over_once(te, cp_comm_type):
    core = exchanging(cp_comm_type)
    module = core._module(2, torch.device("cpu"))
    group, ranks, stream, how = module.exchange
    assert (group, ranks, how) == ("the group", [4, 6], cp_comm_type)
    assert core._module(2, torch.device("cpu")) is module
    assert exchanging()._module(2, torch.device("cpu")).exchange[2] is stream  # one for all layers
    assert f"cp_comm_type={cp_comm_type}" in repr(core)
    core.exchange_over(None)
    assert core._module(2, torch.device("cpu")).exchange == ()
    assert not core.context_parallel


def test_what_an_exchange_does_not_serve_is_one_line(te, monkeypatch):
    monkeypatch.setattr(fake.DotProductAttention, "attend_across_ranks", refuse)
    with pytest.raises(ValueError, match=r"cp_comm_type: given 'p2p', which .* 2\.20\.2 refuses") as caught:
        exchanging()(*operands(4, 1, 2), layout(4, 1, cp_size=2))
    message = str(caught.value)
    assert "\n" not in message
    assert all(fact in message for fact in ("sbhd", "2 heads on 2 ranks", "(no kernel today)"))
    monkeypatch.setattr(fake.DotProductAttention, "forward", refuse)
    with pytest.raises(AssertionError):  # of one rank: nothing that a cp_comm_type would explain
        TEAttention(24, 16, 0.3)(*operands(4, 1, 2), layout(4, 1))


def test_an_exchange_of_heads_deals_out_even_numbers():
    """Transformer Engine's own rule, beside a multiple of the ranks."""
    comm = Communication(cp_size=3, cp_comm_type="a2a")
    assert comm.heads_of_rank(12) == 12
    with pytest.raises(ValueError, match=r"given 'a2a' for 9 heads on each of 3 .* multiples of 6") as caught:
        comm.heads_of_rank(9)
    assert "\n" not in str(caught.value)
    assert Communication(cp_size=3, cp_comm_type="p2p").heads_of_rank(9) == 9


def refuse(*args, **how):
    raise AssertionError("no\nkernel today")


def test_packs_whose_lengths_nobody_read_are_refused_on_several_ranks(te):
    packed = PackedSeqParams([0, 8], max_seqlen_q=8, validate=False)
    with pytest.raises(
        ValueError, match="packed_seq_params: built with validate=False, but cp_comm_type 'p2p'"
    ) as caught:
        exchanging()(*operands(4, 2), layout(4, 1, packed, cp_size=2))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_no_backend_names_dims_format_capability_and_versions(te, monkeypatch, packing, ranks):
    monkeypatch.setattr(fake.DotProductAttention, "has_backend", False)
    monkeypatch.setattr("mla_attention.core_attention.te.describe", lambda device: "cuda:0 (compute capability 9.0)")
    packed = PackedSeqParams([0, 4 * ranks]) if packing else None
    tensors = operands(4, 2) if packing else operands(4, 1, 2)
    core = TEAttention(24, 16, 0.3) if ranks == 1 else exchanging()
    with pytest.raises(ValueError, match="core_attention_backend: given 'te'") as raised:
        core(*tensors, layout(4, 1, packed, ranks))
    message = str(raised.value)
    assert "\n" not in message
    expected = ["qk dim 24", "v dim 16", "thd" if packing else "sbhd", "float32", "capability 9.0", "2.20.2", "9.19.0"]
    expected += ["cp_comm_type 'p2p' over 2 ranks", "others with cp_comm_type None"] if ranks == 2 else []
    assert all(fact in message for fact in expected)


def test_attention_masks_are_refused(te):
    tokens = TokenLayout(1, 5, torch.empty(0), torch.empty(0), attention_mask=torch.zeros(1, 1, 5, 5, dtype=torch.bool))
    with pytest.raises(ValueError, match="attention_mask: given with core_attention_backend 'te'"):
        TEAttention(24, 16, 0.3)(*operands(5, 1, 2), tokens)
