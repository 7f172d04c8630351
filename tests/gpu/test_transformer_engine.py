"""The layer on the real Transformer Engine: against torch's modules and fp64, in FP8, and what it refuses.

Transformer Engine picks the system's cuDNN unless told otherwise; run with torch's (see the README) for all of these.
"""

import copy
import pickle
from functools import partial

import pytest
import torch

from mla_attention import LatentCache, MLASelfAttention, PackedSeqParams
from mla_attention.checkpoint import load_megatron_state_dict, to_megatron_state_dict
from mla_attention.configs import deepseek_v3, glm5, tiny
from mla_attention.core_attention.te import TEAttention, cudnn_version
from mla_attention.layers.te_import import import_te, te_obstacle
from tests.gpu.test_attention import MODELS, ROWS, SMALL, inputs, oracle, packed_params, run
from tests.gpu.test_core_attention import DIMS, PACKINGS, compare, layout, operands

OBSTACLE = te_obstacle() if torch.cuda.is_available() else "no GPU"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(OBSTACLE is not None, reason=str(OBSTACLE))]

DSA = dict(dsa_indexer_topk=128, dsa_indexer_n_heads=16)
FP8_RECIPES = ("DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling")
# Largest relative errors (Frobenius norm) of an FP8 layer against the same layer in bf16. Every GEMM rounds both of its
# operands to 3 bits of mantissa (2.6 % each, random signs); gradients in the two recipes with HYBRID format to 2 bits.
FP8_OUTPUT, FP8_GRADIENT = 0.13, 0.18  # measured on an H200: 0.086 to 0.115, and up to 0.158


def build(config, backend="te", like=None, dtype=torch.bfloat16):
    torch.manual_seed(0)
    layer = MLASelfAttention(config, backend=backend, device="cuda", dtype=dtype)
    with torch.no_grad():
        for parameter in layer.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=parameter.shape[1] ** -0.5)
            else:
                parameter.uniform_(0.5, 1.5)
    if like is not None:
        layer.load_state_dict(like.state_dict())
    return layer


def relative(found, expected):
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


def assert_near(left, right, tolerance=1e-2):
    for name in left:
        assert (left[name] - right[name]).abs().max() <= tolerance * right[name].abs().max(), name


@pytest.mark.parametrize("model", ["v3-8", "glm5-8", "v3-rope-8", "glm5-yarn-8"])
@pytest.mark.parametrize("fused_rope", [False, True])
@pytest.mark.parametrize("packing", [False, True])
def test_output_and_every_gradient_within_the_error_of_torch(model, fused_rope, packing):
    config = MODELS[model](apply_rope_fusion=fused_rope)
    ours = build(config, "torch")
    other = build(config, "te", like=ours)
    hidden, direction = inputs(config)
    arguments = {"packed_seq_params": packed_params()} if packing else {}
    exact = oracle(ours, hidden, direction, **arguments)
    found, torchs = (run(layer, hidden, direction, **arguments) for layer in (other, ours))
    for name in exact:
        error, allowed = (relative(result[name], exact[name]) for result in (found, torchs))
        assert error <= 1.5 * allowed + 1e-12, f"{name}: {error:.2e} where torch's layer has {allowed:.2e}"


def test_the_modules_are_transformer_engines():
    te = import_te()
    dense = build(MODELS["v3-8"](apply_rope_fusion=True))
    assert isinstance(dense.linear_q_up_proj, te.LayerNormLinear)
    assert isinstance(dense.linear_kv_up_proj, te.LayerNormLinear)
    assert isinstance(dense.linear_proj, te.Linear)
    assert isinstance(dense.kv_layernorm, te.RMSNorm)
    sparse = build(glm5(num_attention_heads=8, **SMALL, **DSA))
    assert isinstance(sparse.linear_q_up_proj, te.Linear)
    assert isinstance(sparse.core_attention.indexer.k_norm, te.LayerNorm)


