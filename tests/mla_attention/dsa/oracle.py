"""A DSA layer written out for one sequence in fp64: dense logits, a mask, no absorption, no tiles, no kernels."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from mla_attention import MLASelfAttention
from mla_attention.configs import MLAConfig, tiny

DSA = {
    "experimental_attention_variant": "dsa",
    "dsa_indexer_n_heads": 3,
    "dsa_indexer_head_dim": 32,
    "dsa_indexer_topk": 7,
}


def dsa_config(**overrides) -> MLAConfig:
    return tiny(**{**DSA, **overrides})


def build(config: MLAConfig, dtype: torch.dtype = torch.float64, seed: int = 0) -> MLASelfAttention:
    """A layer whose scores vary and whose norm weights lie in [0.2, 3], so that skipping a norm changes selections."""
    torch.manual_seed(seed)
    layer = MLASelfAttention(config, dtype=dtype)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if "norm" in name and name.endswith("weight"):
                parameter.uniform_(0.2, 3.0)
            else:
                parameter.normal_(std=0.25)
    return layer


@dataclass(frozen=True)
class Faults:
    """What people got wrong; each one has to fail a test that passes without it."""

    query_pairing: bool = False
    key_pairing: bool = False
    no_relu: bool = False
    raw_latent: bool = False
    rms_key_norm: bool = False
    no_key_bias: bool = False
    rope_last: bool = False
    hadamard_one_side: bool = False


@dataclass
class Answer:
    output: Tensor  # [S, H]
    indices: Tensor  # [S, k]
    dense_kl: Tensor  # [S]
    sparse_kl: Tensor  # [S]
    index_query: Tensor  # [S, Hi, Di]
    index_key: Tensor  # [S, Di]
    scores: Tensor = field(repr=False)  # [S, S]


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Pairs of `x` `[S, .., Dr]` as complex numbers times cos + i sin; the result in halves."""
    half = x.shape[-1] // 2
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    turn = torch.complex(cos[..., :half], sin[..., :half]).view(-1, *[1] * (x.dim() - 2), half)
    turned = torch.complex(a, b) * turn
    return torch.cat([turned.real, turned.imag], -1)


def hadamard(width: int) -> Tensor:
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while matrix.shape[0] < width:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / width**0.5


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt() * weight + bias


def oracle(
    layer: MLASelfAttention,
    hidden: Tensor,
    *,
    positions: Tensor | None = None,
    selected: Tensor | None = None,
    faults: Faults = Faults(),
) -> Answer:
    """The layer on one sequence `[S, H]`; `selected` bool `[S, S]` replaces the indexer's choice."""
    c, w = layer.config, dict(layer.named_parameters())
    length, heads = hidden.shape[0], c.num_attention_heads
    dn, dr, dv = c.qk_head_dim, c.qk_pos_emb_head_dim, c.v_head_dim
    positions = torch.arange(length) if positions is None else positions
    cos, sin = layer.rotary.cos_sin(int(positions.max()) + 1, device="cpu")
    cos, sin = cos[positions, 0, 0].double(), sin[positions, 0, 0].double()

    raw_latent = hidden @ w["linear_q_down_proj.weight"].T
    q_latent = rms_norm(raw_latent, w["q_layernorm.weight"], c.layernorm_epsilon)
    q = (q_latent @ w["linear_q_up_proj.weight"].T).view(length, heads, dn + dr)
    kv_latent, k_pe = (hidden @ w["linear_kv_down_proj.weight"].T).split([c.kv_lora_rank, dr], -1)
    kv_latent = rms_norm(kv_latent, w["kv_layernorm.weight"], c.layernorm_epsilon)
    kv = (kv_latent @ w["linear_kv_up_proj.weight"].T).view(length, heads, dn + dv)
    q = torch.cat([q[..., :dn], rotate(q[..., dn:], cos, sin, True)], -1)
    k_pe = rotate(k_pe, cos, sin, True)
    k = torch.cat([kv[..., :dn], k_pe[:, None].expand(-1, heads, -1)], -1)
    logits = torch.einsum("snd,tnd->nst", q, k) * layer.softmax_scale
    causal = torch.ones(length, length, dtype=torch.bool).tril()

    index_query = index_key = scores = None
    if selected is None:
        index_query, index_key, scores = _scores(c, w, hidden, raw_latent, q_latent, cos, sin, faults)
        selected = _select(scores.detach(), causal, c.dsa_indexer_topk)
    weights = logits.masked_fill(~selected, -torch.inf).softmax(-1).nan_to_num()
    output = torch.einsum("nst,tnv->snv", weights, kv[..., dn:]).flatten(1) @ w["linear_proj.weight"].T

    width = min(c.dsa_indexer_topk, length)
    indices = torch.full((length, width), -1)
    for row in range(length):
        found = selected[row].nonzero()[:width, 0]
        indices[row, : len(found)] = found
    kl = [_kl(logits.detach(), scores, support) for support in (causal, selected)] if scores is not None else [None] * 2
    return Answer(output, indices, *kl, index_query, index_key, scores)


