"""The dense layer against an oracle written here in fp64, in every layout that a user may bring."""

import copy
import pickle
import warnings

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from mla_attention import LatentCache, MLASelfAttention, PackedSeqParams
from mla_attention.configs import tiny

CONFIGS = {
    "yarn": tiny(),
    "rope": tiny(rope_type="rope"),
    "no_q_lora": tiny(q_lora_rank=None),
    "fused_down": tiny(mla_down_proj_fusion=True),
    "recompute": tiny(recompute_up_proj=True),
    "no_q_lora_recompute": tiny(q_lora_rank=None, recompute_up_proj=True),
    "bias": tiny(add_bias_linear=True),
    "reference": tiny(core_attention_backend="reference"),
    "gemm": tiny(kv_assembly="gemm"),
}


def build(config, dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    layer = MLASelfAttention(config, dtype=dtype)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2 + (1.0 if "layernorm" in name else 0.0))
    return layer


def rms(x, weight, eps):
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def rotate(x, angle, amplitude):
    """Interleaved pairs as complex numbers; the order of the rotated channels is invisible in q.k."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.full_like(angle, amplitude), angle)).flatten(-2)


def oracle(layer, hidden, positions=None, mask=None):
    """out `[S, B, H]` of the layer by the paper's equations, one einsum at a time."""
    c, w = layer.config, dict(layer.named_parameters())
    S, B, _ = hidden.shape
    n, dn, dr = c.num_attention_heads, c.qk_head_dim, c.qk_pos_emb_head_dim
    if c.q_lora_rank is None:
        q = hidden @ w["linear_q_proj.weight"].T
    else:
        q = hidden @ w["linear_q_down_proj.weight"].T
        q = rms(q, w["q_layernorm.weight"], c.layernorm_epsilon) @ w["linear_q_up_proj.weight"].T
    q = q.view(S, B, n, dn + dr)
    kv = hidden @ w["linear_kv_down_proj.weight"].T
    latent, k_pe = kv.split([c.kv_lora_rank, dr], -1)
    kv = (rms(latent, w["kv_layernorm.weight"], c.layernorm_epsilon) @ w["linear_kv_up_proj.weight"].T).view(
        S, B, n, -1
    )
    if positions is None:
        positions = torch.arange(S)[:, None].expand(S, B)
    angle = positions.double()[..., None] * layer.rotary.inv_freq  # [S, B, Dr/2]
    amplitude = layer.rotary.amplitude
    q_pe = rotate(q[..., dn:], angle[:, :, None], amplitude)
    k_pe = rotate(k_pe, angle, amplitude)
    logits = torch.einsum("sbnd,tbnd->bnst", q[..., :dn], kv[..., :dn]) + torch.einsum("sbnd,tbd->bnst", q_pe, k_pe)
    masked = torch.ones(S, S, dtype=torch.bool).triu(1)
    if mask is not None:
        masked = masked | mask
    weights = (logits * layer.softmax_scale).masked_fill(masked, -torch.inf).softmax(-1)
    weights = torch.nan_to_num(weights)  # rows with no key
    return torch.einsum("bnst,tbnv->sbnv", weights, kv[..., dn:]).flatten(-2) @ w["linear_proj.weight"].T


def gradients(layer, output, hidden, direction):
    names = [name for name, p in layer.named_parameters() if not name.endswith("bias")]
    tensors = [dict(layer.named_parameters())[name] for name in names]
    found = torch.autograd.grad((output * direction).sum(), [hidden, *tensors])
    return dict(zip(["hidden", *names], found, strict=True))


def assert_same_gradients(actual, expected, tolerance=1e-9):
    assert actual.keys() == expected.keys()
    for name, gradient in actual.items():
        scale = expected[name].abs().max().item() or 1.0
        assert (gradient - expected[name]).abs().max().item() <= tolerance * scale, name


@pytest.mark.parametrize("name", CONFIGS)
def test_output_and_every_gradient_equal_the_equations(name):
    layer = build(CONFIGS[name])
    hidden = torch.randn(7, 2, layer.config.hidden_size, dtype=torch.float64, requires_grad=True)
    direction = torch.randn_like(hidden)
    output, bias = layer(hidden)
    expected = oracle(layer, hidden)
    # tables are fp32, so fp64 agreement ends near 1e-7
    torch.testing.assert_close(output, expected, rtol=0, atol=2e-6)
    assert (bias is None) == (not layer.config.add_bias_linear)
    assert_same_gradients(
        gradients(layer, output, hidden, direction), gradients(layer, expected, hidden, direction), tolerance=3e-6
    )