@pytest.mark.parametrize("case", ["dense", "no query latent", "bias", "dsa"])
def test_state_dicts_interchange(case):
    config = {
        "dense": MODELS["v3-8"](),
        "no query latent": deepseek_v3(num_attention_heads=8, **{**SMALL, "q_lora_rank": None}),
        "bias": MODELS["glm5-8"](add_bias_linear=True),
        "dsa": glm5(num_attention_heads=8, **SMALL, **DSA),
    }[case]
    ours, other = build(config, "torch"), build(config, "te")
    assert list(ours.state_dict()) == list(other.state_dict())
    other.load_state_dict(ours.state_dict(), strict=True)
    hidden, direction = inputs(config)
    if case != "bias":
        assert_near(run(other, hidden, direction), run(ours, hidden, direction), 2e-2)
    again = build(config, "torch")
    again.load_state_dict(other.state_dict(), strict=True)
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in ours.state_dict().items())
    for fused_norm in (False, True):
        load_megatron_state_dict(again, to_megatron_state_dict(other, fused_norm=fused_norm))


@pytest.mark.parametrize("model", ["v3-8", "glm5-8"])
@pytest.mark.parametrize("option", ["recompute_up_proj", "mla_down_proj_fusion"])
def test_options_change_no_result(model, option):
    plain = build(MODELS[model](apply_rope_fusion=True))
    other = build(MODELS[model](apply_rope_fusion=True, **{option: True}), like=plain)
    hidden, direction = inputs(plain.config, batch=2)
    assert_near(run(other, hidden, direction), run(plain, hidden, direction))


@pytest.mark.parametrize("packing", [False, True])
def test_a_sparse_layer_equals_torchs(packing):
    config = glm5(num_attention_heads=8, apply_rope_fusion=True, **SMALL, **DSA)
    ours = build(config, "torch")
    other = build(config, "te", like=ours)
    hidden, direction = inputs(config)
    arguments = {"packed_seq_params": packed_params()} if packing else {}
    _, _, aux = ours(hidden, return_aux=True, **arguments)
    arguments["topk_indices"] = aux.topk_indices  # so that one tie of scores does not select another key
    found, expected = (run_given(layer, hidden, direction, **arguments) for layer in (other, ours))
    assert_near(found, expected, 2e-2)


def run_given(layer, hidden, direction, **arguments):
    """As `run`, for parameters that may take no part."""
    hidden = hidden.detach().requires_grad_()
    output = layer(hidden, **arguments)[0]
    parameters = {name: p for name, p in layer.named_parameters() if "indexer" not in name}
    found = torch.autograd.grad(output, [hidden, *parameters.values()], direction)
    return dict(zip(["output", "hidden", *parameters], [output.detach(), *found], strict=True))


