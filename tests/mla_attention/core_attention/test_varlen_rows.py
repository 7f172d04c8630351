"""Rows past the last offset, which the flash kernels neither read nor write."""

import pytest
import torch

from mla_attention import MLASelfAttention, PackedSeqParams
from mla_attention.configs import tiny


class FlashLike(torch.autograd.Function):
    """Causal attention of each sequence; rows in none are left as memory was: NaN here, forward and backward."""

    @staticmethod
    def forward(ctx, query, key, value, offsets, scale):
        with torch.enable_grad():
            ctx.leaves = [t.detach().float().requires_grad_() for t in (query, key, value)]
            pieces = []
            for start, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
                q, k, v = (t[start:end].transpose(0, 1) for t in ctx.leaves)
                attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
                pieces.append(attended.transpose(0, 1))
            ctx.attended = torch.cat(pieces)
        output = torch.full_like(value, torch.nan)
        output[: ctx.attended.shape[0]] = ctx.attended.detach().to(value.dtype)
        return output

    @staticmethod
    def backward(ctx, gradient):
        rows = ctx.attended.shape[0]
        found = torch.autograd.grad(ctx.attended, ctx.leaves, gradient[:rows].float())
        for t in found:
            t[rows:] = torch.nan
        return *(t.to(gradient.dtype) for t in found), None, None


@pytest.mark.parametrize("validate", [True, False])
def test_what_lies_there_never_reaches_an_output_or_a_gradient(monkeypatch, validate):
    def flash(query, key, value, offsets, to_k, longest, longest_k, *, scale, window_size):
        assert window_size == (-1, 0)
        assert longest == longest_k
        return FlashLike.apply(query, key, value, offsets, scale)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", flash)
    monkeypatch.setattr("mla_attention.core_attention.varlen.VarlenAttention.refusal", lambda *_, **__: None)
    torch.manual_seed(0)
    layer = MLASelfAttention(tiny(core_attention_backend="varlen"), dtype=torch.bfloat16)
    hidden = torch.randn(9, 1, layer.config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    packed = PackedSeqParams([0, 3, 6], max_seqlen_q=3, validate=validate)
    output, _ = layer(hidden, packed_seq_params=packed)
    output.float().square().sum().backward()
    assert torch.equal(output[6:], torch.zeros_like(output[6:]))
    assert torch.isfinite(output).all()
    for name, tensor in [("hidden", hidden), *layer.named_parameters()]:
        assert torch.isfinite(tensor.grad).all(), name
