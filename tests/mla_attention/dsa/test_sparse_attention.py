"""The sparse layer against its oracle: forward, every gradient, selection, sharing, and what it refuses."""

import pytest
import torch

from mla_attention import MLASelfAttention
from mla_attention.configs import ConfigError, deepseek_v32, glm5, tiny
from mla_attention.dsa.functions import KERNEL_LIMITS, LOSS_KERNEL_LIMITS
from mla_attention.fusions.dsa import attention_checks, selection_checks
from tests.mla_attention.dsa.oracle import Faults, build, dsa_config, oracle

LENGTH = 24


def hidden_states(length=LENGTH, batch=2, dtype=torch.float64, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(length, batch, 64, dtype=torch.float64, generator=generator).to(dtype)


def dense_twin(layer):
    """The dense layer with the sparse one's weights."""
    dense = MLASelfAttention(tiny(), dtype=torch.float64)
    dense.load_state_dict({k: v for k, v in layer.state_dict().items() if "indexer" not in k})
    return dense


def gradients(layer, output, hidden, seed=3):
    """Gradients of a random direction, by name, of the trunk and the input."""
    direction = torch.randn(output.shape, dtype=output.dtype, generator=torch.Generator().manual_seed(seed))
    tensors = {n: p for n, p in layer.named_parameters() if "indexer" not in n}
    tensors["hidden"] = hidden
    return dict(zip(tensors, torch.autograd.grad((output * direction).sum(), tensors.values()), strict=True))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    "extra",
    [{}, {"rope_type": "rope"}, {"recompute_up_proj": True}, {"mla_down_proj_fusion": True}],
    ids=lambda extra: next(iter(extra), "plain"),
)
def test_forward_and_every_gradient_equal_the_masked_dense_oracle(interleaved, extra):
    if extra.get("rope_type") == "rope":
        extra = {**extra, "rotary_scaling_factor": 1.0, "original_max_position_embeddings": 4096, "mscale_all_dim": 0.0}
    layer = build(dsa_config(dsa_indexer_rope_interleaved=interleaved, **extra))
    hidden = hidden_states().requires_grad_()
    output, _, aux = layer(hidden, return_aux=True)
    answers = [oracle(layer, hidden[:, b]) for b in range(2)]
    expected = torch.stack([answer.output for answer in answers], 1)
    torch.testing.assert_close(output, expected, rtol=1e-9, atol=1e-9)
    assert torch.equal(aux.topk_indices, torch.stack([answer.indices for answer in answers]))
    found, wanted = gradients(layer, output, hidden), gradients(layer, expected, hidden)
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-8, atol=1e-8, msg=name)


@pytest.mark.parametrize(
    "fault", ["query_pairing", "key_pairing", "no_relu", "raw_latent", "rms_key_norm", "rope_last"]
)
def test_each_fault_changes_the_selection_and_the_output(fault):
    layer, hidden = build(dsa_config()), hidden_states(batch=1)
    output, _, aux = layer(hidden, return_aux=True)
    right, wrong = (oracle(layer, hidden[:, 0], faults=f) for f in (Faults(), Faults(**{fault: True})))
    assert torch.equal(aux.topk_indices[0], right.indices)
    assert not torch.equal(aux.topk_indices[0], wrong.indices)
    assert not torch.allclose(output[:, 0], wrong.output, atol=1e-3)


def test_a_hadamard_on_one_side_changes_the_selection():
    layer, hidden = build(dsa_config(dsa_indexer_rotate_activation=True)), hidden_states(batch=1)
    found = layer(hidden, return_aux=True)[2].topk_indices[0]
    assert torch.equal(found, oracle(layer, hidden[:, 0]).indices)
    assert not torch.equal(found, oracle(layer, hidden[:, 0], faults=Faults(hadamard_one_side=True)).indices)


