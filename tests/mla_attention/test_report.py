import dataclasses

import pytest
import torch

from mla_attention import LatentCache, MLASelfAttention
from mla_attention.configs import PRESETS, MLAConfig, deepseek_v3, deepseek_v32, get_preset, glm5, kimi_k2, tiny
from mla_attention.report import count_activation_bytes, count_forward_flops, count_parameters, layer_report
from mla_attention.rotary import softmax_scale

DSA = {
    "experimental_attention_variant": "dsa",
    "dsa_indexer_n_heads": 2,
    "dsa_indexer_head_dim": 32,
    "dsa_indexer_topk": 8,
}


def built_parameters(config: MLAConfig) -> dict[str, int]:
    """Parameters of a real layer, weight and bias of a module together."""
    counts: dict[str, int] = {}
    for name, parameter in MLASelfAttention(config, device="meta").named_parameters():
        module = name.rpartition(".")[0]
        counts[module] = counts.get(module, 0) + parameter.numel()
    return counts


@pytest.mark.parametrize("name", PRESETS)
def test_parameters_are_those_of_the_built_layer(name: str) -> None:
    assert count_parameters(get_preset(name)) == built_parameters(get_preset(name))


@pytest.mark.parametrize(
    "config",
    [
        tiny(q_lora_rank=None),
        tiny(add_bias_linear=True),
        tiny(mla_down_proj_fusion=True),
        tiny(**DSA),
        tiny(**DSA, dsa_indexer_shared=True),
    ],
)
def test_parameters_of_variants(config: MLAConfig) -> None:
    assert count_parameters(config) == built_parameters(config)


def test_parameters_of_deepseek_v3() -> None:
    """7168*1536 + 1536*128*192 + 7168*576 + 512*128*256 + 128*128*7168, and the norms 1536 + 512."""
    assert layer_report(deepseek_v3()).total_parameters == 187_107_328


@pytest.mark.parametrize(
    ("config", "terms"),
    [
        (deepseek_v3(), {"projections": 18.4e12 / 3, "core attention": 11.0e12}),
        (glm5(experimental_attention_variant=None), {"projections": 16.2e12 / 3}),
    ],
)
def test_flops_of_16384_tokens(config: MLAConfig, terms: dict[str, float]) -> None:
    """Published roofline: GEMMs of forward and backward 18.4 and 16.2 TFLOP, attention forward 11 TFLOP."""
    flops = count_forward_flops(config, 16384)
    for name, expected in terms.items():
        assert flops[name] * 16384 == pytest.approx(expected, rel=0.005)


@pytest.mark.parametrize("seq_len", [1, 2, 7, 8, 9, 64])
def test_pairs_are_counted_one_by_one(seq_len: int) -> None:
    """tiny: 4 heads, Dn+Dr 40, Dv 20, Rkv 32, Dr 16; indexer 2 heads of 32, top-k 8."""
    causal = sum(row + 1 for row in range(seq_len))
    selected = sum(min(row + 1, 8) for row in range(seq_len))
    dense = count_forward_flops(tiny(), seq_len)
    assert dense["core attention"] * seq_len == pytest.approx(causal * 2 * 4 * (40 + 20))
    sparse = count_forward_flops(tiny(**DSA), seq_len)
    if seq_len <= 8:
        assert sparse == dense
    else:
        assert sparse["core attention"] * seq_len == pytest.approx(selected * 2 * 4 * (32 + 16 + 32))
        assert sparse["indexer scores"] * seq_len == pytest.approx(causal * 2 * 2 * 32)
        assert sparse["indexer projections"] == 2 * (48 * 2 * 32 + 64 * 32 + 64 * 2)
        assert sparse["projections"] == dense["projections"]


def test_projection_flops_are_those_of_torch() -> None:
    """torch's own counter over the dense forward of a real layer, attention computed by plain products."""
    from torch.utils.flop_counter import FlopCounterMode

    config = tiny(q_lora_rank=None, core_attention_backend="reference", add_bias_linear=True)
    layer = MLASelfAttention(config)
    with FlopCounterMode(display=False) as counter:
        layer(torch.zeros(16, 1, config.hidden_size))
    flops = count_forward_flops(config, 16)
    all_pairs = flops["core attention"] * 16 / (17 / 2)  # the reference computes the masked pairs as well
    assert counter.get_total_flops() == pytest.approx((flops["projections"] + all_pairs) * 16)


def test_shared_layers_have_no_indexer_to_run() -> None:
    config = tiny(**DSA, dsa_indexer_shared=True)
    assert set(count_forward_flops(config, 64)) == {"projections", "core attention"}
    assert "indexer" not in count_activation_bytes(config, 64, 2)


def test_warm_up_attends_densely_and_runs_the_indexer() -> None:
    warm = count_forward_flops(tiny(**DSA, dsa_mode="dense_warmup"), 64)
    assert warm["core attention"] == count_forward_flops(tiny(), 64)["core attention"]
    assert "indexer scores" in warm


