"""Against megatron-core on the CPU in fp32: the same numbers, and its own layers on our RoPE kernels."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from mla_attention import MLASelfAttention
from mla_attention.checkpoint import load_megatron_state_dict, to_megatron_state_dict
from mla_attention.configs import tiny
from mla_attention.integrations.megatron import patch, unpatch
from tests.mla_attention.integrations import megatron_cpu

pytest.importorskip("megatron.core", reason="megatron-core is not installed", exc_type=ImportError)
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="Megatron's layers are put on the CPU by hand here"),
]

# Enough heads that no two scores are tied at zero: which of tied keys is selected is not specified.
DSA = dict(
    experimental_attention_variant="dsa",
    dsa_indexer_n_heads=16,
    dsa_indexer_head_dim=16,
    dsa_indexer_topk=8,
    dsa_indexer_loss_coeff=0.5,
)
DENSE = {"yarn": tiny(), "rope": tiny(rope_type="rope")}
SPARSE = {
    "yarn, loss over selected keys": tiny(**DSA, dsa_indexer_use_sparse_loss=True),
    "rope, loss over all keys": tiny(rope_type="rope", dsa_indexer_rope_interleaved=True, **DSA),
    "loss per token": tiny(calculate_per_token_loss=True, **DSA),
    "no relu": tiny(dsa_indexer_scoring_relu=False, **DSA),
}
HOME = "megatron.core.fusions.fused_mla_yarn_rope_apply"
IMPORTERS = (
    "megatron.core.transformer.experimental_attention_variant.absorbed_mla",
    "megatron.core.transformer.multi_latent_attention",
)
NAMES = ("fused_apply_mla_rope_for_kv", "fused_apply_mla_rope_for_q")


@pytest.fixture(scope="module")
def megatron():
    with megatron_cpu.started():
        yield


@pytest.fixture
def unpatched():
    unpatch()
    yield
    unpatch()


def randomise(layer):
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in layer.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
            else:
                parameter.uniform_(0.5, 1.5)


def assert_same_numbers(left, right, tolerance=1e-5):
    assert left.keys() == right.keys()
    for name, expected in left.items():
        assert expected is not None, name
        assert right[name] is not None, name
        error = (right[name] - expected).norm() / expected.norm()
        assert error <= tolerance, f"{name}: {error:.2e}"


def inputs(config, rows=24):
    torch.manual_seed(1)
    return torch.randn(rows, 2, config.hidden_size), torch.randn(rows, 2, config.hidden_size)


def ours_like(theirs, config):
    ours = MLASelfAttention(config)
    load_megatron_state_dict(ours, {key: value for key, value in theirs.state_dict().items() if value is not None})
    return ours


@pytest.mark.parametrize("case", DENSE)
def test_dense_layers_agree_in_every_gradient(megatron, case):
    config = DENSE[case]
    theirs = megatron_cpu.dense_layer(config)
    randomise(theirs)
    ours = ours_like(theirs, config)
    hidden, direction = inputs(config)
    expected = megatron_cpu.gradients(theirs, hidden, direction)
    assert_same_numbers(expected, megatron_cpu.gradients(ours, hidden, direction))
    back = to_megatron_state_dict(ours)
    assert all(torch.equal(back[key], value) for key, value in theirs.state_dict().items() if value is not None)


@pytest.mark.parametrize("case", SPARSE)
def test_sparse_layers_agree_in_every_gradient(megatron, case):
    config = SPARSE[case]
    theirs = megatron_cpu.sparse_layer(config)
    randomise(theirs)
    hidden, direction = inputs(config)
    expected = megatron_cpu.gradients(theirs, hidden, direction)
    assert_same_numbers(expected, megatron_cpu.gradients(ours_like(theirs, config), hidden, direction))


def test_patch_reports_what_it_replaced_and_unpatch_restores_it(unpatched):
    before = {
        (name, function): getattr(sys.modules[name], function) for name in (HOME, *IMPORTERS) for function in NAMES
    }
    expected = sorted(f"{module}.{function}" for module, function in before)
    assert patch() == expected
    assert patch() == expected
    for module, function in before:
        assert getattr(sys.modules[module], function).__module__.startswith("mla_attention.fusions")
    assert unpatch() == expected
    assert unpatch() == []
    assert {key: getattr(sys.modules[key[0]], key[1]) for key in before} == before


def test_modules_imported_before_and_while_patched(unpatched, monkeypatch):
    """Whoever holds Megatron's function gets ours; what Megatron imports meanwhile is given back too."""
    theirs = getattr(sys.modules[HOME], NAMES[1])
    somebody, late = ModuleType("somebody"), ModuleType("megatron.late")
    somebody.fused_apply_mla_rope_for_q = theirs
    monkeypatch.setitem(sys.modules, "somebody", somebody)
    assert "somebody.fused_apply_mla_rope_for_q" in patch()
    late.fused_apply_mla_rope_for_q = getattr(sys.modules[HOME], NAMES[1])
    monkeypatch.setitem(sys.modules, "megatron.late", late)
    assert somebody.fused_apply_mla_rope_for_q is late.fused_apply_mla_rope_for_q is not theirs
    unpatch()
    assert somebody.fused_apply_mla_rope_for_q is late.fused_apply_mla_rope_for_q is theirs


