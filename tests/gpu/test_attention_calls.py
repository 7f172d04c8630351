"""What callers do around the layer, on a GPU in bf16: hooks, checkpointing, padding, odd shapes and views, qk-clip.

The layer rotates in its projections' own memory and in gradients' memory: what others keep must not change with it.
"""

from contextlib import contextmanager

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from mla_attention import PackedSeqParams
from tests.gpu.test_attention import MODELS, PACKED, ROWS, build, inputs, packed_params, run

pytestmark = pytest.mark.gpu

each_model = pytest.mark.parametrize("model", ["glm5-8", "v3-8"])  # 192/64/256 and 128/64/128
each_packing = pytest.mark.parametrize("packing", [False, True])
each_recompute = pytest.mark.parametrize("recompute", [False, True])

AGAIN = 1e-3  # the same operations: only the order of a kernel's fp32 sums may differ, which bf16 hides almost always
OTHER = 2e-2  # the same mathematics, rounded to bf16 in other places: half a percent where nothing is wrong


def make(model, like=None, **options):
    return build(MODELS[model](**{"apply_rope_fusion": True, **options}), like=like)


def layout(packing):
    return {"packed_seq_params": packed_params()} if packing else {}


def offsets(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).int().cuda()


def assert_close(found, expected, tolerance):
    """Each tensor's error within `tolerance` of its norm; NaN is in no tolerance."""
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        wanted = expected[name].float()
        assert (tensor.float() - wanted).norm() <= tolerance * wanted.norm(), name


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name


def fill_free_memory_with_nan():
    """Leave NaN in the allocator's free blocks, small and large, so that rows which a kernel leaves out show."""
    torch.cuda.empty_cache()
    sizes = [2**17] * 256 + [2**24] * 4
    held = [torch.full((size,), torch.nan, dtype=torch.bfloat16, device="cuda") for size in sizes]
    del held


PROJECTIONS = ["linear_q_down_proj", "q_layernorm", "linear_q_up_proj"]
PROJECTIONS += ["linear_kv_down_proj", "kv_layernorm", "linear_kv_up_proj"]
WATCHED = {"projections": PROJECTIONS, "core attention": ["core_attention", "linear_proj"]}


@contextmanager
def kept_outputs(layer, modules):
    """What these modules put out in a forward, and core attention is given: each tensor, and a copy of it as it was."""
    kept = {}

    def keep(name, tensor):
        kept[name] = tensor, tensor.detach().clone()

    def keep_operands(module, given):
        for name, tensor in zip(("query", "key", "value"), given[:3], strict=True):
            keep(name, tensor)

    handles = [
        getattr(layer, name).register_forward_hook(lambda m, given, output, name=name: keep(name, output))
        for name in modules
    ]
    if "core_attention" in modules:
        handles.append(layer.core_attention.register_forward_pre_hook(keep_operands))
    yield kept
    for handle in handles:
        handle.remove()


@each_model
@each_packing
@pytest.mark.parametrize("watched", WATCHED)
def test_hooks_keep_what_they_saw_and_change_no_gradient(model, packing, watched):
    layer = make(model)
    hidden, direction = inputs(layer.config)
    plain = run(layer, hidden, direction, **layout(packing))
    with kept_outputs(layer, WATCHED[watched]) as kept:
        found = run(layer, hidden, direction, **layout(packing))
    assert kept.keys() >= set(WATCHED[watched])
    for name, (tensor, copy) in kept.items():
        assert torch.equal(tensor, copy), name  # neither rotated in forward nor overwritten in backward
    assert_close(found, plain, OTHER)  # a watched up projection is not bypassed


