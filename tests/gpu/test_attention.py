"""The whole layer on a GPU in bf16: fused against unfused, split against gemm, packed against alone."""

import copy

import pytest
import torch

from mla_attention import LatentCache, MLASelfAttention, PackedSeqParams
from mla_attention.configs import deepseek_v3, glm5

pytestmark = pytest.mark.gpu

# The published head dims; hidden size and ranks small, so that an fp64 oracle is cheap.
SMALL = dict(hidden_size=512, q_lora_rank=256, kv_lora_rank=128)
DENSE = dict(experimental_attention_variant=None)
MODELS = {
    "glm5-8": lambda **o: glm5(num_attention_heads=8, **SMALL, **DENSE, **o),
    "glm5-64": lambda **o: glm5(num_attention_heads=64, **SMALL, **DENSE, **o),
    "glm5-yarn-8": lambda **o: glm5(
        num_attention_heads=8, rope_type="yarn", rotary_scaling_factor=4.0, **SMALL, **DENSE, **o
    ),
    "glm5-yarn-64": lambda **o: glm5(
        num_attention_heads=64, rope_type="yarn", rotary_scaling_factor=4.0, **SMALL, **DENSE, **o
    ),
    "v3-8": lambda **o: deepseek_v3(num_attention_heads=8, **SMALL, **o),
    "v3-128": lambda **o: deepseek_v3(num_attention_heads=128, **SMALL, **o),
    "v3-rope-8": lambda **o: deepseek_v3(num_attention_heads=8, rope_type="rope", **SMALL, **o),
    "v3-rope-128": lambda **o: deepseek_v3(num_attention_heads=128, rope_type="rope", **SMALL, **o),
    "v3-12": lambda **o: deepseek_v3(num_attention_heads=12, **SMALL, **o),
}
ROWS = 384
PACKED = [100, 1, 0, 200, 83]


def build(config, dtype=torch.bfloat16, like=None):
    torch.manual_seed(0)
    layer = MLASelfAttention(config, device="cuda", dtype=dtype)
    with torch.no_grad():
        for parameter in layer.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=parameter.shape[1] ** -0.5)
    if like is not None:
        layer.load_state_dict(like.state_dict())
    return layer


def packed_params():
    return PackedSeqParams(torch.tensor([0, *PACKED]).cumsum(0).int().cuda())


def run(layer, hidden, direction, **arguments):
    hidden = hidden.detach().to(layer.linear_proj.weight.dtype).requires_grad_()
    output, _ = layer(hidden, **arguments)
    # An indexer without a loss takes no gradient; every other parameter must, so an unused one raises.
    parameters = {name: p for name, p in layer.named_parameters() if ".indexer." not in name}
    found = torch.autograd.grad(output, [hidden, *parameters.values()], direction.to(output.dtype))
    return dict(zip(["output", "hidden", *parameters], [output.detach(), *found], strict=True))


def inputs(config, batch=1):
    torch.manual_seed(1)
    shape = (ROWS, batch, config.hidden_size)
    return torch.randn(shape, device="cuda").bfloat16(), torch.randn(shape, device="cuda").bfloat16()


def oracle(layer, hidden, direction, **arguments):
    """The unfused layer in fp64, with the same (bf16) weights and inputs."""
    config = layer.config.__class__(
        **{
            **vars(layer.config),
            "apply_rope_fusion": False,
            "kv_assembly": "split",
            "core_attention_backend": "reference",
        }
    )
    exact = MLASelfAttention(config, device=hidden.device, dtype=torch.float64)
    exact.load_state_dict(layer.state_dict())
    return run(exact, hidden, direction, **arguments)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("assembly", ["split", "gemm"])
def test_fused_equals_unfused_and_is_no_further_from_fp64(model, packing, assembly):
    fused = build(MODELS[model](apply_rope_fusion=True, kv_assembly=assembly))
    unfused = build(MODELS[model](apply_rope_fusion=False, kv_assembly="split"), like=fused)
    hidden, direction = inputs(fused.config)
    arguments = {"packed_seq_params": packed_params()} if packing else {}
    a, b = run(fused, hidden, direction, **arguments), run(unfused, hidden, direction, **arguments)
    exact = oracle(fused, hidden, direction, **arguments)
    for name in a:
        scale = b[name].abs().max()
        assert (a[name] - b[name]).abs().max() <= 1e-2 * scale, name
        error_a, error_b = ((t[name].double() - exact[name]).norm() for t in (a, b))
        # both round in other places; neither may drift: a quarter of the unfused error is the rounding band
        assert error_a <= 1.25 * error_b + 1e-12, name