@pytest.mark.parametrize("length", [1, 2, 17, 63, 64, 65])
@pytest.mark.parametrize("topk", [1, 8, 64, 2048])
def test_every_length_beside_every_topk(length, topk):
    layer = build(dsa_config(dsa_indexer_topk=topk))
    hidden = hidden_states(length, 1)
    output, _, aux = layer(hidden, return_aux=True)
    assert aux.topk_indices.shape == (1, length, min(topk, length))
    assert aux.topk_indices.dtype == torch.int64
    expected = oracle(layer, hidden[:, 0])
    assert torch.equal(aux.topk_indices[0], expected.indices)
    torch.testing.assert_close(output[:, 0], expected.output, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("length", [2047, 2048, 2049])
def test_around_the_published_topk(length):
    layer = build(dsa_config(dsa_indexer_topk=2048, num_attention_heads=1), torch.float32)
    hidden = hidden_states(length, 1, torch.float32)
    with torch.no_grad():
        output, _, aux = layer(hidden, return_aux=True)
    assert aux.topk_indices.shape == (1, length, min(length, 2048))
    assert torch.equal((aux.topk_indices[0] >= 0).sum(-1), torch.arange(1, length + 1).clamp(max=2048))
    assert torch.isfinite(output).all()


@pytest.mark.parametrize("topk", [LENGTH, LENGTH + 1, 2048])
def test_no_more_keys_than_topk_is_the_dense_layer_bit_for_bit(topk):
    layer = build(dsa_config(dsa_indexer_topk=topk))
    dense = dense_twin(layer)
    ours, theirs = hidden_states().requires_grad_(), hidden_states().requires_grad_()
    output, expected = layer(ours)[0], dense(theirs)[0]
    assert torch.equal(output, expected)
    found, wanted = gradients(layer, output, ours), gradients(dense, expected, theirs)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_a_selection_of_every_key_is_the_dense_layer_to_rounding():
    layer = build(dsa_config())
    every = torch.arange(LENGTH).expand(2, LENGTH, LENGTH)
    every = torch.where(every <= torch.arange(LENGTH)[:, None], every, -1)
    ours, theirs = hidden_states().requires_grad_(), hidden_states().requires_grad_()
    output, expected = layer(ours, topk_indices=every)[0], dense_twin(layer)(theirs)[0]
    torch.testing.assert_close(output, expected, rtol=1e-9, atol=1e-9)
    found, wanted = gradients(layer, output, ours), gradients(layer, layer(theirs, topk_indices=every)[0], theirs)
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-8, atol=1e-8, msg=name)


def test_every_row_on_key_zero_takes_the_gradient_of_the_masked_oracle():
    layer = build(dsa_config())
    hidden = hidden_states(batch=1).requires_grad_()
    output = layer(hidden, topk_indices=torch.zeros(1, LENGTH, 1, dtype=torch.int32))[0]
    first = torch.zeros(LENGTH, LENGTH, dtype=torch.bool)
    first[:, 0] = True
    expected = oracle(layer, hidden[:, 0], selected=first).output[:, None]
    torch.testing.assert_close(output, expected, rtol=1e-9, atol=1e-9)
    found, wanted = gradients(layer, output, hidden), gradients(layer, expected, hidden)
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-8, atol=1e-8, msg=name)


def test_unused_slots_anywhere_and_rows_without_a_key():
    layer = build(dsa_config())
    hidden = hidden_states(batch=1).requires_grad_()
    generator = torch.Generator().manual_seed(5)
    selected = torch.rand(LENGTH, LENGTH, generator=generator).lt(0.4).tril()
    selected[4] = selected[11] = False
    indices = torch.full((1, LENGTH, LENGTH), -1)
    for row in range(LENGTH):
        found = selected[row].nonzero()[:, 0]
        places = torch.randperm(LENGTH, generator=generator)[: len(found)]
        indices[0, row, places] = found
    output = layer(hidden, topk_indices=indices)[0]
    assert torch.equal(output[[4, 11]], torch.zeros(2, 1, 64, dtype=torch.float64))
    expected = oracle(layer, hidden[:, 0], selected=selected).output[:, None]
    torch.testing.assert_close(output, expected, rtol=1e-9, atol=1e-9)
    found, wanted = gradients(layer, output, hidden), gradients(layer, expected, hidden)
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-8, atol=1e-8, msg=name)


