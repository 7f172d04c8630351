"""Our layer where a Megatron-LM ModuleSpec puts its self-attention.

    layer_spec.submodules.self_attention = ModuleSpec(
        module=MegatronMLASelfAttention, params={"attn_mask_type": AttnMaskType.causal, "backend": "te"}
    )

Parameter names are those of Megatron's MLASelfAttention with its norms apart, and so are the keys of distributed
checkpoints. Gradients are complete when backward returns: nothing is left to Megatron's reduction over
sequence-parallel ranks. Checked against megatron-core 0.19.2.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mla_attention.attention import MLASelfAttention
from mla_attention.configs import MLAConfig
from mla_attention.configs.mla_config import field_names
from mla_attention.configs.validation import DSA_FIELDS, YARN_FIELDS
from mla_attention.packed import PackedSeqParams
from mla_attention.rotary import yarn_get_mscale

# What must have this value for our layer to compute what Megatron's would.
_REQUIRED = {
    "qk_layernorm": True,
    "normalization": "RMSNorm",
    "layernorm_zero_centered_gamma": False,
    "context_parallel_size": 1,
    "attention_output_gate": False,
    "cache_mla_latents": False,
    "dsa_indexer_topk_freq": 1,
    "dsa_indexer_k_norm_fp32": False,
}


def mla_config(config: Any) -> MLAConfig:
    """The MLAConfig of the attention that a Megatron-LM config describes.

    Args:
        config: an `MLATransformerConfig`.

    Raises:
        ValueError: for what this layer does not have, naming the field, its value and what is allowed.
    """
    for name, allowed in _REQUIRED.items():
        value = getattr(config, name, allowed)
        if value != allowed:
            raise ValueError(f"{name}: given {value!r} in Megatron's config, allowed with this layer is {allowed!r}")
    fields = {name: getattr(config, name) for name in field_names() if getattr(config, name, None) is not None}
    fields["q_lora_rank"] = config.q_lora_rank
    fields["recompute_up_proj"] = config.recompute_granularity == "selective" and "mla_up_proj" in (
        config.recompute_modules or ()
    )
    # Megatron's MLA scales the softmax by YaRN's factor whatever the type of its RoPE.
    magnitude = yarn_get_mscale(config.rotary_scaling_factor, config.mscale_all_dim)
    fields["softmax_scale"] = magnitude**2 / (config.qk_head_dim + config.qk_pos_emb_head_dim) ** 0.5
    unread: tuple[str, ...] = () if config.experimental_attention_variant == "dsa" else DSA_FIELDS
    if config.rope_type == "rope":
        unread = (*unread, *YARN_FIELDS)
    unread = (*unread, "cp_comm_type")  # of one context-parallel rank, whose core attention need not be TE's
    return MLAConfig(**{name: value for name, value in fields.items() if name not in unread})


class MegatronMLASelfAttention(MLASelfAttention):
    """`MLASelfAttention` with the constructor and the forward that Megatron-LM's TransformerLayer calls.

    Args:
        config: `MLATransformerConfig`.
        submodules: ignored; ModuleSpecs of other layers have some.
        layer_number: 1-based.
        attn_mask_type: Megatron's; with its causal type an `attention_mask` is ignored, as Transformer Engine does.
        pg_collection: process groups; `.tp` is used, Megatron's global one where None.
        backend: "torch" or "te".

    Raises:
        ValueError: see `mla_config`; context parallelism, among others, is not served through Megatron, whose gradient
            averaging over context-parallel ranks counts otherwise.
    """

    def __init__(
        self,
        config: Any,
        submodules: Any = None,
        layer_number: int = 1,
        attn_mask_type: Any = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        pp_layer_offset: int | None = None,
        name: str | None = None,
        *,
        backend: str = "torch",
    ) -> None:
        tp_group = _tensor_parallel_group() if pg_collection is None else pg_collection.tp
        super().__init__(
            mla_config(config),
            layer_number,
            backend=backend,
            tp_group=tp_group,
            device="cpu" if config.use_cpu_initialization else "cuda",
            dtype=config.params_dtype,
        )
        self.ignores_mask = getattr(attn_mask_type, "name", None) == "causal"
        if config.sequence_parallel and self.comm.tp_size > 1:
            from mla_attention.parallel.group_communication import GroupCommunication

            self.comm = GroupCommunication.over(tp_group, None, sequence_parallel=True)
            self.comm.attach(self)
        for name, dim in _cut_weights().items():
            if name in dict(self.named_parameters()):  # as Megatron's optimizers tell shards from copies
                weight: Any = self.get_parameter(name)
                weight.tensor_model_parallel, weight.partition_dim, weight.partition_stride = True, dim, 1

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        key_value_states: Tensor | None = None,
        inference_context: Any = None,
        rotary_pos_emb: Any = None,
        rotary_pos_cos: Tensor | None = None,
        rotary_pos_sin: Tensor | None = None,
        rotary_pos_cos_sin: Tensor | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
        position_ids: Tensor | None = None,
        sequence_len_offset: int | None = None,
        *,
        inference_params: Any = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Output `[S, B, H]` and bias. Positions are those of the rows, whatever `position_ids` says, as in Megatron.

        Raises:
            ValueError: for arguments of inference, cross-attention or outer rotary embeddings.
        """
        unserved = {
            "key_value_states": key_value_states,
            "inference_context": inference_context,
            "inference_params": inference_params,
            "rotary_pos_emb": rotary_pos_emb,
            "rotary_pos_cos": rotary_pos_cos,
            "rotary_pos_sin": rotary_pos_sin,
            "rotary_pos_cos_sin": rotary_pos_cos_sin,
            "attention_bias": attention_bias,
        }
        for name, value in unserved.items():
            if value is not None:
                raise ValueError(f"{name}: given a {type(value).__name__}, allowed is None (training, self-attention)")
        mask = None if self.ignores_mask or packed_seq_params is not None else attention_mask
        output, bias = super().forward(hidden_states, mask, packed_seq_params=_packed(packed_seq_params))[:2]
        return output, bias

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """Megatron's distributed checkpoint entries of this layer."""
        from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

        state = self.state_dict(prefix="", keep_vars=True)
        tp_group = self.comm.tp_group or _tensor_parallel_group()
        return make_sharded_tensors_for_checkpoint(
            state,
            prefix,
            _cut_weights(),
            sharded_offsets,
            tp_group=tp_group,
            dp_cp_group=(metadata or {}).get("dp_cp_group"),
        )


def _cut_weights() -> dict[str, int]:
    """Names of the weights that are cut by heads, and the dimension that is cut."""
    from mla_attention.parallel.plan import HEAD_DIMS

    return {f"{part}.weight": dim for part, dim in HEAD_DIMS.items()}


def _packed(params: Any) -> PackedSeqParams | None:
    """Our offsets from Megatron's, whose values its data loader has made and nobody needs to read."""
    if params is None:
        return None
    return PackedSeqParams(
        params.cu_seqlens_q,
        params.cu_seqlens_kv,
        cu_seqlens_q_padded=params.cu_seqlens_q_padded,
        cu_seqlens_kv_padded=params.cu_seqlens_kv_padded,
        max_seqlen_q=params.max_seqlen_q,
        max_seqlen_kv=params.max_seqlen_kv,
        validate=params.max_seqlen_q is None,
    )


def _tensor_parallel_group() -> Any:
    from megatron.core import parallel_state

    return parallel_state.get_tensor_model_parallel_group()
