"""Weights of one attention layer in and out of Hugging Face and Megatron-LM checkpoints."""

from mla_attention.checkpoint.huggingface import load_hf_state_dict, to_hf_state_dict
from mla_attention.checkpoint.megatron import load_megatron_state_dict, to_megatron_state_dict

__all__ = ["load_hf_state_dict", "load_megatron_state_dict", "to_hf_state_dict", "to_megatron_state_dict"]