@each_model
@each_packing
@pytest.mark.parametrize("watched", WATCHED)
def test_kept_outputs_in_the_loss(model, packing, watched):
    """An auxiliary loss on what hooks kept: gradients equal those of the unfused layer."""
    fused = make(model)
    unfused = make(model, like=fused, apply_rope_fusion=False, kv_assembly="split")
    hidden, direction = inputs(fused.config)

    def step(layer):
        entry = hidden.detach().requires_grad_()
        with kept_outputs(layer, WATCHED[watched]) as kept:
            output, _ = layer(entry, **layout(packing))
        generator = torch.Generator("cuda").manual_seed(2)
        tensors = [tensor for tensor, _ in kept.values()]
        # Scaled to the size of what comes through attention, so that neither share hides the other.
        directions = [torch.randn(t.shape, generator=generator, device="cuda").to(t) / 8 for t in tensors]
        leaves = {"hidden": entry, **dict(layer.named_parameters())}
        found = torch.autograd.grad([output, *tensors], leaves.values(), [direction, *directions])
        return dict(zip(leaves, found, strict=True))

    found = step(fused)
    assert_close(found, step(unfused), OTHER)
    plain = run(fused, hidden, direction, **layout(packing))
    difference = (found["hidden"].float() - plain["hidden"].float()).norm()
    assert difference > 0.1 * plain["hidden"].float().norm()  # the auxiliary loss counts


@each_model
@each_packing
@each_recompute
@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_changes_no_gradient(model, packing, recompute, reentrant):
    layer = make(model, recompute_up_proj=recompute)
    hidden, direction = inputs(layer.config)
    plain = run(layer, hidden, direction, **layout(packing))
    forwards = []

    def forward(entry):
        forwards.append(entry)
        return layer(entry, **layout(packing))[0]

    entry = hidden.clone().requires_grad_()
    output = checkpoint(forward, entry, use_reentrant=reentrant)
    output.backward(direction)
    assert len(forwards) == 2
    found = {"hidden": entry.grad, **{name: p.grad for name, p in layer.named_parameters()}}
    assert torch.equal(output, plain["output"])
    assert_close(found, {name: plain[name] for name in found}, AGAIN)


@each_model
@each_packing
@each_recompute
def test_an_output_used_twice_and_a_second_backward(model, packing, recompute):
    layer = make(model, recompute_up_proj=recompute)
    hidden, direction = inputs(layer.config)
    given = direction.clone()
    entry = hidden.detach().requires_grad_()
    output, _ = layer(entry, **layout(packing))
    plain = run(layer, hidden, direction + direction * output.detach().cos(), **layout(packing))
    leaves = {"hidden": entry, **dict(layer.named_parameters())}
    uses = [output, output.sin()]
    for again in (True, False):
        found = torch.autograd.grad(uses, leaves.values(), [direction, direction], retain_graph=again)
        found = dict(zip(leaves, found, strict=True))
        assert_close(found, {name: plain[name] for name in found}, AGAIN)
    assert torch.equal(direction, given)


@each_model
@each_packing
def test_query_key_and_value_used_twice_leave_the_callers_gradients_alone(model, packing):
    fused = make(model)
    unfused = make(model, like=fused, apply_rope_fusion=False, kv_assembly="split")
    hidden, _ = inputs(fused.config)
    entry = hidden.detach().requires_grad_()
    operands, others = (layer.get_query_key_value_tensors(entry, **layout(packing))[:3] for layer in (fused, unfused))
    directions = [torch.randn_like(t) for t in operands]
    given = [t.clone() for t in directions]

    def gradients(layer, uses):
        parameters = {name: p for name, p in layer.named_parameters() if name != "linear_proj.weight"}
        times = len(uses) // len(directions)
        found = torch.autograd.grad(uses, [entry, *parameters.values()], directions * times, retain_graph=True)
        return dict(zip(["hidden", *parameters], found, strict=True))

    once = gradients(fused, operands)
    twice = gradients(fused, [*operands, *(t.clone() for t in operands)])
    for tensor, copy in zip(directions, given, strict=True):
        assert torch.equal(tensor, copy)
    assert_close(once, gradients(unfused, others), OTHER)
    assert_close(twice, {name: 2 * t for name, t in once.items()}, AGAIN)


# Tokens of each sequence, rows that each has, rows after the last. At most 128 tokens: two blocks of keys, whose
# atomic sums in a flash backward are the same in both orders, so that gradients can be compared bit by bit.
ROOM = {
    "padded": ([100, 1, 0, 90], [104, 4, 3, 128], 0),
    "past the last offset": ([100, 1, 0, 90], [100, 1, 0, 90], 83),
    "padded, and past": ([100, 1, 0, 90], [104, 4, 3, 90], 83),
    "one token": ([1], [4], 12),
}