@pytest.mark.parametrize("version", ["0.19.1", "0.20.0", "1.0.0+abc"])
def test_other_releases_are_refused(unpatched, monkeypatch, version):
    monkeypatch.setattr(sys.modules["megatron.core"], "__version__", version)
    theirs = getattr(sys.modules[HOME], NAMES[0])
    with pytest.raises(RuntimeError, match=rf"found {version.replace('+', '.')}, supported is 0\.19\.2") as raised:
        patch()
    assert "\n" not in str(raised.value)
    assert getattr(sys.modules[HOME], NAMES[0]) is theirs


def test_a_checkout_with_a_revision_in_its_version_is_the_release(unpatched, monkeypatch):
    monkeypatch.setattr(sys.modules["megatron.core"], "__version__", "0.19.2+1a2b3c4")
    assert patch()


def test_absent_megatron_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "megatron.core", None)
    with pytest.raises(
        RuntimeError, match=r"megatron-core cannot be imported \(ModuleNotFoundError.*0\.19\.2"
    ) as raised:
        patch()
    assert "\n" not in str(raised.value)


@pytest.fixture
def no_timing(monkeypatch):
    """Megatron's kernels are autotuned, which needs a device; here the first configuration wins."""
    autotuner = pytest.importorskip("triton.runtime.autotuner")
    monkeypatch.setattr(autotuner.Autotuner, "_bench", lambda self, *args, config, **kwargs: [1.0] * 3)


@pytest.mark.parametrize("k_dim", [16, 24])
def test_megatrons_own_layer_on_our_kernels(megatron, unpatched, no_timing, k_dim):
    config = tiny(qk_head_dim=k_dim, v_head_dim=32, qk_pos_emb_head_dim=8)
    unfused, fused = (
        megatron_cpu.dense_layer(tiny(**{**vars(config), "apply_rope_fusion": fusion})) for fusion in (False, True)
    )
    randomise(unfused)
    fused.load_state_dict(unfused.state_dict())
    hidden, direction = inputs(config, rows=5)
    expected = megatron_cpu.gradients(unfused, hidden, direction)
    if k_dim == 16:
        assert_same_numbers(expected, megatron_cpu.gradients(fused, hidden, direction))
    else:
        with pytest.raises(Exception, match="power of 2"):  # Megatron's kernel takes no other width
            fused(hidden, attention_mask=None)
    patch()
    assert_same_numbers(expected, megatron_cpu.gradients(fused, hidden, direction))


