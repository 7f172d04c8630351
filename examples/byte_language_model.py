"""A language model over bytes: embedding, pre-norm blocks of MLA and SwiGLU, norm, head.

    x = embedding[tokens]
    x = x + attention(norm(x));  x = x + mlp(norm(x))      for each block
    logits = head(norm(x))

The model knows nothing of parallelism: every part but the attention works token by token, so it accepts any slice of
the sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mla_attention import MLASelfAttention, PackedSeqParams
from mla_attention.configs import MLAConfig

VOCABULARY = 256


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)), inner width twice the hidden width."""

    def __init__(self, config: MLAConfig, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, 2 * config.hidden_size
        self.gate_up = nn.Linear(hidden, 2 * inner, bias=False, device=device, dtype=dtype)
        self.down = nn.Linear(inner, hidden, bias=False, device=device, dtype=dtype)
        nn.init.normal_(self.gate_up.weight, std=config.init_method_std)
        nn.init.normal_(self.down.weight, std=config.init_method_std / (2 * config.num_layers) ** 0.5)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(nn.functional.silu(gate) * up)


class Block(nn.Module):
    """One pre-norm layer; returns its output `[S, B, H]` and the indexer's loss (None without one)."""

    def __init__(
        self, config: MLAConfig, layer_number: int, *, backend: str, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden_size, eps=1e-5, device=device, dtype=dtype)
        self.attention = MLASelfAttention(config, layer_number, backend=backend, device=device, dtype=dtype)
        self.mlp_norm = nn.RMSNorm(config.hidden_size, eps=1e-5, device=device, dtype=dtype)
        self.mlp = SwiGLU(config, device=device, dtype=dtype)

    def forward(self, x: Tensor, packed: PackedSeqParams | None) -> tuple[Tensor, Tensor | None]:
        attended, _, aux = self.attention(self.attention_norm(x), packed_seq_params=packed, return_aux=True)
        x = x + attended
        return x + self.mlp(self.mlp_norm(x)), aux.indexer_loss


class ByteLanguageModel(nn.Module):
    """Next-byte logits of `[S, B]` bytes.

    Args:
        config: of each attention layer; its `num_layers` is the number of blocks.
        backend: "torch" or "te", of the attention layers.
        recompute_blocks: keep only the input of each block and compute the rest again in backward.
        device, dtype: of all parameters.
    """

    def __init__(
        self,
        config: MLAConfig,
        *,
        backend: str = "torch",
        recompute_blocks: bool = False,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.recompute_blocks = recompute_blocks
        self.embedding = nn.Embedding(VOCABULARY, config.hidden_size, device=device, dtype=dtype)
        self.blocks = nn.ModuleList(
            Block(config, number, backend=backend, device=device, dtype=dtype)
            for number in range(1, config.num_layers + 1)
        )
        self.norm = nn.RMSNorm(config.hidden_size, eps=1e-5, device=device, dtype=dtype)
        self.head = nn.Linear(config.hidden_size, VOCABULARY, bias=False, device=device, dtype=dtype)
        nn.init.normal_(self.embedding.weight, std=config.init_method_std)
        nn.init.normal_(self.head.weight, std=config.init_method_std)

    def forward(self, tokens: Tensor, packed: PackedSeqParams | None = None) -> tuple[Tensor, Tensor | None]:
        """Logits `[S, B, 256]` and the sum of the layers' indexer losses (None where no layer has one)."""
        x = self.embedding(tokens)
        indexer_losses: list[Tensor] = []
        for block in self.blocks:
            if self.recompute_blocks:
                x, indexer_loss = checkpoint(block, x, packed, use_reentrant=False)
            else:
                x, indexer_loss = block(x, packed)
            if indexer_loss is not None:
                indexer_losses.append(indexer_loss)
        return self.head(self.norm(x)), sum(indexer_losses) if indexer_losses else None

    def train_only_indexers(self) -> None:
        """Freeze everything but the indexers: the dense warm-up of DSA."""
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(".indexer." in name)
