"""Every rotary kernel once on awkward shapes, to be run under a memory checker:

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 1 \
        python -m tests.gpu.memcheck_rope [part parts]

Most of its time is compilation: `part parts` takes every parts-th shape from `part` on, so that several can run beside
each other. Without the variable PyTorch's caching allocator hides small overruns.
"""

import sys
from itertools import product

import torch

import mla_attention.fusions as fused
from mla_attention.fusions.rope.key_value_launch import launch_key_value
from mla_attention.fusions.rope.raw import launch_query_rope

HEADS = (1, 3, 12, 20, 66)
WIDTHS = ((192, 64, 256), (96, 48, 160), (1, 4, 1), (64, 2, 64))


def run_kernels(heads: int, k_dim: int, emb: int, v_dim: int) -> None:
    """Every rotary kernel on sbhd tokens with one and two batches, and on packed ones with rows in no sequence."""
    for tokens, cu in (((7, 1), None), ((3, 2), None), ((9,), torch.tensor([0, 2, 2, 8], device="cuda"))):
        table = torch.rand(9, 1, 1, emb, device="cuda")

        def tensor(n: int, width: int, tokens: tuple[int, ...] = tokens) -> torch.Tensor:
            return torch.randn(*tokens, n, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)

        query, kv, pos = tensor(heads, k_dim + emb), tensor(heads, k_dim + v_dim), tensor(1, emb)
        outs = (
            fused.fused_mla_rope_inplace(query * 1, table, table, k_dim, emb, cu),
            fused.fused_mla_rope_out_of_place(query, table, table, k_dim, emb, cu, rope_first=True),
            *fused.fused_mla_rope_kv_split(kv, pos, table, table, emb, k_dim, v_dim, cu),
            fused.fused_mla_rope_concat(query[..., :k_dim], query[..., k_dim:], table, table, cu),
        )
        torch.autograd.grad(outs, (query, kv, pos), [torch.randn_like(o) for o in outs])
        key = outs[2].detach().clone()
        fused.rotate_shared_key_into(key, pos.detach(), table, table, cu)
        fused.shared_key_gradient(key, table, table, cu)
        for block in (1, 8, 128):
            t = query.detach().clone()
            launch_query_rope(t, t, table, table, cu, None, k_dim, emb, block_rows=block)
            forced = {"block_heads": block, "block_tokens": 2}
            ends = (kv.detach(), pos.detach(), outs[2].detach(), outs[3].detach())
            for backward in (False, True):
                launch_key_value(*ends, table, table, cu, None, emb, k_dim, v_dim, backward=backward, **forced)


def main(part: int = 0, parts: int = 1) -> None:
    """Run the shapes of one part."""
    shapes = list(product(HEADS, WIDTHS))[part::parts]
    for heads, widths in shapes:
        run_kernels(heads, *widths)
    torch.cuda.synchronize()
    print(f"every rotary kernel ran on {len(shapes)} shapes")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