def _scores(c, w, hidden, raw_latent, q_latent, cos, sin, faults):
    hidden, latent = hidden.detach(), (raw_latent if faults.raw_latent else q_latent).detach()
    p = "core_attention.indexer."
    heads, width, dr = c.dsa_indexer_n_heads, c.dsa_indexer_head_dim, c.qk_pos_emb_head_dim
    q = (latent @ w[p + "linear_wq_b.weight"].T).view(-1, heads, width)
    k = hidden @ w[p + "linear_wk.weight"].T
    bias = w[p + "k_norm.bias"] * (0.0 if faults.no_key_bias else 1.0)
    if faults.rms_key_norm:
        k = rms_norm(k, w[p + "k_norm.weight"], c.dsa_indexer_k_norm_epsilon) + bias
    else:
        k = layer_norm(k, w[p + "k_norm.weight"], bias, c.dsa_indexer_k_norm_epsilon)

    def turned(x, interleaved):
        if faults.rope_last:
            return torch.cat([x[..., :-dr], rotate(x[..., -dr:], cos, sin, interleaved)], -1)
        return torch.cat([rotate(x[..., :dr], cos, sin, interleaved), x[..., dr:]], -1)

    q = turned(q, c.dsa_indexer_rope_interleaved ^ faults.query_pairing)
    k = turned(k, c.dsa_indexer_rope_interleaved ^ faults.key_pairing)
    if c.dsa_indexer_rotate_activation:
        q = q @ hadamard(width)
        k = k if faults.hadamard_one_side else k @ hadamard(width)
    weight = hidden @ w[p + "linear_weights_proj.weight"].T * heads**-0.5 * width**-0.5
    dots = torch.einsum("shd,td->hst", q, k)
    dots = dots.clamp(min=0) if c.dsa_indexer_scoring_relu and not faults.no_relu else dots
    return q, k, torch.einsum("hst,sh->st", dots, weight)


def _select(scores: Tensor, causal: Tensor, topk: int) -> Tensor:
    """Bool `[S, S]`: the topk highest causal scores of each row, ties to the lower index."""
    selected = torch.zeros_like(causal)
    for row in range(scores.shape[0]):
        order = sorted(range(row + 1), key=lambda t: (-scores[row, t].item(), t))
        selected[row, order[:topk]] = True
    return selected


def _kl(logits: Tensor, scores: Tensor, support: Tensor) -> Tensor:
    target = logits.masked_fill(~support, -torch.inf).softmax(-1).mean(0)
    predicted = scores.masked_fill(~support, -torch.inf).log_softmax(-1)
    return torch.where(support, target * (target.log() - predicted), 0.0).nan_to_num().sum(-1)