def layer_spec(**params):
    """A TransformerLayer whose attention is ours."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import ModuleSpec

    from mla_attention.integrations.megatron_layer import MegatronMLASelfAttention

    spec = get_gpt_layer_local_spec(multi_latent_attention=True, qk_layernorm=True, normalization="RMSNorm")
    spec.submodules.self_attention = ModuleSpec(module=MegatronMLASelfAttention, params=params)
    return spec


@pytest.mark.parametrize("case", [*DENSE, "dsa"])
def test_a_transformer_layer_with_our_attention(megatron, case):
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.spec_utils import build_module

    config = DENSE.get(case, SPARSE["rope, loss over all keys"])
    theirs = megatron_cpu.config_like(config, ffn_hidden_size=96)
    layer = build_module(layer_spec(attn_mask_type=AttnMaskType.causal), config=theirs, layer_number=1)
    randomise(layer)
    assert layer.self_attention.config.rope_type == config.rope_type
    hidden, direction = inputs(config)
    mask = torch.zeros(1, 1, 24, 24, dtype=torch.bool)  # ignored with the causal type
    output = layer(hidden.requires_grad_(), attention_mask=mask)[0]
    output.backward(direction)
    assert all(parameter.grad is not None for parameter in layer.parameters())
    if case == "dsa":
        return
    spec = get_gpt_layer_local_spec(multi_latent_attention=True, qk_layernorm=True, normalization="RMSNorm")
    spec.submodules.self_attention.submodules.core_attention = megatron_cpu.PlainAttention
    reference = build_module(spec, config=theirs, layer_number=1)
    missing = reference.load_state_dict(layer.state_dict(), strict=False).missing_keys
    assert [key for key in missing if not key.endswith("_extra_state")] == []
    torch.testing.assert_close(output, reference(hidden, attention_mask=None)[0], rtol=1e-4, atol=1e-5)


def test_sharded_checkpoint_entries_name_the_axis_of_the_heads(megatron):
    from megatron.core.transformer.spec_utils import build_module

    attention = build_module(
        layer_spec().submodules.self_attention, config=megatron_cpu.config_like(tiny()), layer_number=1
    )
    entries = attention.sharded_state_dict("decoder.layers.0.self_attention.")
    assert {key.removeprefix("decoder.layers.0.self_attention.") for key in entries} == set(attention.state_dict())
    assert all(
        torch.equal(entry.data, dict(attention.named_parameters())[key.split("self_attention.")[1]])
        for key, entry in entries.items()
    )
    assert attention.linear_q_up_proj.weight.tensor_model_parallel
    assert attention.linear_proj.weight.partition_dim == 1


def test_packed_sequences_through_megatrons_parameters(megatron):
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.spec_utils import build_module

    attention = build_module(
        layer_spec().submodules.self_attention, config=megatron_cpu.config_like(tiny()), layer_number=1
    )
    hidden = torch.randn(9, 1, 64)
    offsets = torch.tensor([0, 4, 9], dtype=torch.int32)
    for longest in (None, 5):
        packed = PackedSeqParams("thd", offsets, offsets, max_seqlen_q=longest, max_seqlen_kv=longest)
        output, bias = attention(hidden, None, packed_seq_params=packed)
        alone = torch.cat([attention(piece, None)[0] for piece in hidden.split([4, 5])])
        torch.testing.assert_close(output, alone)
        assert bias is None


@pytest.mark.parametrize(
    ("field", "value"),
    [("qk_layernorm", False), ("context_parallel_size", 2), ("layernorm_zero_centered_gamma", True)],
)
def test_configs_of_another_layer_are_refused(megatron, field, value):
    from mla_attention.integrations.megatron_layer import mla_config

    config = SimpleNamespace(**{**vars(megatron_cpu.config_like(tiny())), field: value})
    with pytest.raises(ValueError, match=rf"{field}: given {value} in Megatron's config, allowed") as raised:
        mla_config(config)
    assert "\n" not in str(raised.value)


def test_how_ranks_exchange_keys_is_nothing_to_a_layer_on_one(megatron):
    """Megatron's training script sets "p2p" by default, whatever the ranks."""
    from mla_attention.integrations.megatron_layer import mla_config

    config = megatron_cpu.config_like(tiny())
    expected = mla_config(config)
    config.cp_comm_type = "p2p"
    assert mla_config(config) == expected


def test_arguments_of_inference_are_refused(megatron):
    from megatron.core.transformer.spec_utils import build_module

    attention = build_module(
        layer_spec().submodules.self_attention, config=megatron_cpu.config_like(tiny()), layer_number=1
    )
    with pytest.raises(ValueError, match="inference_context: given a SimpleNamespace, allowed is None"):
        attention(torch.randn(4, 1, 64), None, inference_context=SimpleNamespace())