@pytest.mark.parametrize("heads", [1, 3, 12])
def test_head_counts(heads):
    layer = build(tiny(num_attention_heads=heads))
    hidden = torch.randn(5, 1, layer.config.hidden_size, dtype=torch.float64)
    torch.testing.assert_close(layer(hidden)[0], oracle(layer, hidden), rtol=0, atol=2e-6)


@pytest.mark.parametrize("backend", ["sdpa", "reference", "flex"])
def test_attention_mask_is_combined_with_causality_and_empty_rows_give_zero(backend):
    layer = build(tiny(core_attention_backend=backend))
    hidden = torch.randn(6, 2, layer.config.hidden_size, dtype=torch.float64)
    mask = torch.zeros(2, 1, 6, 6, dtype=torch.bool)
    mask[0, 0, :, 1] = True
    mask[1, 0, 0, 0] = True  # the first token of the second sequence sees nothing
    with torch.no_grad():
        output = layer(hidden, mask)[0]
        torch.testing.assert_close(output, oracle(layer, hidden, mask=mask), rtol=0, atol=2e-6)
        assert torch.equal(output[0, 1], torch.zeros_like(output[0, 1]))


@pytest.mark.parametrize("shape", [(6, 6), (1, 1, 1, 6), (2, 1, 1, 6)])
def test_masks_broadcast(shape):
    layer = build(tiny())
    hidden = torch.randn(6, 2, layer.config.hidden_size, dtype=torch.float64)
    mask = torch.zeros(shape, dtype=torch.bool)
    mask[..., 2] = True
    torch.testing.assert_close(layer(hidden, mask)[0], oracle(layer, hidden, mask=mask), rtol=0, atol=2e-6)


def test_position_ids_change_the_rotation_only():
    layer = build(tiny())
    hidden = torch.randn(5, 2, layer.config.hidden_size, dtype=torch.float64)
    ids = torch.tensor([[3, 9, 0, 200, 4], [1, 1, 1, 5000, 7]])
    expected = oracle(layer, hidden, positions=ids.T)
    torch.testing.assert_close(layer(hidden, position_ids=ids)[0], expected, rtol=0, atol=5e-6)
    shared = torch.tensor([5, 6, 7, 8, 9])
    moved = layer(hidden, position_ids=shared)[0]
    torch.testing.assert_close(moved, oracle(layer, hidden), rtol=0, atol=5e-6)  # rotations are relative
    assert torch.equal(moved, layer(hidden, position_ids=shared.expand(2, 5))[0])
    packed = PackedSeqParams([0, 2, 5])
    row = hidden[:, :1]
    assert torch.equal(
        layer(row, packed_seq_params=packed)[0],
        layer(row, packed_seq_params=packed, position_ids=torch.tensor([0, 1, 0, 1, 2]))[0],
    )


@pytest.mark.parametrize("name", ["yarn", "no_q_lora", "recompute", "reference", "gemm"])
@pytest.mark.parametrize("lengths", [[5, 3], [1, 0, 6, 1], [8], [63, 64, 65, 1, 2]])
def test_packed_equals_each_sequence_alone(name, lengths):
    layer = build(CONFIGS[name])
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    hidden = torch.randn(int(offsets[-1]), 1, layer.config.hidden_size, dtype=torch.float64, requires_grad=True)
    output, _ = layer(hidden, packed_seq_params=PackedSeqParams(offsets.int()))
    alone = torch.cat([layer(piece)[0] for piece in hidden.split(lengths)])
    torch.testing.assert_close(output, alone, rtol=0, atol=1e-10)
    direction = torch.randn_like(output)
    assert_same_gradients(gradients(layer, output, hidden, direction), gradients(layer, alone, hidden, direction))


@pytest.mark.parametrize("backend", ["sdpa", "reference"])
@pytest.mark.parametrize("validate", [True, False])
def test_changing_one_sequence_leaves_the_others_bitwise_alone(backend, validate):
    if backend == "sdpa" and not validate:
        pytest.skip("sdpa needs the lengths on the host")
    layer = build(tiny(core_attention_backend=backend), dtype=torch.float32)
    packed = PackedSeqParams(torch.tensor([0, 1, 3, 66, 130]).int(), max_seqlen_q=64, validate=validate)
    hidden = torch.randn(130, 1, layer.config.hidden_size)
    changed = hidden.clone()
    changed[3:66] = torch.randn(63, 1, layer.config.hidden_size) * 100
    results = []
    direction = torch.randn_like(hidden)
    for h in (hidden, changed):
        h = h.clone().requires_grad_()
        output, _ = layer(h, packed_seq_params=packed)
        results.append((output, torch.autograd.grad(output, h, direction)[0]))
    keep = torch.ones(130, dtype=torch.bool)
    keep[3:66] = False
    for before, after in zip(*results, strict=True):
        assert torch.equal(before[keep], after[keep])
        assert not torch.equal(before[~keep], after[~keep])