def saved_bytes(layer: MLASelfAttention, seq_len: int) -> int:
    """Bytes of the distinct tensors that a forward keeps, without parameters and rotary tables."""
    hidden = torch.randn(seq_len, 1, layer.config.hidden_size, requires_grad=True)
    others = {parameter.untyped_storage().data_ptr() for parameter in layer.parameters()}
    cos, sin = layer.rotary.cos_sin(seq_len, device="cpu")
    others |= {cos.untyped_storage().data_ptr(), sin.untyped_storage().data_ptr()}
    table_row = layer.config.qk_pos_emb_head_dim
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        is_table = tensor.dim() == 4 and tensor.shape[1:3] == (1, 1) and tensor.shape[3] in (table_row, table_row // 2)
        if storage.data_ptr() not in others and not is_table:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output, _ = layer(hidden)
    del output
    return sum(kept.values())


@pytest.mark.parametrize("changes", [{}, {"q_lora_rank": None}, {"recompute_up_proj": True}])
def test_activation_bytes_are_what_autograd_keeps(changes: dict) -> None:
    """fp32 on a CPU, head dims equal so that attention keeps its inputs, output and log-sum-exp only."""
    config = tiny(num_attention_heads=16, v_head_dim=40, **changes)
    seq_len = 256
    counted = layer_report(config, seq_len=seq_len, element_bytes=4).total_activation_bytes
    kept = saved_bytes(MLASelfAttention(config), seq_len) / seq_len
    norms = (config.q_lora_rank or 0) + config.kv_lora_rank + 2
    assert counted <= kept + 1
    assert kept <= counted + 4 * norms + 1


def test_activation_bytes_of_the_sparse_layer() -> None:
    """tiny, 2-byte elements: hidden 64, latents 2*48 + 2*32 + 16, 4 heads."""
    kept = count_activation_bytes(tiny(**DSA, dsa_indexer_loss_coeff=0.1), 64, 2)
    assert kept == {
        "hidden states": 128,
        "latents": 352,
        "query before absorption": 2 * 4 * 40,
        "absorbed query": 2 * 4 * 48,
        "latent key": 2 * 48,
        "output latents": 2 * 4 * 32,
        "output of the heads": 2 * 4 * 20,
        "log-sum-exp (fp32)": 16,
        "selected indices (int64)": 64,
        "indexer": 2 * (2 * 32 + 2 * 32) + 4 * 2,
    }


@pytest.mark.parametrize("config", [tiny(), tiny(**DSA), tiny(**DSA, dsa_indexer_shared=True)])
def test_cache_bytes_are_those_of_the_cache(config: MLAConfig) -> None:
    cache = LatentCache(config, batch_size=1, max_length=8, device="cpu", dtype=torch.bfloat16)
    held = cache.keys.nbytes + (0 if cache.index_keys is None else cache.index_keys.nbytes)
    assert layer_report(config).latent_cache_bytes == held / 8


@pytest.mark.parametrize(
    ("config", "latent", "full"), [(deepseek_v3(), 1152, 81920), (deepseek_v32(), 1408, 81920), (glm5(), 1408, 65536)]
)
def test_cache_bytes_of_presets(config: MLAConfig, latent: int, full: int) -> None:
    report = layer_report(config)
    assert (report.latent_cache_bytes, report.full_cache_bytes) == (latent, full)


def test_rope_and_scale() -> None:
    report = layer_report(deepseek_v3())
    assert report.rope["ramp"] == "channels 10 to 23"
    assert report.rope["table factor"] == 1.0
    assert report.softmax_scale == softmax_scale(deepseek_v3())
    assert layer_report(kimi_k2()).rope["ramp"] == "channels 19 to 20"
    assert "ramp" not in layer_report(glm5()).rope
    assert layer_report(glm5()).rope["indexer pairs"] == "interleaved"
    assert layer_report(deepseek_v32()).rope["indexer pairs"] == "half-split"


def test_backends() -> None:
    backends = layer_report(tiny(), device="cpu").backends
    assert backends["rope"] == "unfused torch"
    assert backends["core attention"] == "auto: sdpa ([S, B]), sdpa (packed) on cpu"
    assert backends["key/value assembly"] == "auto: split on cpu"
    fused = layer_report(tiny(apply_rope_fusion=True, kv_assembly="gemm", core_attention_backend="varlen")).backends
    assert fused["rope"] == "fused Triton kernels"
    assert fused["key/value assembly"] == "gemm"
    assert fused["core attention"].startswith("varlen, which cannot run on cpu: ")
    assert "own indexer" in layer_report(glm5()).backends["sparse attention"]
    shared = dataclasses.replace(glm5(), dsa_indexer_shared=True)
    assert "earlier layer" in layer_report(shared).backends["sparse attention"]


@pytest.mark.parametrize("name", ["seq_len", "element_bytes"])
@pytest.mark.parametrize("value", [0, -1, 2.0, True])
def test_bad_arguments(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"^{name} must be a positive int, got {value!r}$"):
        layer_report(tiny(), **{name: value})  # type: ignore[arg-type]
