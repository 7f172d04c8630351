"""indexer_kl with the attention heads spread over two ranks equals one rank with all of them, kernels and twin."""

import os

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="two CPU ranks under the interpreter")
ROWS, KEYS, HEADS, SCALE = 9, 9, 4, 0.3


def inputs():
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    indexer = normal(ROWS, 3, 16), normal(KEYS, 16), normal(ROWS, 3)
    indices = torch.stack([torch.randperm(KEYS, generator=generator)[:6] for _ in range(ROWS)])
    indices[torch.rand(ROWS, 6, generator=generator) < 0.3] = -1
    return indexer, normal(ROWS, HEADS, 24), normal(KEYS, 24), indices


def gradients(function, query, **options):
    indexer, _, key, _ = inputs()
    leaves = [t.requires_grad_() for t in indexer]
    kl = function(*leaves, query, key, SCALE, **options)
    return kl.detach(), *torch.autograd.grad(kl.sum(), leaves)


def functions():
    from mla_attention.fusions.dsa import attention_reference, indexer_kl

    return {"twin": attention_reference.indexer_kl, "kernel": indexer_kl.indexer_kl}


def run_rank(rank: int, world: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    try:
        _, query, _, indices = inputs()
        local = query[:, rank * HEADS // world : (rank + 1) * HEADS // world]
        results = {}
        for name, function in functions().items():
            for support, options in (("sparse", {"topk_indices": indices}), ("dense", {"budget_bytes": 8 * KEYS * 4})):
                results[name, support] = gradients(function, local, tp_group=dist.group.WORLD, **options)
        torch.save(results, f"{folder}/rank{rank}.pt")
    finally:
        dist.destroy_process_group()


def test_two_ranks_equal_one(tmp_path):
    mp.start_processes(run_rank, args=(2, str(tmp_path)), nprocs=2, start_method="spawn")
    _, query, _, indices = inputs()
    ranks = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2)]
    for name, function in functions().items():
        for support, options in (("sparse", {"topk_indices": indices}), ("dense", {})):
            expected = gradients(function, query, **options)
            for got, other, want in zip(ranks[0][name, support], ranks[1][name, support], expected, strict=True):
                assert torch.equal(got, other), "the ranks disagree"
                torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
