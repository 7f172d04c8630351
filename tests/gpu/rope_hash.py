"""Prints one hash of the outputs and gradients of every rotary function, for comparing processes."""

import hashlib

import torch

import mla_attention.fusions as fused


def digest() -> str:
    """Hash of results in bf16 at GLM-5 and odd widths, sbhd and packed."""
    seen = hashlib.sha256()
    generator = torch.Generator().manual_seed(11)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to("cuda", torch.bfloat16).requires_grad_()

    for heads, k_dim, emb, v_dim in ((64, 192, 64, 256), (12, 96, 48, 160), (1, 512, 64, 64)):
        for tokens, cu in (((300, 2), None), ((600,), torch.tensor([0, 37, 37, 250, 599], device="cuda"))):
            angle = random(600, 1, 1, emb).detach().float()
            tables = angle.cos(), angle.sin()
            query, kv, pos = (
                random(*tokens, heads, k_dim + emb),
                random(*tokens, heads, k_dim + v_dim),
                random(*tokens, 1, emb),
            )
            outs = (
                fused.fused_mla_rope_inplace(query * 1, *tables, k_dim, emb, cu),
                fused.fused_mla_rope_out_of_place(query, *tables, k_dim, emb, cu),
                *fused.fused_mla_rope_kv_split(kv, pos, *tables, emb, k_dim, v_dim, cu),
                fused.fused_mla_rope_concat(query[..., :k_dim], query[..., k_dim:], *tables, cu),
            )
            weights = [random(*o.shape).detach() for o in outs]
            for t in (*outs, *torch.autograd.grad(outs, (query, kv, pos), weights)):
                seen.update(t.detach().contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return seen.hexdigest()


if __name__ == "__main__":
    print(digest())
