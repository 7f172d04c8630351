"""MLASelfAttention: multi-head latent attention, dense or DeepSeek-sparse.

    q_latent = norm(W_dq h)                          k_pe, kv_latent = W_dkv h;  kv_latent = norm(kv_latent)
    q        = W_uq q_latent = [q_nope | q_pe]       [k_nope | v]    = W_ukv kv_latent
    o        = softmax([q_nope | rope(q_pe)] . [k_nope | rope(k_pe)] * scale) v
    out      = W_o o

Sources: DeepSeek-V2 (arXiv 2405.04434) and DeepSeek-V3.2 for the layer; module, parameter and argument names are
those of Megatron-LM's MLASelfAttention.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mla_attention.argument_checks import as_device, check_dtype, check_kind
from mla_attention.communication import Communication, KeysUnderWay
from mla_attention.configs import MLAConfig
from mla_attention.core_attention import CoreAttention, build_core_attention
from mla_attention.dsa.absorb import absorb_query, latent_attention, split_up_projection, up_project_value
from mla_attention.forward_checks import refuse_topk_indices
from mla_attention.forward_layout import lay_out_tokens
from mla_attention.head_groups import attend_in_groups, head_groups
from mla_attention.key_value_assembly import KeyValueAssembly
from mla_attention.latent_cache import LatentCache
from mla_attention.layers import build_layers
from mla_attention.logits import largest_logits
from mla_attention.output_projection import project_contexts
from mla_attention.outputs import AttentionAux
from mla_attention.packed import PackedSeqParams
from mla_attention.qk_clip import clip_projections
from mla_attention.recompute import with_recomputed_operands
from mla_attention.rotary import build_rotary, softmax_scale
from mla_attention.token_layout import TokenLayout, without_padding

if TYPE_CHECKING:
    from mla_attention.dsa.sparse_attention import SparseAttention
    from mla_attention.layers.torch_layers import Linear


def should_use_fused_mla_rope(config: MLAConfig) -> bool:
    """Whether a layer of this config rotates through the fused Triton kernels: `config.apply_rope_fusion`.

    Every rope_type and rotary_percent that a config accepts is one that the kernels serve.
    """
    return config.apply_rope_fusion


class MLASelfAttention(nn.Module):
    """One attention layer of a DeepSeek- or GLM-5-shaped model.

    Args:
        config: dims, rope, core attention back end; `experimental_attention_variant="dsa"` adds the indexer and attends
            sparsely where there are more keys than `dsa_indexer_topk`.
        layer_number: 1-based, for messages and Megatron-LM's naming.
        backend: "torch" or "te" (Transformer Engine) linear and norm layers.
        tp_group, cp_group: process groups; the module then holds this rank's share of the heads, as Megatron-LM's does.
            Its weights are that share of a whole layer's, so seed all ranks alike. `mla_attention.parallelize` is the
            other way to the same module.
        device, dtype: of the parameters; torch's defaults where None.

    Raises:
        ValueError: for something else than an MLAConfig, an unknown back end, or heads that the tensor-parallel group
            does not divide.

    Example:
        >>> layer = MLASelfAttention(tiny())
        >>> output, bias = layer(torch.randn(16, 2, layer.config.hidden_size))     # [S, B, H]
    """

    def __init__(
        self,
        config: MLAConfig,
        layer_number: int = 1,
        *,
        backend: str = "torch",
        tp_group: torch.distributed.ProcessGroup | None = None,
        cp_group: torch.distributed.ProcessGroup | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_kind("config", config, MLAConfig, required=True)
        check_kind("layer_number", layer_number, int, required=True)
        if dtype is not None:
            check_dtype(dtype)
        if device is not None:
            device = as_device(device)
        self.config = config
        self.layer_number = layer_number
        self.backend = backend
        self.comm = Communication.of_groups(tp_group, cp_group, config.cp_comm_type)
        self.num_heads = self.comm.heads_of_rank(config.num_attention_heads)  # n, of this rank
        self.softmax_scale = softmax_scale(config)
        self.rotary = build_rotary(config)
        self.assemble = KeyValueAssembly(config)

        layers = build_layers(backend, device, dtype)
        dense = config.experimental_attention_variant is None  # else the normed latents themselves are needed
        q_width = self.num_heads * (config.qk_head_dim + config.qk_pos_emb_head_dim)
        kv_width = self.num_heads * (config.qk_head_dim + config.v_head_dim)
        std, eps = config.init_method_std, config.layernorm_epsilon
        if config.q_lora_rank is None:
            self.linear_q_proj = layers.linear(config.hidden_size, q_width, init_std=std, share=self.comm.share(0))
        else:
            self.linear_q_down_proj = layers.linear(config.hidden_size, config.q_lora_rank, init_std=std)
            self.q_layernorm = layers.rms_norm(config.q_lora_rank, eps)
            self.linear_q_up_proj = layers.linear(
                config.q_lora_rank,
                q_width,
                init_std=std,
                share=self.comm.share(0),
                norm=self.q_layernorm if dense else None,
            )
        self.linear_kv_down_proj = layers.linear(
            config.hidden_size, config.kv_lora_rank + config.qk_pos_emb_head_dim, init_std=std
        )
        self.kv_layernorm = layers.rms_norm(config.kv_lora_rank, eps)
        self.linear_kv_up_proj = layers.linear(
            config.kv_lora_rank,
            kv_width,
            init_std=std,
            share=self.comm.share(0),
            norm=self.kv_layernorm if dense else None,
        )
        self.assemble.check(self.linear_kv_up_proj)
        self.linear_proj = layers.linear(
            self.num_heads * config.v_head_dim,
            config.hidden_size,
            bias=config.add_bias_linear,
            init_std=std / math.sqrt(2 * config.num_layers),
            share=self.comm.share(1),
        )
        self.core_attention: CoreAttention | SparseAttention = build_core_attention(config, self.softmax_scale, backend)
        if config.experimental_attention_variant == "dsa":
            from mla_attention.dsa.sparse_attention import SparseAttention

            self.core_attention = SparseAttention(config, self.softmax_scale, dense=self.core_attention, layers=layers)
        self.comm.attach(self)
        if device is not None and torch.device(device).type == "cuda":
            self.core_attention.check(torch.device(device), packed=False)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: PackedSeqParams | None = None,
        position_ids: Tensor | None = None,
        topk_indices: Tensor | None = None,
        cache: LatentCache | None = None,
        return_aux: bool = False,
    ) -> tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, AttentionAux]:
        """Attention of each token over itself and the tokens before it in its sequence.

        Args:
            hidden_states: `[S, B, H]`, packed `[T, 1, H]`; the sequence axis is this rank's share under sequence or
                context parallelism.
            attention_mask: bool broadcastable to `[B, 1, S, S]`, True = masked, combined with causality.
            packed_seq_params: offsets of packed sequences; rows that hold no token give exact zeros.
            position_ids: integers `[S]`, `[B, S]`, packed `[T]`; they change the rotation only, never causality. On a
                GPU their largest value is read once on the host. Under sequence parallelism those of the rank's slice,
                or of all rows of the tensor-parallel group.
            topk_indices: int32 or int64 `[B, S, k]`, packed `[1, T, k]`: keys that each query attends to, -1 in unused
                slots (dsa only; the layer's own indexer is then not asked). Rows are those of the tensor-parallel
                group, keys count in the global order of the context-parallel ranks, as in `aux.topk_indices`.
            cache: past tokens; the new ones are appended. Entries are detached.
            return_aux: also return an `AttentionAux`. The indexer loss is then returned, not attached to the output.

        Returns:
            (output `[S, B, H]`, bias `[H]` or None[, aux]). The bias is not added to the output.

        Raises:
            ValueError: naming the argument, what was given and what is allowed.
        """
        tokens = self._token_layout(hidden_states, attention_mask, packed_seq_params, position_ids, cache)
        hidden = self._enter(hidden_states, tokens)
        q_latent, kv_latent, k_pe, started = self._project_down(hidden)
        kv_latent, k_pe = self._key_latents(kv_latent, k_pe, tokens, started)
        if self.config.experimental_attention_variant == "dsa":
            contexts, aux = self._attend_sparse(
                hidden, q_latent, kv_latent, k_pe, tokens, topk_indices, cache, return_aux
            )
        else:
            refuse_topk_indices(topk_indices)
            contexts, aux = self._attend_dense(q_latent, kv_latent, k_pe, tokens, cache, return_aux)
        output = self._leave(contexts, tokens)
        bias = self.linear_proj.local_bias()
        return (output, bias, aux) if return_aux else (output, bias)

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        *,
        packed_seq_params: PackedSeqParams | None = None,
        position_ids: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor]:
        """What core attention is given.

        Args:
            hidden_states, packed_seq_params, position_ids: as in `forward`.

        Returns:
            query, key `[S, B, n, Dn+Dr]` (packed `[T, n, Dn+Dr]`), value `[S, B, n, Dv]`, and the normed latents
            q_compressed `[S, B, Rq]` (None without q_lora_rank) and kv_compressed `[S, B, Rkv]`. For dsa query
            `[S, B, n, Rkv+Dr]` and key `[S, B, 1, Rkv+Dr]` are the absorbed ones and value is None.

        Raises:
            ValueError: as `forward`.
        """
        tokens = self._token_layout(hidden_states, None, packed_seq_params, position_ids, None)
        q_latent, kv_latent, k_pe, started = self._project_down(self._enter(hidden_states, tokens))
        key_latents = self._key_latents(kv_latent, k_pe, tokens, started)
        q_compressed = None if self.config.q_lora_rank is None else self.q_layernorm.normed(q_latent)
        kv_compressed = self.kv_layernorm.normed(kv_latent)
        if self.config.experimental_attention_variant == "dsa":
            return (*self._absorb(q_latent, *key_latents, tokens), None, q_compressed, kv_compressed)
        return (*self._expand(q_latent, *key_latents, tokens), q_compressed, kv_compressed)

    @torch.no_grad()
    def clip_qk(self, max_logits: Tensor, threshold: float | None = None, alpha: float | None = None) -> None:
        """Scale the projections of each head whose largest logit passed the threshold back to it (MuonClip).

        eta = min(threshold/max_logit, 1) multiplies the head's logits: eta^alpha on its q nope rows, eta on its q rope
        rows, eta^(1-alpha) on its k rows.

        Args:
            max_logits: fp `[n]` of this rank's heads, `aux.max_attention_logits`; reduced over data-parallel ranks by
                the caller.
            threshold, alpha: `config.qk_clip_threshold` and `config.qk_clip_alpha` where None.

        Raises:
            ValueError: for a wrong shape, threshold or alpha, before a weight is touched.

        Source: Kimi K2 technical report (arXiv 2507.20534), section 2.1.
        """
        reshard: Callable[[], None] | None = getattr(self, "reshard", None)
        if reshard is not None:
            reshard()  # under FSDP: gathered parameters are copies, what is written there is lost
        clip_projections(
            self.config,
            self.query_up_proj,
            self.linear_kv_up_proj,
            max_logits,
            self.num_heads,
            threshold,
            alpha,
            tp_rank=self.comm.tp_rank,
        )

    # --- the steps of the forward, in order ---

    def _project_down(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, KeysUnderWay | None]:
        """Normed latents `[.., Rq]`, `[.., Rkv]` and the shared rotary key `[.., Dr]`; without q_lora_rank the query's
        latent is the hidden state. Where the up projections apply the norms, the latents are not normed yet.

        The keys' come first: they may be on their way to other ranks while the query is projected."""
        config = self.config
        if config.mla_down_proj_fusion and config.q_lora_rank is not None:
            weight = torch.cat([self.linear_q_down_proj.local_weight(), self.linear_kv_down_proj.local_weight()])
            widths = [config.q_lora_rank, config.kv_lora_rank + config.qk_pos_emb_head_dim]
            q_latent, kv = F.linear(hidden, weight).split(widths, -1)
        else:
            q_latent, kv = None, self.linear_kv_down_proj(hidden)
        kv_latent, k_pe = kv.split([config.kv_lora_rank, config.qk_pos_emb_head_dim], dim=-1)
        kv_latent = self.kv_layernorm(kv_latent)
        started = self.comm.start_to_all_keys(kv_latent, k_pe)
        if config.q_lora_rank is None:
            q_latent = hidden
        else:
            q_latent = self.q_layernorm(self.linear_q_down_proj(hidden) if q_latent is None else q_latent)
        q_latent, kv_latent, k_pe = self.comm.to_heads(q_latent, kv_latent, k_pe)
        return q_latent, kv_latent, k_pe, started

    def _key_latents(
        self, kv_latent: Tensor, k_pe: Tensor, tokens: TokenLayout, started: KeysUnderWay | None
    ) -> tuple[Tensor, Tensor]:
        """Latents of all keys, gathered over context-parallel ranks: Rkv+Dr channels a token, not keys and values. With
        a `cp_comm_type` those of the rank's own keys: core attention exchanges keys and values."""
        kv_latent, k_pe = self.comm.to_all_keys(kv_latent, k_pe, order=tokens.order, started=started)
        return kv_latent, k_pe

    def _attend_dense(
        self,
        q_latent: Tensor,
        kv_latent: Tensor,
        k_pe: Tensor,
        tokens: TokenLayout,
        cache: LatentCache | None,
        return_aux: bool,
    ) -> tuple[tuple[Tensor, ...], AttentionAux]:
        """The context of each group of heads `[.., n/groups, Dv]`; mostly there is one group."""
        if cache is not None:
            return (self._attend_cached(q_latent, kv_latent, k_pe, tokens, cache),), AttentionAux()
        largest: list[Tensor] = []

        def core(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            if return_aux and self.config.qk_clip:
                largest.append(self.comm.max_over_context(largest_logits(query, key, self.softmax_scale, tokens)))
            return self.core_attention(query, key, value, tokens)

        latents = (q_latent, kv_latent, k_pe)
        groups = head_groups(self, q_latent)
        if groups == 1:
            contexts: tuple[Tensor, ...] = (self._with_operands(self._expand, core, latents, tokens),)
        else:
            contexts = attend_in_groups(self, core, latents, tokens, groups)
        return contexts, AttentionAux(max_attention_logits=torch.cat(largest) if largest else None)

    def _attend_sparse(
        self,
        hidden: Tensor,
        q_latent: Tensor,
        kv_latent: Tensor,
        k_pe: Tensor,
        tokens: TokenLayout,
        topk_indices: Tensor | None,
        cache: LatentCache | None,
        return_aux: bool,
    ) -> tuple[tuple[Tensor, ...], AttentionAux]:
        latents = (q_latent, kv_latent, k_pe)
        context, aux = self.core_attention(
            hidden,
            q_latent,
            tokens,
            expanded=lambda core: self._with_operands(self._expand, core, latents, tokens),
            absorbed=lambda core: up_project_value(
                self._with_operands(self._absorb, core, latents, tokens), self._value_up()
            ),
            absorb=lambda: self._absorb(*latents, tokens),
            comm=self.comm,
            topk_indices=topk_indices,
            cache=cache,
            return_aux=return_aux,
        )
        return (context,), aux

    def _attend_cached(
        self, q_latent: Tensor, kv_latent: Tensor, k_pe: Tensor, tokens: TokenLayout, cache: LatentCache
    ) -> Tensor:
        query, key = self._absorb(q_latent, kv_latent, k_pe, tokens)
        first = cache.length
        cache.append(key.squeeze(-2))
        if first == 0:  # nothing cached yet: the expanded form is cheaper, and its keys are all at hand
            return self._with_operands(
                self._expand,
                lambda q, k, v: self.core_attention(q, k, v, tokens),
                (q_latent, kv_latent, k_pe),
                tokens,
            )
        latent = latent_attention(
            query, cache.keys[: cache.length], first, self.softmax_scale, self.config.kv_lora_rank
        )
        return up_project_value(latent, self._value_up())

    def _with_operands(
        self,
        operands: Callable[..., tuple[Tensor, ...]],
        core: Callable[..., Tensor],
        latents: tuple[Tensor, Tensor, Tensor],
        tokens: TokenLayout,
    ) -> Tensor:
        """`core(*operands(*latents, tokens))`, the operands recomputed in backward where the config says so."""
        if not self.config.recompute_up_proj:
            return core(*operands(*latents, tokens))
        return with_recomputed_operands(
            lambda *latents: operands(*latents, tokens),
            core,
            latents,
            (*self.query_up_proj.recomputable_parameters(), *self.linear_kv_up_proj.recomputable_parameters()),
            self,
        )

    def _expand(
        self, q_latent: Tensor, kv_latent: Tensor, k_pe: Tensor, tokens: TokenLayout
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated query and key `[.., n, Dn+Dr]` and value `[.., n, Dv]`."""
        query = self.rotate_query(self._query(q_latent), tokens)
        key, value = self.assemble(kv_latent, k_pe, self.linear_kv_up_proj, tokens.keys)
        return query, key, value

    def _absorb(self, q_latent: Tensor, kv_latent: Tensor, k_pe: Tensor, tokens: TokenLayout) -> tuple[Tensor, Tensor]:
        """Absorbed query `[.., n, Rkv+Dr]` and key `[.., 1, Rkv+Dr]`, rotated."""
        q_nope, q_pe = self._query(q_latent).split([self.config.qk_head_dim, self.config.qk_pos_emb_head_dim], dim=-1)
        rope = self.assemble.rope
        keys, kv_latent = tokens.keys, self.kv_layernorm.normed(kv_latent)
        query = rope.fused_mla_rope_concat(
            absorb_query(q_nope, self._key_up()),
            q_pe,
            tokens.cos,
            tokens.sin,
            tokens.cu_seqlens,
            **tokens.rope_arguments(),
        )
        key = rope.fused_mla_rope_concat(
            kv_latent.to(k_pe.dtype).unsqueeze(-2),  # under autocast the norm answers in fp32
            k_pe.unsqueeze(-2),
            keys.cos,
            keys.sin,
            keys.cu_seqlens,
            **keys.rope_arguments(),
        )
        return query, key

    @property
    def query_up_proj(self) -> Linear:
        """The projection that makes queries: `linear_q_up_proj`, or `linear_q_proj` without q_lora_rank."""
        return self.linear_q_proj if self.config.q_lora_rank is None else self.linear_q_up_proj

    def _query(self, q_latent: Tensor) -> Tensor:
        """Query `[.., n, Dn+Dr]`, not yet rotated."""
        query = self.query_up_proj(q_latent)
        return query.unflatten(-1, (self.num_heads, query.shape[-1] // self.num_heads))

    def rotate_query(self, query: Tensor, tokens: TokenLayout) -> Tensor:
        """Rotated query: by the kernel in the projection's own memory, unless a forward hook may have kept that."""
        rope = self.assemble.rope
        kept = self.query_up_proj._forward_hooks or not self.assemble.fused_rope
        rotate = rope.fused_mla_rope_out_of_place if kept else rope.fused_apply_mla_rope_for_q
        query = rotate(
            query,
            tokens.cos,
            tokens.sin,
            self.config.qk_head_dim,
            self.config.qk_pos_emb_head_dim,
            tokens.cu_seqlens,
            **tokens.rope_arguments(),
        )
        if not torch.compiler.is_compiling():
            _ = query.grad_fn  # renews the history of a rotated view: hooks on one that lags behind crash torch 2.13
        return query

    def _key_up(self) -> Tensor:
        """k_up `[n, Dn, Rkv]`."""
        return self.linear_kv_up_proj.local_weight(lambda w: self._split_up(w)[0])

    def _value_up(self) -> Tensor:
        """v_up `[n, Dv, Rkv]`."""
        return self.linear_kv_up_proj.local_weight(lambda w: self._split_up(w)[1])

    def _split_up(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        return split_up_projection(weight, self.config.qk_head_dim, self.config.v_head_dim)

    # --- the way in and out ---

    def _token_layout(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        packed: PackedSeqParams | None,
        position_ids: Tensor | None,
        cache: LatentCache | None,
    ) -> TokenLayout:
        return lay_out_tokens(self, hidden_states, attention_mask, packed, position_ids, cache)

    def _enter(self, hidden_states: Tensor, tokens: TokenLayout) -> Tensor:
        """Hidden states `[S, B, H]` or `[T, H]`, zero where a row holds no token."""
        hidden = hidden_states if tokens.packed is None else hidden_states.squeeze(1)
        return without_padding(hidden, self._token_rows(tokens))

    def _leave(self, contexts: tuple[Tensor, ...], tokens: TokenLayout) -> Tensor:
        """Output `[S, B, H]` or `[T, 1, H]` of the contexts of all heads, zero where a row holds no token."""
        if tokens.packed is not None:
            contexts = tuple(context.unsqueeze(1) for context in contexts)
        output = self.comm.from_heads(project_contexts(self.linear_proj, contexts))
        return without_padding(output, self._token_rows(tokens))

    def _token_rows(self, tokens: TokenLayout) -> Tensor | None:
        """Which of the rank's rows of hidden states hold a token; None where all do."""
        keep = tokens.token_rows()
        return None if keep is None else self.comm.own_slice(keep)

    def extra_repr(self) -> str:
        rope = "fused" if should_use_fused_mla_rope(self.config) else "unfused"
        return (
            f"layer_number={self.layer_number}, heads={self.num_heads}, backend={self.backend}, "
            f"core_attention={self.config.core_attention_backend}, rope={self.config.rope_type} ({rope}), "
            f"kv_assembly={self.assemble.name}, softmax_scale={self.softmax_scale:.6f}"
        )