def with_room(name, validate=True):
    """Offsets, and which rows hold a token."""
    lengths, room, after = ROOM[name]
    holds = [row < length for length, rows in zip(lengths, room, strict=True) for row in range(rows)] + [False] * after
    padded = {} if room == lengths else {"cu_seqlens_q_padded": offsets(room)}
    packed = PackedSeqParams(offsets(lengths), max_seqlen_q=max(room), validate=validate, **padded)
    return packed, torch.tensor(holds, device="cuda")


@each_model
@pytest.mark.parametrize(("core", "validate"), [("auto", True), ("auto", False), ("sdpa", True)])
@pytest.mark.parametrize("room", ["padded", "past the last offset", "padded, and past"])
def test_rows_without_a_token_give_zero_and_leak_nothing(model, core, validate, room):
    layer = make(model, core_attention_backend=core)
    packed, holds = with_room(room, validate)
    clean, direction = inputs(layer.config)
    clean, direction = (t[: len(holds)] * holds[:, None, None] for t in (clean, direction))
    expected = run(layer, clean, direction, packed_seq_params=packed)
    fill_free_memory_with_nan()
    spoilt = (t.masked_fill(~holds[:, None, None], torch.nan) for t in (clean, direction))
    found = run(layer, *spoilt, packed_seq_params=packed)
    assert_equal(found, expected)
    for name in ("output", "hidden"):
        assert not found[name][~holds].any(), name
        assert found[name][holds].any(-1).all(), name
    alone = run(layer, clean[holds], direction[holds], packed_seq_params=PackedSeqParams(offsets(ROOM[room][0])))
    assert_close({**found, **{name: found[name][holds] for name in ("output", "hidden")}}, alone, OTHER)