def test_future_tokens_leave_earlier_rows_bitwise_alone():
    layer = build(tiny(), dtype=torch.float32)
    hidden = torch.randn(33, 2, layer.config.hidden_size)
    changed = hidden.clone()
    changed[20:] = 7.0
    assert torch.equal(layer(hidden)[0][:20], layer(changed)[0][:20])


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("validate", [True, False])
@pytest.mark.parametrize("bias", [False, True])
def test_nan_in_padding_never_leaks(backend, validate, bias):
    layer = build(tiny(core_attention_backend=backend, add_bias_linear=bias))
    clean = torch.randn(7, 1, layer.config.hidden_size, dtype=torch.float64)
    rows = torch.tensor(
        [0, 1, 2, 5, 6, 7, 8]
    )  # two sequences of 3 and 4 tokens in room for 5 and 5, then two more rows
    padded = torch.full((12, 1, layer.config.hidden_size), torch.nan, dtype=torch.float64)
    padded[rows] = clean
    padded.requires_grad_()
    packed = PackedSeqParams([0, 3, 7], cu_seqlens_q_padded=[0, 5, 10], max_seqlen_q=5, validate=validate)
    output, _ = layer(padded, packed_seq_params=packed)
    clean.requires_grad_()
    expected, _ = layer(clean, packed_seq_params=PackedSeqParams([0, 3, 7]))
    torch.testing.assert_close(output[rows], expected, rtol=0, atol=1e-10)
    padding = torch.ones(12, dtype=torch.bool)
    padding[rows] = False
    assert torch.equal(output[padding], torch.zeros_like(output[padding]))
    direction = torch.full_like(padded, torch.nan).detach()  # NaN gradients of padding rows must not leak either
    direction[rows] = torch.randn_like(clean)
    names = [n for n, _ in layer.named_parameters() if not n.endswith("bias")]
    parameters = [dict(layer.named_parameters())[n] for n in names]
    found = torch.autograd.grad(output, [padded, *parameters], direction)
    wanted = torch.autograd.grad(expected, [clean, *parameters], direction[rows])
    assert torch.equal(found[0][padding], torch.zeros_like(found[0][padding]))
    for name, a, b in zip(["hidden", *names], [found[0][rows], *found[1:]], wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9, msg=name)


@pytest.mark.parametrize("name", ["yarn", "gemm", "recompute", "fused_down", "no_q_lora", "reference"])
@pytest.mark.parametrize("packed", [None, PackedSeqParams([0]), PackedSeqParams([0, 0])])
def test_zero_tokens(name, packed):
    layer = build(CONFIGS[name])
    hidden = torch.zeros(0, 1, layer.config.hidden_size, dtype=torch.float64, requires_grad=True)
    output, _ = layer(hidden, packed_seq_params=packed)
    assert output.shape == hidden.shape
    output.sum().backward()
    assert hidden.grad.shape == hidden.shape
    assert all(p.grad is None or torch.count_nonzero(p.grad) == 0 for p in layer.parameters())


def test_non_contiguous_and_expanded_input():
    layer = build(tiny())
    hidden = torch.randn(2, 6, layer.config.hidden_size, dtype=torch.float64).transpose(0, 1)
    torch.testing.assert_close(layer(hidden)[0], layer(hidden.contiguous())[0], rtol=0, atol=1e-12)
    one = torch.randn(6, 1, layer.config.hidden_size, dtype=torch.float64, requires_grad=True)
    output = layer(one.expand(6, 3, -1))[0]
    torch.testing.assert_close(output, layer(one)[0].expand(6, 3, -1), rtol=0, atol=1e-12)
    output.sum().backward()  # an expanded (stride 0) incoming gradient
    assert torch.isfinite(one.grad).all()