@pytest.mark.parametrize("model", ["glm5-8", "v3-8"])
@pytest.mark.parametrize("option", ["recompute_up_proj", "mla_down_proj_fusion"])
def test_options_change_no_result(model, option):
    plain = build(MODELS[model](apply_rope_fusion=True))
    other = build(MODELS[model](apply_rope_fusion=True, **{option: True}), like=plain)
    hidden, direction = inputs(plain.config, batch=2)
    a, b = run(plain, hidden, direction), run(other, hidden, direction)
    for name in a:
        assert (a[name] - b[name]).abs().max() <= 1e-2 * b[name].abs().max(), name


def test_recompute_keeps_less():
    def kept(recompute):
        layer = build(MODELS["v3-128"](apply_rope_fusion=True, recompute_up_proj=recompute))
        hidden = torch.randn(2048, 1, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        before = torch.cuda.memory_allocated()
        output = layer(hidden)[0]
        after = torch.cuda.memory_allocated() - before
        output.sum().backward()
        return after

    query_key_value = 2048 * 128 * (192 + 192 + 128) * 2
    assert kept(False) - kept(True) > 0.95 * query_key_value


@pytest.mark.parametrize("model", ["glm5-8", "v3-8"])
def test_packed_equals_alone_and_isolation_is_bitwise(model):
    layer = build(MODELS[model](apply_rope_fusion=True))
    hidden, direction = inputs(layer.config)
    together = run(layer, hidden, direction, packed_seq_params=packed_params())
    alone = torch.cat([layer(piece)[0] for piece in hidden.split(PACKED) if piece.shape[0]])
    assert (together["output"] - alone).abs().max() <= 1e-2 * alone.abs().max()
    changed = hidden.clone()
    changed[101:301] = 3.0
    other = run(layer, changed, direction, packed_seq_params=packed_params())
    keep = torch.ones(ROWS, dtype=torch.bool, device="cuda")
    keep[101:301] = False
    for name in ("output", "hidden"):
        assert torch.equal(together[name][keep], other[name][keep])


def test_no_host_sync_in_forward_and_backward():
    layer = build(MODELS["v3-8"](apply_rope_fusion=True))
    hidden, direction = inputs(layer.config)
    packed = packed_params()
    for arguments in ({}, {"packed_seq_params": packed}):
        run(layer, hidden, direction, **arguments)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            run(layer, hidden, direction, **arguments)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("packing", [False, True])
def test_a_training_step_is_captured_in_a_cuda_graph(packing):
    layer = build(MODELS["v3-8"](apply_rope_fusion=True))
    hidden, direction = inputs(layer.config)
    arguments = {}
    if packing:
        offsets = torch.tensor([0, 100, 300], dtype=torch.int32, device="cuda")
        arguments["packed_seq_params"] = PackedSeqParams(offsets, max_seqlen_q=ROWS, validate=False)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            run(layer, hidden, direction, **arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    static = hidden.clone()
    with torch.cuda.graph(graph):
        captured = run(layer, static, direction, **arguments)
    static.copy_(hidden * 0.5)
    if packing:
        offsets.copy_(torch.tensor([0, 50, 350]))
        arguments["packed_seq_params"] = PackedSeqParams(offsets, max_seqlen_q=ROWS, validate=False)
    graph.replay()
    expected = run(layer, static, direction, **arguments)
    for name in captured:
        assert (captured[name] - expected[name]).abs().max() <= 1e-2 * expected[name].abs().max(), name


def test_generation_equals_the_full_forward():
    layer = build(MODELS["glm5-8"](apply_rope_fusion=True)).eval()
    hidden, _ = inputs(layer.config, batch=2)
    hidden = hidden[:9]
    cache = LatentCache(layer.config, 2, 16, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        pieces = torch.cat([layer(piece, cache=cache)[0] for piece in hidden.split([4, 1, 1, 3])])
        full = layer(hidden)[0]
    assert (pieces - full).abs().max() <= 2e-2 * full.abs().max()


def test_deepcopy_on_the_gpu():
    layer = build(MODELS["v3-8"](apply_rope_fusion=True))
    hidden, _ = inputs(layer.config)
    assert torch.equal(copy.deepcopy(layer)(hidden)[0], layer(hidden)[0])


def test_compiles_without_graph_breaks():
    layer = build(MODELS["v3-8"](apply_rope_fusion=True))
    hidden, direction = inputs(layer.config)
    plain = run(layer, hidden, direction)
    compiled = torch.compile(layer, fullgraph=True)
    output = compiled(hidden)[0]
    assert (output - plain["output"]).abs().max() <= 1e-2 * plain["output"].abs().max()
