"""The layers on Transformer Engine's modules, with a stand-in for it: names, values, copies, refusals."""

import copy
import pickle
import sys

import pytest
import torch

from mla_attention import LatentCache, MLASelfAttention, PackedSeqParams
from mla_attention.checkpoint import load_megatron_state_dict, to_megatron_state_dict
from mla_attention.configs import tiny
from tests.mla_attention.checkpoint.layers import CONFIGS
from tests.mla_attention.layers import fake_transformer_engine as fake

each_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())


@pytest.fixture(autouse=True)
def te(monkeypatch):
    yield fake.install(monkeypatch)
    sys.modules.pop(fake.OURS, None)


def pair(config, **options):
    """The same layer on torch and on Transformer Engine, with the same weights."""
    torch.manual_seed(0)
    ours = MLASelfAttention(config, **options)
    torch.manual_seed(0)
    return ours, MLASelfAttention(config, backend="te", **options)


def run(layer, hidden, **arguments):
    hidden = hidden.clone().requires_grad_()
    output = layer(hidden, **arguments)[0]
    parameters = {name: p for name, p in layer.named_parameters() if name != "linear_proj.bias"}
    direction = torch.linspace(-1, 1, output.numel()).view_as(output)
    found = torch.autograd.grad(output, [hidden, *parameters.values()], direction, allow_unused=True)
    return dict(zip(["output", "hidden", *parameters], [output.detach(), *found], strict=True))


def assert_alike(left, right):
    assert left.keys() == right.keys()
    for name in left:
        if left[name] is None or right[name] is None:
            assert left[name] is right[name], name
        else:
            torch.testing.assert_close(right[name], left[name], rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def arguments_of(config, layer, hidden):
    shared = config.dsa_indexer_shared
    return {"topk_indices": torch.arange(4).expand(2, hidden.shape[0], 4).contiguous()} if shared else {}


@each_config
def test_the_state_dicts_are_the_same_and_interchange(config):
    ours, other = pair(config)
    assert list(other.state_dict()) == list(ours.state_dict())
    assert [name for name, _ in other.named_parameters()] == [name for name, _ in ours.named_parameters()]
    for name, value in ours.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), f"{name} is drawn otherwise"
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.normal_()
    other.load_state_dict(ours.state_dict(), strict=True)
    ours.load_state_dict(other.state_dict(), strict=True)


@each_config
def test_output_and_gradients_are_those_of_the_torch_layers(config):
    ours, other = pair(config)
    hidden = torch.randn(12, 2, config.hidden_size)
    arguments = arguments_of(config, ours, hidden)
    assert_alike(run(ours, hidden, **arguments), run(other, hidden, **arguments))


@pytest.mark.parametrize("recompute", [False, True])
def test_dense_layers_fuse_the_norms_and_sparse_ones_keep_them_apart(recompute):
    dense = tiny(recompute_up_proj=recompute)
    ours, other = pair(dense)
    assert type(other.linear_q_up_proj).__name__ == type(other.linear_kv_up_proj).__name__ == "TENormLinear"
    assert isinstance(other.linear_q_up_proj, fake.LayerNormLinear)
    assert isinstance(other.linear_proj, fake.Linear)
    assert "applied by the projection behind" in repr(other)
    hidden = torch.randn(12, 2, dense.hidden_size)
    assert_alike(run(ours, hidden), run(other, hidden))
    assert other.linear_kv_up_proj.scales  # Transformer Engine's forward has run
    sparse = MLASelfAttention(CONFIGS["dsa"], backend="te")
    assert not isinstance(sparse.linear_q_up_proj, fake.LayerNormLinear)
    assert "applied by" not in repr(sparse)


def test_what_needs_the_normed_latents_gets_them():
    config = tiny()
    ours, other = pair(config)
    ours.eval(), other.eval()
    hidden = torch.randn(9, 2, config.hidden_size)
    names = ("query", "key", "value", "q_compressed", "kv_compressed")
    tensors = (layer.get_query_key_value_tensors(hidden) for layer in (ours, other))
    assert_alike(*(dict(zip(names, found, strict=True)) for found in tensors))
    with torch.no_grad():
        cache = LatentCache(config, 2, 16, device="cpu", dtype=torch.float32)
        pieces = torch.cat([other(piece, cache=cache)[0] for piece in hidden.split([4, 1, 4])])
        torch.testing.assert_close(pieces, ours(hidden)[0])