def test_normed_latents_and_the_cache():
    ours = build(MODELS["glm5-8"](apply_rope_fusion=True), "torch").eval()
    other = build(ours.config, "te", like=ours).eval()
    hidden, _ = inputs(ours.config, batch=2)
    tensors = [layer.get_query_key_value_tensors(hidden) for layer in (ours, other)]
    for left, right in zip(*tensors, strict=True):
        assert (left - right).abs().max() <= 1e-2 * left.abs().max()
    cache = LatentCache(other.config, 2, 16, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        pieces = torch.cat([other(piece, cache=cache)[0] for piece in hidden[:9].split([4, 1, 1, 3])])
        assert (pieces - ours(hidden[:9])[0]).abs().max() <= 2e-2 * pieces.abs().max()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
@pytest.mark.parametrize("fp8", [False, True])
def test_copies_also_after_fp8(copied, fp8):
    te = import_te()
    layer = build(MODELS["v3-8"](apply_rope_fusion=True))
    hidden, direction = inputs(layer.config)
    expected = run(layer, hidden, direction)
    if fp8:
        with te.autocast(enabled=True, recipe=recipe("DelayedScaling")):
            run(layer, hidden, direction)
    again = copied(layer)
    assert again.state_dict().keys() == layer.state_dict().keys()
    assert not any("extra_state" in key for key in layer.state_dict())
    assert_near(run(again, hidden, direction), expected)
    if fp8:
        with te.autocast(enabled=True, recipe=recipe("DelayedScaling")):
            run(again, hidden, direction)


def test_from_the_meta_device():
    expected = build(MODELS["v3-8"]())
    layer = MLASelfAttention(expected.config, backend="te", device="meta", dtype=torch.bfloat16)
    layer.to_empty(device="cuda")
    layer.load_state_dict(expected.state_dict())
    hidden, direction = inputs(layer.config)
    assert_near(run(layer, hidden, direction), run(expected, hidden, direction))
    assert layer(hidden[:0])[0].shape == (0, 1, layer.config.hidden_size)


def test_torch_autocast():
    ours = build(MODELS["v3-8"](apply_rope_fusion=True), "torch", dtype=torch.float32)
    other = build(ours.config, "te", like=ours, dtype=torch.float32)
    hidden, direction = inputs(ours.config)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        found, expected = (run(layer, hidden.float(), direction) for layer in (other, ours))
    assert_near(found, expected, 2e-2)


@pytest.mark.parametrize("packing", [False, True])
def test_no_host_sync_in_forward_and_backward(packing):
    layer = build(MODELS["v3-8"](apply_rope_fusion=True))
    hidden, direction = inputs(layer.config)
    arguments = {"packed_seq_params": packed_params()} if packing else {}
    for _ in range(2):
        run(layer, hidden, direction, **arguments)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(layer, hidden, direction, **arguments)
    finally:
        torch.cuda.set_sync_debug_mode("default")


# --- FP8 ---


def recipe(name):
    from transformer_engine.common import recipe as recipes

    options = {"fp8_format": recipes.Format.HYBRID} if name == "DelayedScaling" else {}
    return getattr(recipes, name)(**options)


@pytest.mark.parametrize("name", FP8_RECIPES)
@pytest.mark.parametrize("model", ["v3-8", "glm5-8"])
@pytest.mark.parametrize("rows", [ROWS, 200])
def test_fp8_recipes_forward_and_backward(name, model, rows):
    te = import_te()
    layer = build(MODELS[model](apply_rope_fusion=True))
    hidden, direction = (t[:rows] for t in inputs(layer.config))
    expected = run(layer, hidden, direction)
    for _ in range(3 if name == "DelayedScaling" else 1):  # a delayed scale follows earlier steps
        with te.autocast(enabled=True, recipe=recipe(name)):
            found = run(layer, hidden, direction)
    errors = {key: relative(found[key], expected[key]) for key in found}
    print(f"{name} {model} {rows} rows:", ", ".join(f"{key} {error:.3f}" for key, error in errors.items()))
    assert all(torch.isfinite(t).all() for t in found.values())
    assert 1e-3 < errors["output"] <= FP8_OUTPUT  # less would mean that nothing ran in FP8
    assert max(errors.values()) <= FP8_GRADIENT
    assert_near(run(layer, hidden, direction), expected)  # and outside the context it is bf16 again


def test_fp8_packed_and_sparse_layers_run():
    te = import_te()
    for config in (MODELS["v3-8"](apply_rope_fusion=True), glm5(num_attention_heads=8, **SMALL, **DSA)):
        layer = build(config)
        hidden, direction = inputs(config)
        with te.autocast(enabled=True, recipe=recipe("Float8CurrentScaling")):
            found = run_given(layer, hidden, direction, packed_seq_params=packed_params())
        assert all(torch.isfinite(t).all() for t in found.values())


def test_fp8_refusals():
    te = import_te()
    narrow = MLASelfAttention(tiny(hidden_size=72), backend="te", device="cuda", dtype=torch.bfloat16)
    hidden = torch.randn(32, 1, 72, device="cuda", dtype=torch.bfloat16)
    with te.autocast(enabled=True), pytest.raises(ValueError, match=r"72 features in.*multiples of 16") as raised:
        narrow(hidden)
    assert "\n" not in str(raised.value)
    with te.autocast(enabled=True), pytest.raises(ValueError, match="multiples of 16"):
        MLASelfAttention(tiny(hidden_size=72), backend="te", device="cuda")
    recomputing = build(MODELS["v3-8"](recompute_up_proj=True))
    with te.autocast(enabled=True), pytest.raises(ValueError, match="recompute_up_proj"):
        recomputing(inputs(recomputing.config)[0].requires_grad_())
    with te.quantized_model_init(enabled=True), pytest.raises(ValueError, match="quantized_model_init"):
        MLASelfAttention(MODELS["v3-8"](), backend="te", device="cuda")


# --- core attention ---


@pytest.mark.parametrize(("qk_dim", "v_dim"), DIMS)
@pytest.mark.parametrize("packing", [None, *PACKINGS])
def test_core_attention_against_fp32(qk_dim, v_dim, packing):
    core = TEAttention(qk_dim, v_dim, qk_dim**-0.5 * 1.1)
    if packing is None:
        assert compare(core, qk_dim, v_dim, operands((640, 2, 4), qk_dim, v_dim), layout(640, 2)) < 1e-2
        return
    offsets = torch.tensor([0, *PACKINGS[packing]]).cumsum(0).int().cuda()
    rows = int(offsets[-1])
    tokens = layout(rows, 1, PackedSeqParams(offsets))
    assert compare(core, qk_dim, v_dim, operands((rows, 4), qk_dim, v_dim), tokens) < 1e-2


def test_padding_and_rows_in_no_sequence_give_zeros_and_finite_gradients():
    config = MODELS["glm5-8"](apply_rope_fusion=True)
    ours = build(config, "torch")
    other = build(config, "te", like=ours)
    hidden, direction = inputs(config)
    packed = PackedSeqParams(
        torch.tensor([0, 100, 250]).int().cuda(), cu_seqlens_q_padded=torch.tensor([0, 112, 272]).int().cuda()
    )
    hidden[100:112] = torch.nan
    hidden[272:] = torch.nan
    poison = torch.full((2**28,), torch.nan, device="cuda")  # what is freed here is what the kernels are given next
    del poison
    found, expected = (run(layer, hidden, direction, packed_seq_params=packed) for layer in (other, ours))
    assert all(torch.isfinite(t).all() for t in found.values())
    assert not found["output"][100:112].any()
    assert not found["output"][272:].any()
    assert_near(found, expected, 2e-2)


def test_wide_packed_heads_are_refused_on_older_cudnn(monkeypatch):
    layer = build(MODELS["glm5-8"](core_attention_backend="te"))
    hidden, _ = inputs(layer.config)
    monkeypatch.setattr("mla_attention.core_attention.te.cudnn_version", lambda: (9, 14, 0))
    with pytest.raises(ValueError, match=r"thd on cuda:0 .*cuDNN 9\.14\.0.*9\.19") as raised:
        layer(hidden, packed_seq_params=packed_params())
    assert "\n" not in str(raised.value)
    layer(hidden)
    auto = build(MODELS["glm5-8"](), like=layer)
    auto(hidden, packed_seq_params=packed_params())


def test_no_backend_names_what_was_asked_for(monkeypatch):
    from transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention import _attention_backends

    layer = build(MODELS["v3-8"](core_attention_backend="te"))
    hidden, _ = inputs(layer.config)
    for name in ("FUSED", "UNFUSED", "FLASH"):
        monkeypatch.setenv(f"NVTE_{name}_ATTN", "0")
    _attention_backends["backend_selection_requires_update"] = True
    try:
        with pytest.raises(ValueError, match="given 'te'") as raised:
            layer(hidden)
    finally:
        monkeypatch.undo()
        _attention_backends["backend_selection_requires_update"] = True
    message = str(raised.value)
    assert "\n" not in message
    facts = ["qk dim 192", "v dim 128", "sbhd", "capability 9.0", ".".join(map(str, cudnn_version()))]
    assert all(fact in message for fact in facts), message


def test_auto_takes_transformer_engine():
    layer = build(MODELS["v3-8"]())
    tokens = partial(layer._token_layout, inputs(layer.config)[0], None, position_ids=None, cache=None)
    assert layer.core_attention.choice(torch.device("cuda"), tokens(packed=None)) == "te"
    assert layer.core_attention.choice(torch.device("cuda"), tokens(packed=packed_params())) == "te"