def test_the_order_of_the_slots_and_their_dtype_do_not_matter():
    layer, hidden = build(dsa_config()), hidden_states()
    output, _, aux = layer(hidden, return_aux=True)
    for indices in (aux.topk_indices, aux.topk_indices.int(), aux.topk_indices.flip(-1)):
        torch.testing.assert_close(layer(hidden, topk_indices=indices)[0], output, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("topk", [7, 2048])
def test_later_tokens_leave_earlier_rows_bit_for_bit(topk):
    layer, hidden = build(dsa_config(dsa_indexer_topk=topk)), hidden_states()
    changed = hidden.clone()
    changed[15:] = 100 * torch.randn_like(changed[15:])
    (output, _, aux), (other, _, other_aux) = (layer(x, return_aux=True) for x in (hidden, changed))
    assert torch.equal(output[:15], other[:15])
    assert torch.equal(aux.topk_indices[:, :15], other_aux.topk_indices[:, :15])
    assert not torch.equal(output[15:], other[15:])


def test_the_byte_budget_never_changes_the_selection_or_the_loss():
    hidden = hidden_states()
    answers = []
    for budget in (1, 3000, 2**30):
        layer = build(dsa_config(dsa_score_budget_bytes=budget, dsa_indexer_loss_coeff=1.0))
        answers.append(layer(hidden, return_aux=True))
    for output, _, aux in answers[1:]:
        assert torch.equal(aux.topk_indices, answers[0][2].topk_indices)
        torch.testing.assert_close(output, answers[0][0], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(aux.indexer_loss, answers[0][2].indexer_loss, rtol=1e-12, atol=1e-12)


def test_a_sequence_never_depends_on_its_batch():
    layer, hidden = build(dsa_config()), hidden_states(batch=3)
    output, _, aux = layer(hidden, return_aux=True)
    for b in range(3):
        alone, _, own = layer(hidden[:, b : b + 1], return_aux=True)
        torch.testing.assert_close(output[:, b : b + 1], alone, rtol=1e-12, atol=1e-12)
        assert torch.equal(aux.topk_indices[b], own.topk_indices[0])


@pytest.mark.parametrize("per_sequence", [False, True])
def test_position_ids_turn_the_rotation_and_never_causality(per_sequence):
    layer, hidden = build(dsa_config()), hidden_states()
    positions = torch.randint(0, 90, (2, LENGTH) if per_sequence else (LENGTH,))
    output, _, aux = layer(hidden, position_ids=positions, return_aux=True)
    for b in range(2):
        expected = oracle(layer, hidden[:, b], positions=positions[b] if per_sequence else positions)
        torch.testing.assert_close(output[:, b], expected.output, rtol=1e-9, atol=1e-9)
        assert torch.equal(aux.topk_indices[b], expected.indices)


@pytest.mark.parametrize("shape", [(0, 2), (0, 1), (5, 0), (20, 0)])
@pytest.mark.parametrize("mode", ["sparse", "dense_warmup"])
def test_no_tokens_in_none_out_and_zero_gradients(shape, mode):
    layer = build(dsa_config(dsa_indexer_loss_coeff=1.0, dsa_mode=mode))
    hidden = torch.zeros(*shape, 64, dtype=torch.float64, requires_grad=True)
    output, _, aux = layer(hidden, return_aux=True)
    assert output.shape == hidden.shape
    assert aux.indexer_loss.item() == 0.0
    if mode == "sparse":
        assert aux.topk_indices.shape == (shape[1], shape[0], min(7, shape[0]))
    layer(hidden)[0].sum().backward()
    assert hidden.grad.shape == hidden.shape
    for name, parameter in layer.named_parameters():
        assert parameter.grad is None or not parameter.grad.any(), name


class TestAux:
    def test_indices_ascend_with_unused_slots_behind(self):
        layer, hidden = build(dsa_config()), hidden_states()
        indices = layer(hidden, return_aux=True)[2].topk_indices
        assert indices.shape == (2, LENGTH, 7)
        filled = torch.where(indices < 0, LENGTH, indices)
        assert torch.equal(filled, filled.sort(-1).values)
        assert torch.equal((indices >= 0).sum(-1)[0], torch.arange(1, LENGTH + 1).clamp(max=7))

    def test_a_dense_step_reports_every_causal_key(self):
        indices = build(dsa_config(dsa_indexer_topk=64))(hidden_states(), return_aux=True)[2].topk_indices
        causal = torch.arange(LENGTH).expand(LENGTH, LENGTH)
        assert torch.equal(indices, torch.where(causal <= causal.T, causal, -1).expand(2, -1, -1))

    def test_a_dense_warm_up_reports_none(self):
        aux = build(dsa_config(dsa_mode="dense_warmup"))(hidden_states(), return_aux=True)[2]
        assert aux.topk_indices is None

    def test_given_indices_are_handed_on(self):
        layer, hidden = build(dsa_config()), hidden_states()
        indices = layer(hidden, return_aux=True)[2].topk_indices
        handed = layer(hidden, topk_indices=indices[..., :3].int(), return_aux=True)[2].topk_indices
        assert handed.dtype == torch.int64
        assert torch.equal(handed, indices[..., :3])


class TestSharing:
    def test_a_shared_layer_attends_to_an_earlier_layers_keys(self):
        first, shared = build(dsa_config()), build(dsa_config(dsa_indexer_shared=True), seed=9)
        hidden = hidden_states()
        indices = first(hidden, return_aux=True)[2].topk_indices
        output, _, aux = shared(hidden, topk_indices=indices, return_aux=True)
        assert torch.equal(aux.topk_indices, indices)
        for b in range(2):
            selected = torch.zeros(LENGTH, LENGTH + 1, dtype=torch.bool)
            selected.scatter_(1, indices[b] % (LENGTH + 1), True)
            expected = oracle(shared, hidden[:, b], selected=selected[:, :LENGTH]).output
            torch.testing.assert_close(output[:, b], expected, rtol=1e-9, atol=1e-9)

    @pytest.mark.parametrize("length", [5, LENGTH])
    def test_a_shared_layer_without_indices_says_what_it_needs(self, length):
        shared = build(dsa_config(dsa_indexer_shared=True))
        with pytest.raises(
            ValueError, match=r"topk_indices: given None to a layer with dsa_indexer_shared=True.*allowed"
        ):
            shared(hidden_states(length))

    def test_a_shared_layer_takes_part_in_a_dense_warm_up(self):
        layer = build(dsa_config(dsa_indexer_shared=True, dsa_mode="dense_warmup", dsa_indexer_loss_coeff=1.0))
        output, _, aux = layer(hidden_states(), return_aux=True)
        assert aux.indexer_loss is None
        assert aux.topk_indices is None
        assert torch.equal(output, dense_twin(layer)(hidden_states())[0])

    def test_given_indices_put_a_layers_own_indexer_to_rest(self):
        layer, hidden = build(dsa_config(dsa_indexer_loss_coeff=1.0)), hidden_states()
        indices = layer(hidden, return_aux=True)[2].topk_indices
        layer.core_attention.indexer.forward = None  # calling it would raise
        output, _, aux = layer(hidden, topk_indices=indices, return_aux=True)
        assert aux.indexer_loss is None
        output.sum().backward()
        assert all(p.grad is None for p in layer.core_attention.indexer.parameters())

    def test_given_indices_that_a_query_may_not_see_take_no_part(self):
        layer, hidden = build(dsa_config()), hidden_states()
        indices = layer(hidden, return_aux=True)[2].topk_indices
        extra = torch.full((2, LENGTH, 3), LENGTH - 1)
        extra[..., 1], extra[..., 2] = 10**9, -5
        extra[:, -1] = -1
        output, _, aux = layer(hidden, topk_indices=torch.cat([extra, indices], -1), return_aux=True)
        torch.testing.assert_close(output, layer(hidden, topk_indices=indices)[0], rtol=1e-12, atol=1e-12)
        assert (aux.topk_indices[..., :3] == -1).all()


class TestRefusals:
    @pytest.mark.parametrize(
        ("indices", "message"),
        [
            (torch.zeros(2, LENGTH, 3), r"given dtype torch.float32, allowed are torch.int32 and torch.int64"),
            (torch.zeros(2, LENGTH, 3, dtype=torch.int16), r"given dtype torch.int16, allowed are"),
            (
                torch.zeros(LENGTH, 2, 3, dtype=torch.int64),
                r"given shape \[24, 2, 3\], allowed is \[B, S, k\] = \[2, 24, k\]",
            ),
            (torch.zeros(2, LENGTH, dtype=torch.int64), r"given shape \[2, 24\], allowed is \[B, S, k\]"),
            (torch.zeros(2, LENGTH - 1, 3, dtype=torch.int64), r"given shape \[2, 23, 3\], allowed"),
        ],
    )
    def test_indices_of_a_wrong_shape_or_dtype(self, indices, message):
        with pytest.raises(ValueError, match=r"^topk_indices: " + message) as error:
            build(dsa_config())(hidden_states(), topk_indices=indices)
        assert "\n" not in str(error.value)

    def test_indices_given_to_a_dense_warm_up_or_a_dense_layer(self):
        indices, layer = torch.zeros(2, LENGTH, 1, dtype=torch.int64), build(dsa_config(dsa_mode="dense_warmup"))
        with pytest.raises(ValueError, match=r"topk_indices: given .*dense_warmup.*allowed is None"):
            layer(hidden_states(), topk_indices=indices)
        with pytest.raises(ValueError, match=r"topk_indices: given to a dense layer"):
            dense_twin(build(dsa_config()))(hidden_states(), topk_indices=indices)

    def test_a_mask(self):
        with pytest.raises(ValueError, match=r"attention_mask: given together with dsa, allowed is None"):
            build(dsa_config())(hidden_states(), torch.zeros(1, 1, LENGTH, LENGTH, dtype=torch.bool))

    @pytest.mark.parametrize(
        ("wide", "message"),
        [
            ({"kv_lora_rank": 1025}, r"kv_lora_rank: given 1025, allowed is at most 1024"),
            ({"qk_pos_emb_head_dim": 258, "dsa_indexer_head_dim": 260}, r"qk_pos_emb_head_dim: given 258, .* 256"),
            ({"dsa_indexer_head_dim": 1040}, r"dsa_indexer_head_dim: given 1040, allowed is at most 1024"),
            ({"dsa_indexer_head_dim": 272, "dsa_indexer_loss_coeff": 1.0}, r"dsa_indexer_head_dim: given 272, .* 256"),
            ({"dsa_indexer_n_heads": 257, "dsa_indexer_loss_coeff": 1.0}, r"dsa_indexer_n_heads: given 257, .* 256"),
        ],
    )
    def test_a_layer_wider_than_the_kernels(self, wide, message):
        core = MLASelfAttention(dsa_config(**wide), device="meta").core_attention
        core.check(torch.device("cpu"), packed=False)
        with pytest.raises(ValueError, match=message) as error:
            core.check(torch.device("cuda"), packed=False)
        assert "\n" not in str(error.value)
        core.kernels = "torch"
        core.check(torch.device("cuda"), packed=False)

    def test_the_published_layers_are_not(self):
        for preset in (glm5, deepseek_v32):
            core = MLASelfAttention(preset(dsa_indexer_loss_coeff=1.0), device="meta").core_attention
            core.check(torch.device("cuda"), packed=True)

    def test_the_limits_are_those_of_the_kernels(self):
        largest = KERNEL_LIMITS["kv_lora_rank"], KERNEL_LIMITS["qk_pos_emb_head_dim"]
        assert largest == (attention_checks._LARGEST_RANK, attention_checks._LARGEST_ROPE)
        assert KERNEL_LIMITS["dsa_indexer_head_dim"] == selection_checks._LARGEST_KERNEL_WIDTH
        assert LOSS_KERNEL_LIMITS["dsa_indexer_head_dim"] == attention_checks._LARGEST_INDEXER_DIM
        assert LOSS_KERNEL_LIMITS["dsa_indexer_n_heads"] == attention_checks._LARGEST_INDEXER_HEADS

    @pytest.mark.parametrize("kernels", ["cuda", None])
    def test_an_unknown_choice_of_kernels(self, kernels):
        layer = build(dsa_config())
        layer.core_attention.kernels = kernels
        with pytest.raises(ValueError, match=r"kernels: given .*allowed are 'auto', 'triton', 'torch'"):
            layer(hidden_states())

    @pytest.mark.parametrize(
        "wrong",
        [
            {"dsa_indexer_n_heads": None},
            {"dsa_indexer_topk": 0},
            {"dsa_indexer_head_dim": -32},
            {"dsa_indexer_head_dim": 8},
            {"dsa_indexer_head_dim": 48, "dsa_indexer_rotate_activation": True},
            {"q_lora_rank": None},
        ],
    )
    def test_a_config_that_describes_no_indexer(self, wrong):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            dsa_config(**wrong)

    @pytest.mark.parametrize(
        ("place", "value", "message"),
        [
            ((1, 20, 0), LENGTH, r"given 24 at \[1, 20, 0\], allowed are -1 and key rows 0..23"),
            ((0, 20, 2), -2, r"given -2 at \[0, 20, 2\], allowed are -1 and key rows 0..23"),
            ((1, 20, 0), 21, r"given 21 at \[1, 20, 0\], allowed are -1 and the keys up to the query.* 0..20"),
            ((1, 20, 0), 6, r"given 6 twice at \[1, 20\], allowed are distinct keys and -1"),
        ],
    )
    def test_index_values_under_validation(self, monkeypatch, place, value, message):
        layer, indices = build(dsa_config()), torch.arange(7).expand(2, LENGTH, 7).clone()
        indices[indices > torch.arange(LENGTH)[:, None]] = -1
        monkeypatch.setenv("MLA_ATTENTION_VALIDATE", "1")
        layer(hidden_states(), topk_indices=indices)
        indices[place] = value
        with pytest.raises(ValueError, match=r"^topk_indices: " + message) as error:
            layer(hidden_states(), topk_indices=indices)
        assert "\n" not in str(error.value)


def test_autocast_of_an_fp32_layer():
    layer = build(dsa_config(dsa_indexer_loss_coeff=1.0, dsa_indexer_use_sparse_loss=True), torch.float32)
    hidden = hidden_states(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        output, _, aux = layer(hidden, return_aux=True)
    assert aux.indexer_loss.dtype == torch.float32
    # Bfloat16 scores may pick another key where two nearly tie, so the exact layer is asked about the same keys.
    expected = layer(hidden, topk_indices=aux.topk_indices)[0]
    assert (output - expected).norm() < 0.03 * expected.norm()


def test_a_latent_norm_that_answers_in_fp32_as_under_autocast():
    layer = build(dsa_config(), torch.bfloat16)
    expected = layer(hidden_states(dtype=torch.bfloat16))[0]
    layer.kv_layernorm.register_forward_hook(lambda module, args, output: output.float())
    assert torch.equal(layer(hidden_states(dtype=torch.bfloat16))[0], expected)


def test_bfloat16_is_near_the_fp64_layer_on_the_same_keys():
    layer = build(dsa_config())
    small = build(dsa_config(), torch.bfloat16)
    small.load_state_dict(layer.state_dict())
    output, _, aux = small(hidden_states(dtype=torch.bfloat16), return_aux=True)
    expected = layer(hidden_states(), topk_indices=aux.topk_indices)[0]
    assert (output.double() - expected).norm() < 0.03 * expected.norm()
