"""A rank that fails, or never comes, does not keep the others waiting beyond the timeout of their process group."""

import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from mla_attention import parallelize
from mla_attention.configs import tiny
from tests.mla_attention.parallel.layouts import Layout, build

TIMEOUT = 3.0


def run(rank: int, folder: str, how: str) -> None:
    timeout = timedelta(seconds=60 if how == "fails" else TIMEOUT)  # a closed connection is seen at once
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timeout)
    layer = parallelize(build(tiny()), Layout(tp=2).mesh())
    hidden = torch.randn(4, 1, tiny().hidden_size, dtype=torch.float64)
    layer(hidden)
    if rank == 1:
        if how == "never comes":
            time.sleep(3 * TIMEOUT)
        return  # leaves without a word
    start = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        layer(hidden)
    Path(folder, "waited").write_text(str(time.monotonic() - start))
    Path(folder, "error").write_text(str(caught.value))


@pytest.mark.parametrize("how", ["fails", "never comes"])
def test_the_others_raise(tmp_path: Path, how: str) -> None:
    torch.multiprocessing.spawn(run, (str(tmp_path), how), nprocs=2)
    assert float(Path(tmp_path, "waited").read_text()) < 3 * TIMEOUT
    words = ("timed out", "timeout") if how == "never comes" else ("closed", "reset", "refused")
    assert any(word in Path(tmp_path, "error").read_text().lower() for word in words)