@pytest.mark.parametrize("name", ["yarn", "recompute", "gemm"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_changes_no_gradient(name, reentrant):
    layer = build(CONFIGS[name])
    hidden = torch.randn(6, 2, layer.config.hidden_size, dtype=torch.float64, requires_grad=True)
    direction = torch.randn_like(hidden)
    plain = gradients(layer, layer(hidden)[0], hidden, direction)
    output = checkpoint(lambda h: layer(h)[0], hidden, use_reentrant=reentrant)
    layer.zero_grad()
    hidden.grad = None
    output.backward(direction)
    found = {name: p.grad for name, p in layer.named_parameters()} | {"hidden": hidden.grad}
    assert_same_gradients({k: found[k] for k in plain}, plain, tolerance=1e-12)


def test_hooks_that_keep_the_projections_change_no_gradient():
    layer = build(tiny())
    hidden = torch.randn(6, 2, layer.config.hidden_size, dtype=torch.float64, requires_grad=True)
    direction = torch.randn_like(hidden)
    names = ("linear_q_up_proj", "linear_kv_up_proj", "linear_kv_down_proj", "linear_q_down_proj")

    def run():
        kept = {}
        handles = [
            getattr(layer, name).register_forward_hook(lambda m, i, o, name=name: kept.__setitem__(name, o))
            for name in names
        ]
        output = layer(hidden)[0]
        for handle in handles:
            handle.remove()
        return output, kept

    output, kept = run()
    before = {name: value.detach().clone() for name, value in kept.items()}
    q = torch.nn.functional.linear(layer.q_layernorm(layer.linear_q_down_proj(hidden)), layer.linear_q_up_proj.weight)
    torch.testing.assert_close(before["linear_q_up_proj"], q, rtol=0, atol=1e-12)  # what the hook kept is not rotated
    plain = gradients(layer, output + 0 * sum(k.sum() for k in kept.values()), hidden, direction)
    expected = gradients(layer, oracle(layer, hidden), hidden, direction)
    assert_same_gradients(plain, expected, tolerance=3e-6)
    for name, value in kept.items():
        assert torch.equal(value, before[name]), name


def test_an_output_used_twice_and_a_second_backward():
    layer = build(tiny(recompute_up_proj=True))
    hidden = torch.randn(4, 1, layer.config.hidden_size, dtype=torch.float64, requires_grad=True)
    output = layer(hidden)[0]
    (output * 2 + output.sin()).sum().backward(retain_graph=True)
    first = hidden.grad.clone()
    hidden.grad = None
    (output * 2 + output.sin()).sum().backward()
    assert torch.equal(first, hidden.grad)


@pytest.mark.parametrize("name", ["yarn", "rope", "no_q_lora"])
@pytest.mark.parametrize("steps", [[1] * 6, [4, 1, 1], [2, 3, 1], [6]])
def test_generation_from_the_cache_equals_the_full_forward(name, steps):
    layer = build(CONFIGS[name]).eval()
    hidden = torch.randn(6, 2, layer.config.hidden_size, dtype=torch.float64)
    cache = LatentCache(layer.config, 2, 8, device="cpu", dtype=torch.float64)
    for _ in range(2):
        with torch.no_grad():
            pieces = [layer(piece, cache=cache)[0] for piece in hidden.split(steps)]
        torch.testing.assert_close(torch.cat(pieces), layer(hidden)[0], rtol=0, atol=1e-10)
        assert cache.length == 6
        cache.reset()


def test_query_key_value_have_the_documented_shapes_and_attend_to_the_output():
    layer = build(tiny())
    c = layer.config
    hidden = torch.randn(5, 2, c.hidden_size, dtype=torch.float64)
    query, key, value, q_latent, kv_latent = layer.get_query_key_value_tensors(hidden)
    dq = c.qk_head_dim + c.qk_pos_emb_head_dim
    assert query.shape == key.shape == (5, 2, c.num_attention_heads, dq)
    assert value.shape == (5, 2, c.num_attention_heads, c.v_head_dim)
    assert q_latent.shape == (5, 2, c.q_lora_rank)
    assert kv_latent.shape == (5, 2, c.kv_lora_rank)
    context = torch.nn.functional.scaled_dot_product_attention(
        *(t.permute(1, 2, 0, 3) for t in (query, key, value)), is_causal=True, scale=layer.softmax_scale
    )
    output = context.permute(2, 0, 1, 3).flatten(-2) @ layer.linear_proj.weight.T
    torch.testing.assert_close(output, layer(hidden)[0], rtol=0, atol=1e-12)
    packed = PackedSeqParams([0, 2, 5])
    query, *_, q_latent, _ = layer.get_query_key_value_tensors(hidden[:, :1], packed_seq_params=packed)
    assert query.shape == (5, c.num_attention_heads, dq)
    assert q_latent.shape == (5, c.q_lora_rank)
    assert build(tiny(q_lora_rank=None)).get_query_key_value_tensors(hidden)[3] is None


@pytest.mark.parametrize("packed", [None, PackedSeqParams([0, 2, 5], cu_seqlens_q_padded=[0, 3, 6])])
def test_largest_logits_and_the_clip_that_lowers_them(packed):
    layer = build(tiny(qk_clip=True, qk_clip_threshold=0.05))
    hidden = torch.randn(6, 1, layer.config.hidden_size, dtype=torch.float64)
    _, _, aux = layer(hidden, packed_seq_params=packed, return_aux=True)
    before = aux.max_attention_logits
    assert before.shape == (layer.config.num_attention_heads,)
    query, key, *_ = layer.get_query_key_value_tensors(hidden, packed_seq_params=packed)
    if packed is None:
        logits = torch.einsum("sbnd,tbnd->nst", query, key).tril() * layer.softmax_scale
        logits = logits.masked_fill(torch.ones(6, 6, dtype=torch.bool).triu(1), -torch.inf)
        torch.testing.assert_close(before, logits.amax((1, 2)))
    assert (before > 0.05).any()
    layer.clip_qk(before)
    after = layer(hidden, packed_seq_params=packed, return_aux=True)[2].max_attention_logits
    expected = torch.where(before > 0.05, 0.05, before)
    torch.testing.assert_close(after, expected, rtol=1e-9, atol=1e-9)
    unclipped = before <= 0.05
    assert torch.equal(after[unclipped], before[unclipped])
    assert layer(hidden, packed_seq_params=packed, return_aux=True)[2].indexer_loss is None


def test_deepcopy_and_pickle_give_the_same_layer():
    layer = build(tiny(), dtype=torch.float32)
    hidden = torch.randn(4, 1, layer.config.hidden_size)
    expected = layer(hidden)[0]
    assert torch.equal(copy.deepcopy(layer)(hidden)[0], expected)
    assert torch.equal(pickle.loads(pickle.dumps(layer))(hidden)[0], expected)


def test_autocast_and_low_precision_run_near_fp64():
    layer = build(tiny(), dtype=torch.float32)
    hidden = torch.randn(6, 1, layer.config.hidden_size)
    expected = layer(hidden)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = layer(hidden)[0]
    low = copy.deepcopy(layer).bfloat16()(hidden.bfloat16())[0]
    assert low.dtype == torch.bfloat16
    for other in (mixed, low):
        assert (other.float() - expected).norm() / expected.norm() < 3e-2


def test_initialisation_follows_the_config():
    torch.manual_seed(0)
    layer = MLASelfAttention(tiny(hidden_size=512, init_method_std=0.05, num_layers=8, add_bias_linear=True))
    assert layer.linear_kv_down_proj.weight.std().item() == pytest.approx(0.05, rel=0.05)
    assert layer.linear_proj.weight.std().item() == pytest.approx(0.05 / 4, rel=0.05)
    assert torch.equal(layer.kv_layernorm.weight, torch.ones_like(layer.kv_layernorm.weight))
    assert torch.equal(layer.linear_proj.bias, torch.zeros(512))


def test_state_dict_keys_are_megatrons():
    keys = ["linear_kv_down_proj.weight", "kv_layernorm.weight", "linear_kv_up_proj.weight", "linear_proj.weight"]
    with_q = ["linear_q_down_proj.weight", "q_layernorm.weight", "linear_q_up_proj.weight"]
    assert sorted(MLASelfAttention(tiny()).state_dict()) == sorted(keys + with_q)
    assert sorted(MLASelfAttention(tiny(mla_down_proj_fusion=True)).state_dict()) == sorted(keys + with_q)
    assert sorted(MLASelfAttention(tiny(q_lora_rank=None)).state_dict()) == sorted([*keys, "linear_q_proj.weight"])


def test_repr_names_the_choices():
    text = repr(MLASelfAttention(tiny()))
    for word in ("core_attention=auto", "rope=yarn (unfused)", "kv_assembly=", "softmax_scale="):
        assert word in text


@pytest.mark.parametrize("name", ["yarn", "gemm", "recompute", "no_q_lora"])
@pytest.mark.parametrize("packing", [False, True])
def test_compiles_without_graph_breaks(name, packing, monkeypatch):
    monkeypatch.setattr("mla_attention.rotary._TABLES", {})  # as in a process that has run no forward yet
    layer = build(CONFIGS[name], dtype=torch.float32)
    hidden = torch.randn(6, 1, layer.config.hidden_size, requires_grad=True)
    arguments = {"packed_seq_params": PackedSeqParams([0, 2, 6])} if packing else {}
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    direction = torch.randn_like(hidden)
    found = gradients(layer, compiled(hidden, **arguments)[0], hidden, direction)
    plain = gradients(layer, layer(hidden, **arguments)[0], hidden, direction)
    assert_same_gradients(found, plain, tolerance=1e-5)
    torch._dynamo.reset()


LAYER = MLASelfAttention(tiny())
H = LAYER.config.hidden_size
PACKED = PackedSeqParams([0, 2, 4])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.randn(4, 2, H + 1),), rf"hidden_states: given shape \[4, 2, {H + 1}\], allowed is \[S, B, {H}\]"),
        ((torch.randn(4, H),), "hidden_states: given shape"),
        ((torch.zeros(4, 2, H, dtype=torch.int64),), "hidden_states: given dtype torch.int64"),
        ((torch.zeros(4, 2, H, dtype=torch.bfloat16),), "given dtype torch.bfloat16, allowed is .*torch.float32"),
        ((torch.randn(4, 2, H), torch.zeros(4, 4)), "attention_mask: given dtype torch.float32"),
        ((torch.randn(4, 2, H), torch.zeros(3, 4, dtype=torch.bool)), r"attention_mask: given shape \[3, 4\]"),
        ((torch.randn(4, 2, H), torch.zeros(2, 4, 4, 4, dtype=torch.bool)), "attention_mask: given shape"),
    ],
)
def test_bad_positional_input(arguments, message):
    with pytest.raises(ValueError, match=message) as error:
        LAYER(*arguments)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("shape", "arguments", "message"),
    [
        ((4, 2), dict(packed_seq_params=PACKED), "batch size 2 with packed_seq_params"),
        ((3, 1), dict(packed_seq_params=PACKED), "offsets end at 4, allowed is at most the 3 rows"),
        (
            (4, 1),
            dict(packed_seq_params=PACKED, attention_mask=torch.zeros(4, 4, dtype=torch.bool)),
            "attention_mask: given together with packed_seq_params",
        ),
        ((4, 2), dict(position_ids=torch.zeros(3, dtype=torch.int64)), r"position_ids: given shape \[3\]"),
        ((4, 2), dict(position_ids=torch.zeros(4)), "position_ids: given dtype torch.float32"),
        ((4, 2), dict(topk_indices=torch.zeros(2, 4, 1, dtype=torch.int64)), "topk_indices: given to a dense layer"),
        (
            (4, 2),
            dict(cache=LatentCache(LAYER.config, 3, 8, device="cpu", dtype=torch.float32)),
            "cache: built for batch size 3.*2",
        ),
        (
            (4, 2),
            dict(cache=LatentCache(LAYER.config, 2, 3, device="cpu", dtype=torch.float32)),
            "cache: holds 0 tokens and is given 4 more, allowed are 3",
        ),
        (
            (4, 1),
            dict(packed_seq_params=PACKED, cache=LatentCache(LAYER.config, 1, 8, device="cpu", dtype=torch.float32)),
            "cache: given with packed_seq_params",
        ),
    ],
)
def test_bad_keyword_input(shape, arguments, message):
    with pytest.raises(ValueError, match=message) as error:
        LAYER(torch.randn(*shape, H), **arguments)
    assert "\n" not in str(error.value)


def test_bad_construction():
    with pytest.raises(ValueError, match="backend: given 'jax', allowed are 'torch', 'te'"):
        MLASelfAttention(tiny(), backend="jax")
    with pytest.raises(ValueError, match="batch_size: given 0"):
        LatentCache(tiny(), 0, 4, device="cpu", dtype=torch.float32)


def test_a_forced_backend_that_cannot_serve_the_device_says_why():
    layer = MLASelfAttention(tiny(core_attention_backend="varlen"))
    with pytest.raises(
        ValueError, match=r"core_attention_backend: given 'varlen' for qk dim \d+, v dim \d+, thd on cpu"
    ):
        layer(torch.randn(4, 1, H), packed_seq_params=PACKED)


def test_auto_never_warns_and_never_raises_on_a_cpu():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for packed in (None, PACKED, PackedSeqParams(torch.tensor([0, 2, 4]), max_seqlen_q=2, validate=False)):
            LAYER(torch.randn(4, 1, H), packed_seq_params=packed)