@each_model
@each_recompute
@pytest.mark.parametrize("lengths", [None, [], [0, 0]])
def test_zero_tokens(model, recompute, lengths):
    layer = make(model, recompute_up_proj=recompute)
    packed = None if lengths is None else PackedSeqParams(offsets(lengths))
    batch = 2 if packed is None else 1
    hidden = torch.zeros(0, batch, layer.config.hidden_size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    output, _ = layer(hidden, packed_seq_params=packed)
    assert output.shape == hidden.shape
    assert output.dtype == hidden.dtype
    output.sum().backward()
    assert hidden.grad.shape == hidden.shape
    assert not any(p.grad is not None and p.grad.any() for p in layer.parameters())


@each_model
@pytest.mark.parametrize("core", ["auto", "sdpa"])
def test_empty_sequences_change_nothing(model, core):
    layer = make(model, core_attention_backend=core)
    hidden, direction = inputs(layer.config)
    tokens = [length for length in PACKED if length]
    scattered = [0, 0, *(n for length in tokens for n in (length, 0)), 0]
    found, plain = (
        run(layer, hidden, direction, packed_seq_params=PackedSeqParams(offsets(n))) for n in (scattered, tokens)
    )
    assert_close(found, plain, AGAIN)


def randn(*shape):
    return torch.randn(*shape, device="cuda").bfloat16()


VIEWS = {
    "batch first": lambda s, b, h: randn(b, s, h).transpose(0, 1),
    "every second row": lambda s, b, h: randn(2 * s, b, h)[::2],
    "unaligned columns": lambda s, b, h: randn(s, b, h + 1)[..., 1:],
    "expanded": lambda s, b, h: randn(1, 1, h).expand(s, b, h),
}


@each_model
@each_packing
@pytest.mark.parametrize("view", VIEWS)
def test_input_and_output_gradient_may_be_views(model, packing, view):
    layer = make(model)
    torch.manual_seed(1)
    shape = (ROWS, 1 if packing else 2, layer.config.hidden_size)
    hidden, direction = VIEWS[view](*shape), VIEWS[view](*shape)
    assert hidden.is_contiguous() == (packing and view == "batch first")
    found = run(layer, hidden, direction, **layout(packing))
    plain = run(layer, hidden.contiguous(), direction.contiguous(), **layout(packing))
    assert_close(found, plain, OTHER)


@each_model
@pytest.mark.parametrize(("core", "packing"), [("auto", False), ("auto", True), ("sdpa", True)])
def test_later_tokens_leave_earlier_rows_bitwise_alone(model, packing, core):
    """And no gradient goes to them from earlier rows."""
    layer = make(model, core_attention_backend=core)
    hidden, direction = inputs(layer.config, batch=1 if packing else 2)
    # From within the longest sequence, and not at the edge of a kernel's block.
    later = slice(191, 301 if packing else ROWS)
    others = torch.ones(ROWS, dtype=torch.bool, device="cuda")
    others[later] = False
    changed = hidden.clone()
    changed[later] = 30 * hidden[later].flip(0)
    direction[later] = 0
    before, after = (run(layer, h, direction, **layout(packing)) for h in (hidden, changed))
    assert torch.equal(before["output"][others], after["output"][others])
    assert (before["output"][~others] != after["output"][~others]).any(-1).all()
    assert not after["hidden"][~others].any()
    assert after["hidden"][others].any(-1).all()


def largest_by_hand(layer, hidden, packed, sequences):
    """The largest logit of each head, from all scores of these rows of queries and keys."""
    query, key = layer.get_query_key_value_tensors(hidden, packed_seq_params=packed)[:2]
    largest = []
    for rows in sequences:
        q, k = (t[rows].view(-1, hidden.shape[1], layer.num_heads, t.shape[-1]) for t in (query, key))
        logits = torch.einsum("sbnd,tbnd->nbst", q, k) * layer.softmax_scale
        later = torch.ones_like(logits, dtype=torch.bool).triu(1)
        largest.append(logits.masked_fill(later, -torch.inf).amax((1, 2, 3)))
    return torch.stack(largest).amax(0)


@each_model
@pytest.mark.parametrize("room", [None, "padded, and past", "one token"])
def test_largest_logits_and_the_clip_that_lowers_them(model, room):
    layer = make(model, qk_clip=True)
    with torch.no_grad():
        q, kv = (p.weight.view(layer.num_heads, -1) for p in (layer.linear_q_up_proj, layer.linear_kv_up_proj))
        q[::2] *= 0.125  # too small to be clipped
        q[1], kv[1] = -q[3], kv[3]  # opposite logits: of one token's, one is negative
    exact = build(MODELS[model](qk_clip=True), torch.float64, like=layer)
    hidden, _ = inputs(layer.config, batch=2 if room is None else 1)
    packed, sequences = None, [slice(0, ROWS)]
    if room is not None:
        packed, holds = with_room(room)
        hidden = hidden[: len(holds)].masked_fill(~holds[:, None, None], torch.nan)
        lengths, starts, _ = ROOM[room]
        sequences = [slice(a, a + n) for a, n in zip(offsets(starts).tolist(), lengths, strict=False) if n]
    for rows in sequences:
        hidden[rows.stop - 1] *= 4  # a key that only the last query sees: the others' largest logits would be with it

    def largest():
        with torch.no_grad():
            output, _, aux = layer(hidden, packed_seq_params=packed, return_aux=True)
            assert torch.equal(output, layer(hidden, packed_seq_params=packed)[0])
        return aux.max_attention_logits

    before = largest()
    assert before.dtype == torch.float32
    expected = largest_by_hand(exact, hidden.double(), packed, sequences)
    tolerance = {"rtol": 1e-2, "atol": 4e-2}  # bf16 queries and keys move logits of order one by 0.01
    torch.testing.assert_close(before.double(), expected, **tolerance)
    threshold = 0.5 * before.max().item()
    weights = {name: p.detach().clone() for name, p in layer.named_parameters()}
    layer.clip_qk(before, threshold)
    after = largest()
    torch.testing.assert_close(after, before.clamp(max=threshold), **tolerance)
    kept = before <= threshold
    assert 0 < kept.sum() < len(kept)
    assert torch.equal(after[kept], before[kept])
    for name, parameter in layer.named_parameters():
        if name.endswith("up_proj.weight"):
            heads = parameter.view(len(kept), -1), weights[name].view(len(kept), -1)
            assert torch.equal(heads[0][kept], heads[1][kept]), name
            assert not torch.equal(*heads), name
        else:
            assert torch.equal(parameter, weights[name]), name