def test_packed_sequences_and_no_tokens():
    config = tiny()
    ours, other = pair(config)
    hidden = torch.randn(12, 1, config.hidden_size)
    packed = PackedSeqParams([0, 5, 5, 9], cu_seqlens_q_padded=[0, 6, 6, 11])
    hidden[11] = torch.nan
    assert_alike(run(ours, hidden, packed_seq_params=packed), run(other, hidden, packed_seq_params=packed))
    assert other(hidden[:0])[0].shape == (0, 1, config.hidden_size)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))], ids=["deep", "pickle"]
)
@pytest.mark.parametrize("name", ["compressed query", "bias", "dsa"])
def test_copies_compute_alone_and_carry_no_scales(name, copied):
    _, other = pair(CONFIGS[name])
    hidden = torch.randn(12, 2, other.config.hidden_size)
    expected = run(other, hidden)
    assert other.linear_proj.scales
    again = copied(other)
    assert again.linear_proj.scales == []
    assert again.state_dict().keys() == other.state_dict().keys()
    assert_alike(expected, run(again, hidden))
    with torch.no_grad():
        again.kv_layernorm.weight.mul_(2.0)
    assert not torch.equal(run(again, hidden)["output"], expected["output"])  # its projection applies its own norm
    assert_alike(expected, run(other, hidden))


def test_parameters_may_be_replaced():
    """As `to_empty` and sharding do: the fused norm follows its module, not the tensor it once had."""
    ours, other = pair(tiny(), device="meta")
    other.to_empty(device="cpu")
    ours.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.normal_(std=0.2)
    other.load_state_dict(ours.state_dict())
    other.kv_layernorm.weight = torch.nn.Parameter(ours.kv_layernorm.weight.detach().clone())
    hidden = torch.randn(12, 2, ours.config.hidden_size)
    assert_alike(run(ours, hidden), run(other, hidden))


@pytest.mark.parametrize("fused_norm", [False, True])
def test_megatron_checkpoints_in_both_spellings(fused_norm):
    ours, other = pair(tiny())
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.normal_()
    tensors = to_megatron_state_dict(ours, "layer.", fused_norm=fused_norm)
    tensors |= {"layer.linear_kv_up_proj._extra_state": torch.zeros(3), "layer.core_attention._extra_state": None}
    load_megatron_state_dict(other, tensors, "layer.")
    exported = to_megatron_state_dict(other, "layer.", fused_norm=fused_norm)
    assert all(torch.equal(exported[key], tensors[key]) for key in exported)


def test_fp8_pads_rows_and_refuses_widths():
    config = tiny(hidden_size=64)
    ours, other = pair(config)
    hidden = torch.randn(9, 2, config.hidden_size)  # 18 rows
    with fake.autocast():
        assert_alike(run(ours, hidden), run(other, hidden))
    odd = MLASelfAttention(tiny(hidden_size=72), backend="te")
    with fake.autocast(), pytest.raises(ValueError, match=r"72 features in.*multiples of 16") as raised:
        odd(torch.randn(32, 2, 72))
    assert "\n" not in str(raised.value)
    with fake.autocast(), pytest.raises(ValueError, match="multiples of 16"):
        MLASelfAttention(tiny(hidden_size=72), backend="te")
    assert other(hidden)[0].shape == hidden.shape


def test_fp8_refuses_a_recomputation_that_would_differ():
    layer = MLASelfAttention(tiny(recompute_up_proj=True), backend="te")
    with fake.autocast(), pytest.raises(ValueError, match=r"recompute_up_proj: given True under te\.autocast"):
        layer(torch.randn(32, 2, 64))


def test_refusals_at_construction(monkeypatch, te):
    with pytest.raises(ValueError, match=r"kv_assembly: given 'gemm', but linear_kv_up_proj is a TENormLinear"):
        MLASelfAttention(tiny(kv_assembly="gemm"), backend="te")
    monkeypatch.setattr(fake.Fp8State, "parameters", True)
    with pytest.raises(ValueError, match="quantized_model_init"):
        MLASelfAttention(tiny(), backend="te")
    monkeypatch.setattr(fake.Fp8State, "parameters", False)
    monkeypatch.delattr(fake.Linear, "_get_weight_tensors")
    with pytest.raises(ValueError, match=r"Transformer Engine 2\.20\.2, allowed are releases"):
        MLASelfAttention(tiny(), backend="te")


def test_auto_core_attention_asks_transformer_engine_first_on_cuda_only():
    layer = MLASelfAttention(tiny(), backend="te")
    hidden = torch.randn(8, 1, 64)
    tokens = layer._token_layout(hidden, None, None, None, None)
    choose = layer.core_attention.choice
    assert choose(torch.device("cpu"), tokens) == "sdpa"
    assert choose(torch.device("cuda"), tokens) == "te"
    mask = torch.zeros(1, 1, 8, 8, dtype=torch.bool)
    assert choose(torch.device("cuda"), layer._token_layout(hidden, mask, None, None, None)) == "sdpa"
    assert "te" not in MLASelfAttention(tiny()).core_attention.choices
