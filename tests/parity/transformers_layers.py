"""transformers' attention layers beside ours: same published-style config, same weights, same tokens.

Their layout is [B, S, H], ours [S, B, H]; their causality is an additive mask, ours is built in.
"""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mla_attention import MLASelfAttention
from mla_attention.checkpoint import load_hf_state_dict
from mla_attention.configs import from_hf_config
from tests.mla_attention.checkpoint.layers import NAMES

PINNED = "5.24.0"  # compared with to fp32 rounding; `build_pair(any_release=True)` takes others, from OLDEST on
OLDEST = "5.17"
transformers = pytest.importorskip("transformers", minversion=OLDEST)

from transformers.models.deepseek_v2 import modeling_deepseek_v2 as v2  # noqa: E402
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as v3  # noqa: E402
from transformers.models.deepseek_v32 import modeling_deepseek_v32 as v32  # noqa: E402
from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa as glm  # noqa: E402

FAMILIES = {
    "deepseek_v2": (transformers.DeepseekV2Config, v2.DeepseekV2Attention, v2.DeepseekV2RotaryEmbedding),
    "deepseek_v3": (transformers.DeepseekV3Config, v3.DeepseekV3Attention, v3.DeepseekV3RotaryEmbedding),
    "deepseek_v32": (transformers.DeepseekV32Config, v32.DeepseekV32Attention, v32.DeepseekV32RotaryEmbedding),
    "glm_moe_dsa": (transformers.GlmMoeDsaConfig, glm.GlmMoeDsaAttention, glm.GlmMoeDsaRotaryEmbedding),
}
DIMS = {
    "hidden_size": 60,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "num_hidden_layers": 8,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
    "max_position_embeddings": 640,
}
# Many heads: a score is exactly 0, and ties, only where every head's product is negative.
INDEXER = {"index_n_heads": 24, "index_head_dim": 32, "index_topk": 2048}
PLAIN = {"rope_theta": 1e6, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
YARN = {
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}
BATCH, LENGTH = 2, 33


@dataclass
class Pair:
    """A layer of theirs and one of ours with the same random weights."""

    theirs: nn.Module
    rotary: nn.Module
    ours: MLASelfAttention


@dataclass
class Results:
    """What one forward and backward gave, in our layout; `gradients` by our parameter names."""

    output: Tensor
    input_gradient: Tensor
    gradients: dict[str, Tensor | None]
    topk_indices: Tensor | None


def published(family: str, **changes: object) -> dict[str, Any]:
    """Return a small config in the spelling of the family's published config.json."""
    indexer = INDEXER if family in ("deepseek_v32", "glm_moe_dsa") else {}
    return {"model_type": family, **DIMS, **indexer, **changes}


def build_pair(
    config: dict[str, Any],
    *,
    layer_idx: int = 0,
    seed: int = 0,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    any_release: bool = False,
    **overrides: object,
) -> Pair:
    """Build both layers of a published config; `overrides` are fields of ours."""
    if transformers.__version__ != PINNED and not any_release:
        pytest.skip(f"compares with transformers {PINNED}, found {transformers.__version__}")
    build_config, attention, rotary = FAMILIES[config["model_type"]]
    their_config = build_config(**{key: value for key, value in config.items() if key != "model_type"})
    their_config._attn_implementation = "eager"
    theirs = attention(their_config, layer_idx)
    randomise(theirs, seed)
    theirs.to(device=device, dtype=dtype)
    ours = MLASelfAttention(from_hf_config(config, layer_idx=layer_idx, **overrides), device=device, dtype=dtype)
    load_hf_state_dict(ours, theirs.state_dict())
    return Pair(theirs, rotary(their_config).to(device), ours)


def randomise(layer: nn.Module, seed: int) -> None:
    """Give matrices unit gain, so that logits are of order one, and norms weights around one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in layer.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise / parameter.shape[1] ** 0.5 if parameter.ndim == 2 else 1 + 0.3 * noise)


def random_tokens(length: int = LENGTH, width: int = DIMS["hidden_size"], *, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Return hidden states and an output gradient, both `[S, B, H]`."""
    generator = torch.Generator().manual_seed(seed)
    shape = (length, BATCH, width)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def causal_mask(length: int, like: Tensor) -> Tensor:
    """Return their additive causal mask `[B, 1, S, S]`, of the dtype and on the device of `like`."""
    return like.new_full((length, length), float("-inf")).triu(1).expand(BATCH, 1, -1, -1)


def run_theirs(
    pair: Pair, hidden: Tensor, gradient: Tensor, *, positions: Tensor | None = None, **kwargs: Any
) -> Results:
    """Run their layer forward and backward."""
    length = hidden.shape[0]
    hidden = hidden.transpose(0, 1).contiguous().requires_grad_()
    if positions is None:
        positions = torch.arange(length, device=hidden.device).expand(BATCH, -1)
    selected: list[Tensor] = []
    indexer = getattr(pair.theirs, "indexer", None)
    hook = indexer and indexer.register_forward_hook(lambda module, args, output: selected.append(output))
    output = pair.theirs(
        hidden_states=hidden,
        position_embeddings=pair.rotary(hidden, positions),
        attention_mask=causal_mask(length, hidden),
        **kwargs,
    )[0]
    if hook:
        hook.remove()
    ours = {theirs: name for name, theirs in NAMES.items()}
    parameters = {ours[name]: parameter for name, parameter in pair.theirs.named_parameters()}
    gradients = _gradients(output, gradient.transpose(0, 1), hidden, parameters)
    return Results(output.transpose(0, 1), gradients.pop("hidden").transpose(0, 1), gradients, *(selected or [None]))


def run_ours(pair: Pair, hidden: Tensor, gradient: Tensor, **kwargs: Any) -> Results:
    """Run our layer forward and backward."""
    hidden = hidden.clone().requires_grad_()
    output, bias, aux = pair.ours(hidden, return_aux=True, **kwargs)
    assert bias is None
    gradients = _gradients(output, gradient, hidden, dict(pair.ours.named_parameters()))
    return Results(output, gradients.pop("hidden"), gradients, aux.topk_indices)


def _gradients(output: Tensor, gradient: Tensor, hidden: Tensor, parameters: dict[str, nn.Parameter]) -> dict[str, Any]:
    leaves = {"hidden": hidden, **parameters}
    return dict(zip(leaves, torch.autograd.grad(output, leaves.values(), gradient, allow_unused=True), strict=True))


def error(ours: Tensor, theirs: Tensor) -> float:
    """Return the largest difference, relative to the largest value."""
    assert ours.shape == theirs.shape
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


def assert_same(ours: Results, theirs: Results, *, one_key: bool = False) -> None:
    """Compare output, input gradient and every weight gradient.

    The indexer has none on either side. With one key for each query the softmax is constant: no gradient for queries.
    """
    assert error(ours.output, theirs.output) < 2e-5
    assert error(ours.input_gradient, theirs.input_gradient) < 2e-5
    assert ours.gradients.keys() == theirs.gradients.keys()
    for name, gradient in ours.gradients.items():
        expected = theirs.gradients[name]
        if ".indexer." in name:
            assert (gradient, expected) == (None, None), name
        elif one_key and name.startswith(("linear_q", "q_")):
            assert gradient.abs().max() < 1e-6, name
        else:
            assert expected.abs().max() > 0, name
            assert error(gradient, expected) < 1e-4, name


def assert_same_tables(pair: Pair, positions: tuple[int, ...] = (0, 1, 15, 16, 100, 639)) -> None:
    """Compare cos and sin at these positions; theirs are fp32 products of position and frequency."""
    place = torch.tensor([positions])
    theirs = pair.rotary(torch.zeros(1, 1), place)
    if torch.is_tensor(theirs):  # complex: one number for each pair
        theirs = (torch.cat([theirs.real] * 2, -1), torch.cat([theirs.imag] * 2, -1))
    ours = pair.ours.rotary.cos_sin(max(positions) + 1, device="cpu")
    for mine, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine[place[0], 0, 0], expected[0], atol=1e-4, rtol=0)


def swap_rotary_rows(weight: Tensor, first: int, width: int, head: int) -> Tensor:
    """Reorder `width` rotary rows of each head, from its row `first`, from interleaved pairs to halves."""
    rows = weight.unflatten(0, (-1, head)).clone()
    rotary = rows[:, first : first + width]
    rows[:, first : first + width] = torch.cat([rotary[:, 0::2], rotary[:, 1::2]], dim=1)
    return rows.flatten(0, 1)


def visible_sets(indices: Tensor) -> list[list[set[int]]]:
    """Return the selected keys of each row, [B][S], without unused slots and keys of the future."""
    return [[{k for k in row if 0 <= k <= t} for t, row in enumerate(rows)] for rows in indices.tolist()]
