"""Each core attention back end on a GPU: forward and gradients against fp32, for the head dims of published models."""

import pytest
import torch

from mla_attention import PackedSeqParams
from mla_attention.core_attention.choose import _CLASSES, AutoAttention
from mla_attention.core_attention.eager import EagerAttention
from mla_attention.token_layout import TokenLayout

pytestmark = pytest.mark.gpu

DIMS = [(192, 128), (256, 256)]
PACKINGS = {
    "one": [1024],
    "four": [300, 1, 400, 323],
    "long": [1100, 1400],
    "short": [64] * 16,
}


def layout(rows, batch, packed=None):
    empty = torch.empty(0, device="cuda")
    return TokenLayout(batch, rows, empty, empty, packed)


def operands(shape, qk_dim, v_dim, dtype=torch.bfloat16):
    torch.manual_seed(0)
    make = lambda d: torch.randn(*shape, d, device="cuda", dtype=dtype, requires_grad=True)  # noqa: E731
    return make(qk_dim), make(qk_dim), make(v_dim)


def compare(core, qk_dim, v_dim, tensors, tokens):
    """Largest error of output and gradients against fp32, relative to the largest value."""
    reference = EagerAttention(qk_dim, v_dim, core.scale)
    output = core(*tensors, tokens)
    assert output.dtype == tensors[2].dtype
    direction = torch.randn_like(output)
    found = [output, *torch.autograd.grad(output, tensors, direction)]
    wide = [t.detach().float().requires_grad_() for t in tensors]
    expected = reference(*wide, tokens)
    wanted = [expected, *torch.autograd.grad(expected, wide, direction.float())]
    return max(((f.float() - w).abs().max() / w.abs().max()).item() for f, w in zip(found, wanted, strict=True))


@pytest.mark.parametrize("name", [*_CLASSES, "auto"])
@pytest.mark.parametrize(("qk_dim", "v_dim"), DIMS)
def test_sbhd(name, qk_dim, v_dim):
    core = (AutoAttention if name == "auto" else _CLASSES[name])(qk_dim, v_dim, qk_dim**-0.5)
    assert compare(core, qk_dim, v_dim, operands((640, 2, 4), qk_dim, v_dim), layout(640, 2)) < 1e-2


@pytest.mark.parametrize("name", [*_CLASSES, "auto"])
@pytest.mark.parametrize(("qk_dim", "v_dim"), DIMS)
@pytest.mark.parametrize("lengths", PACKINGS)
def test_packed(name, qk_dim, v_dim, lengths):
    core = (AutoAttention if name == "auto" else _CLASSES[name])(qk_dim, v_dim, qk_dim**-0.5)
    offsets = torch.tensor([0, *PACKINGS[lengths]]).cumsum(0).int().cuda()
    rows = int(offsets[-1])
    tokens = layout(rows, 1, PackedSeqParams(offsets))
    assert compare(core, qk_dim, v_dim, operands((rows, 4), qk_dim, v_dim), tokens) < 1e-2


@pytest.mark.parametrize("name", ["sdpa", "auto"])
@pytest.mark.parametrize(("qk_dim", "v_dim"), DIMS)
def test_value_may_be_a_strided_view(name, qk_dim, v_dim):
    core = (AutoAttention if name == "auto" else _CLASSES[name])(qk_dim, v_dim, qk_dim**-0.5)
    query, key, _ = operands((512, 1, 4), qk_dim, v_dim)
    both = torch.randn(512, 1, 4, 64 + v_dim, device="cuda", dtype=torch.bfloat16)
    value = both[..., 64:].requires_grad_()
    assert compare(core, qk_dim, v_dim, (query, key, value), layout(512, 1)) < 1e-2


@pytest.mark.parametrize("backend", ["auto", "varlen"])
def test_offsets_never_read_on_the_host_need_no_sync(backend):
    core = (AutoAttention if backend == "auto" else _CLASSES[backend])(192, 128, 192**-0.5)
    offsets = torch.tensor([0, 300, 1024], dtype=torch.int32, device="cuda")
    tokens = layout(1024, 1, PackedSeqParams(offsets, max_seqlen_q=724, validate=False))
    tensors = operands((1024, 4), 192, 128)
    core(*tensors, tokens).sum().backward()  # warm
    torch.cuda.set_sync_debug_mode("error")
    try:
        output = core(*tensors, tokens)
        output.backward(torch.ones_like(output))
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_cudnn_serves_the_dims_of_published_models():
    for qk_dim, v_dim in DIMS:
        q, k, v = (t.permute(1, 2, 0, 3) for t in operands((256, 1, 4), qk_dim, v_dim))
        with torch.nn.attention.sdpa_kernel([torch.nn.attention.SDPBackend.CUDNN_ATTENTION]):
            torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()


@pytest.mark.parametrize("name", ["sdpa", "auto"])
@pytest.mark.parametrize("strided_first", [True, False])
@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize(("qk_dim", "v_dim"), DIMS)
def test_the_same_attention_with_gradients_of_other_strides(name, strided_first, packing, qk_dim, v_dim):
    """torch finds cuDNN's backward plans without looking at the gradient's strides, which are in the plan: whichever
    came first, the other was read wrongly, or past its end (a layer in two groups of heads, then one of half the
    heads)."""
    core = (AutoAttention if name == "auto" else _CLASSES[name])(qk_dim, v_dim, qk_dim**-0.5)
    rows = 1280 + 128 * strided_first + 256 * packing + 512 * (name == "auto")  # shapes that no other test has used
    lead, tokens = (rows, 1, 4), layout(rows, 1)
    if packing:
        offsets = torch.tensor([0, rows], dtype=torch.int32, device="cuda")
        lead, tokens = (rows, 4), layout(rows, 1, PackedSeqParams(offsets))
    tensors = operands(lead, qk_dim, v_dim)
    wide = [t.detach().float().requires_grad_() for t in tensors]
    expected = EagerAttention(qk_dim, v_dim, core.scale)(*wide, tokens)
    both = torch.randn(*lead[:-1], 8, v_dim, device="cuda", dtype=torch.bfloat16)
    strided = both[..., :4, :]
    for direction in (strided, strided.contiguous()) if strided_first else (strided.contiguous(), strided):
        found = torch.autograd.grad(core(*tensors, tokens), tensors, direction)
        wanted = torch.autograd.grad(expected, wide, direction.float(), retain_graph=True)
        for f, w in zip(found, wanted, strict=True):
            assert (f.float() - w).abs().max() <= 1e-2 * w.abs().max()
