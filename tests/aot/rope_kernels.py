"""Facts about the compiled rotary kernels, gathered in a process that does not interpret."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import triton
import triton.language as tl

from mla_attention.fusions.rope import concat, key_value_kernels, key_value_launch, raw, rotation, rows
from mla_attention.fusions.rope.tables import mark_equal_halves
from tests.aot.harness import Compiled, Target, compile_kernel, stop_at_ptx, without_debug_lines

KERNELS = (
    (rows, "rope_rows_kernel"),
    (key_value_launch, "key_value_kernel"),
    (key_value_launch, "key_value_backward_kernel"),
)
SHAPES = {  # heads, k_dim, emb_dim, v_dim
    "glm5": (64, 192, 64, 256),
    "glm5 over 8 ranks": (8, 192, 64, 256),
    "deepseek_v3": (128, 128, 64, 128),
    "indexer query": (32, 64, 64, 64),
    "indexer key": (1, 64, 64, 64),
    "odd widths": (20, 96, 48, 160),
}


class _Recorder:
    """Stands for a kernel: keeps what it would be launched with."""

    def __init__(self, kernel: Any, launches: list[tuple[Any, tuple[Any, ...], dict[str, Any]]]) -> None:
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **kwargs: self.launches.append((self.kernel, args, kwargs))


@contextmanager
def recorded_launches() -> Iterator[list[tuple[Any, tuple[Any, ...], dict[str, Any]]]]:
    """Record launches instead of making them."""
    launches: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
    shipped = [getattr(module, name) for module, name in KERNELS]
    for (module, name), kernel in zip(KERNELS, shipped, strict=True):
        setattr(module, name, _Recorder(kernel, launches))
    yield launches
    for (module, name), kernel in zip(KERNELS, shipped, strict=True):
        setattr(module, name, kernel)


def launch(
    function: str,
    shape: tuple[int, int, int, int],
    tokens: int = 32,
    packed: bool = False,
    equal_halves: bool = False,
    **forced: Any,
) -> None:
    """Launch one of the functions on empty tensors of a shape, with tables known to repeat or not."""
    heads, k_dim, emb_dim, v_dim = shape
    lead = (tokens,) if packed else (tokens, 1)
    cu = torch.zeros(1 + tokens // 3, dtype=torch.int32) if packed else None
    table = torch.empty(tokens, 1, 1, emb_dim)
    if equal_halves:
        mark_equal_halves(table)

    def tensor(n: int, width: int) -> torch.Tensor:
        return torch.empty(*lead, n, width, dtype=torch.bfloat16)

    query, pos = tensor(heads, k_dim + emb_dim), tensor(1, emb_dim)
    name, _, direction = function.partition(" ")
    backward = direction == "backward"
    if name == "inplace":
        raw.launch_query_rope(query, query, table, table, cu, None, k_dim, emb_dim, transposed=backward, **forced)
    elif name == "out_of_place":
        out = torch.empty_like(query)
        raw.launch_query_rope(query, out, table, table, cu, None, k_dim, emb_dim, transposed=backward, **forced)
    elif name == "concat":
        parts = tensor(heads, 512), tensor(heads, emb_dim), tensor(heads, 512 + emb_dim)
        concat.launch_concat(*parts, table, table, cu, None, backward=backward, **forced)
    elif name == "split":
        ends = (tensor(heads, k_dim + v_dim), pos, query, tensor(heads, v_dim))
        key_value_launch.launch_key_value(
            *ends, table, table, cu, None, emb_dim, k_dim, v_dim, backward=backward, **forced
        )
    else:
        ends = (None, pos, query, None)
        key_value_launch.launch_key_value(*ends, table, table, cu, None, emb_dim, k_dim, 0, backward=backward, **forced)


FUNCTIONS = tuple(
    f"{name}{direction}"
    for name in ("inplace", "out_of_place", "concat", "split", "shared_key")
    for direction in ("", " backward")
)


def compiled(function: str, shape: tuple[int, int, int, int], target: Target, **how: Any) -> Compiled:
    """The kernel that a launch would run on `target`."""
    with recorded_launches() as launches:
        launch(function, shape, **how)
    ((kernel, args, kwargs),) = launches
    return compile_kernel(kernel, args, target, **kwargs)


def memory_orders(target: Target, blocks: list[int], warps: list[int], layouts: list[bool]) -> list[dict[str, Any]]:
    """Loads, barriers and stores of the in-place kernels for forced blocks and warps, packed or not."""
    stop_at_ptx()
    return [
        {
            "case": (target, function, packed, block, n_warps),
            "order": compiled(
                function, SHAPES["glm5"], tuple(target), packed=packed, block_rows=block, num_warps=n_warps
            ).memory_order,
        }
        for function in ("inplace", "inplace backward")
        for packed in layouts
        for block in blocks
        for n_warps in warps
    ]


def chosen_launches(targets: list[Target], shapes: list[str], packed: bool, equal_halves: bool) -> list[dict[str, Any]]:
    """Every function as it is launched by default."""
    facts = []
    for target in targets:
        for shape in shapes:
            for function in FUNCTIONS:
                kernel = compiled(function, SHAPES[shape], tuple(target), packed=packed, equal_halves=equal_halves)
                order = kernel.memory_order if function.startswith("inplace") else []
                facts.append(
                    {
                        "case": (target, shape, function),
                        "spills": kernel.spills,
                        "fused_products": "fma.rn" in kernel.kernel.asm.get("ptx", ""),
                        "order": order,
                        "warps": kernel.kernel.metadata.num_warps,
                    }
                )
    return facts


@triton.jit
def _rows_alone(m_row, o_column, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    return m_row[:, None]


@triton.jit
def _tokens_alone(m_token, o_head, o_column, HEADS: tl.constexpr, BLOCK_H: tl.constexpr, WIDTH: tl.constexpr):
    return m_token[:, None, None]


def assembly(shape: list[int], without_masks: bool) -> dict[str, str]:
    """PTX of every function; `without_masks` compiles the masks of padded columns and heads out."""
    stop_at_ptx()
    if without_masks:
        for module in (rotation, rows, key_value_kernels):
            module.columns_mask = _rows_alone
        key_value_kernels._heads_mask = _tokens_alone
    heads, k_dim, emb_dim, v_dim = shape
    return {
        function: without_debug_lines(compiled(function, (heads, k_dim, emb_dim, v_dim), ("cuda", 90)).ptx)
        for function in FUNCTIONS
    }


def compiles_over_token_counts(counts: list[int]) -> dict[str, int]:
    """How many kernels each function compiles over all counts, sbhd and packed apart."""
    stop_at_ptx()
    found = {}
    for function in FUNCTIONS:
        for packed in (False, True):
            with recorded_launches() as launches:
                for tokens in counts:
                    launch(function, (6, 24, 16, 40), tokens=tokens, packed=packed)
            kernel = launches[0][0]
            compile_kernel(kernel, launches[0][1], **launches[0][2])  # puts the stub driver in place
            kernel.device_caches.clear()
            for _, args, kwargs in launches:
                kernel.warmup(*args, grid=(1,), **kwargs)
            found[f"{function} {'packed' if packed else 'sbhd'}"] = len(kernel.device_caches[0][0])
    return found
