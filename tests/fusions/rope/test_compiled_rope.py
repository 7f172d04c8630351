"""What the compiler makes of the rotary kernels for GPUs that need not be there."""

import pytest

from mla_attention.fusions.rope.key_value_launch import key_value_blocks, sum_blocks
from mla_attention.fusions.rope.rows import rows_launch
from tests.aot.harness import in_fresh_process

MODULE = "tests.aot.rope_kernels"
BLOCKS = [1, 2, 4, 8, 16, 32, 64, 128]


def assert_barrier_between(order: list[str], warps: int, case: object) -> None:
    """All loads, then a barrier that holds for the whole program, then all stores."""
    last_load = max(i for i, kind in enumerate(order) if kind == "load")
    first_store = order.index("store")
    assert last_load < first_store, (case, order)
    between = order[last_load:first_store]
    assert "barrier" in between or (warps == 1 and "warp_barrier" in between), (case, order)


@pytest.mark.parametrize(("arch", "layouts"), [(90, [False, True]), (100, [False])])
def test_a_barrier_parts_loads_from_stores_for_every_block(arch, layouts):
    warps = [1, 2, 4, 8]
    where = {"target": ("cuda", arch), "layouts": layouts}
    facts = in_fresh_process(f"{MODULE}:memory_orders", blocks=BLOCKS, warps=warps, **where)
    assert len(facts) == 2 * len(layouts) * len(BLOCKS) * len(warps)
    for fact in facts:
        assert_barrier_between(fact["order"], fact["case"][-1], fact["case"])


@pytest.mark.parametrize(
    ("target", "shapes", "packed", "equal_halves"),
    [
        (("cuda", 90), ["glm5", "glm5 over 8 ranks", "deepseek_v3", "indexer query", "indexer key"], False, True),
        (("cuda", 90), ["glm5 over 8 ranks", "deepseek_v3", "indexer query", "indexer key"], False, False),
        (("cuda", 90), ["glm5", "odd widths"], True, False),
        (("cuda", 90), ["glm5"], True, True),
        (("cuda", 80), ["glm5", "odd widths"], False, True),
        (("cuda", 100), ["glm5", "deepseek_v3"], False, False),
        (("hip", "gfx942"), ["glm5", "odd widths"], False, False),
        (("hip", "gfx942"), ["deepseek_v3"], True, True),
    ],
    ids=str,
)
def test_default_launches_compile_without_spills(target, shapes, packed, equal_halves):
    how = dict(targets=[target], shapes=shapes, packed=packed, equal_halves=equal_halves)
    for fact in in_fresh_process(f"{MODULE}:chosen_launches", **how):
        assert fact["spills"] == 0, fact["case"]
        assert not fact["fused_products"], fact["case"]  # the twin rounds products as well
        if fact["order"] and target[0] == "cuda":
            assert_barrier_between(fact["order"], fact["warps"], fact["case"])


def assemblies(shape: list[int]) -> tuple[dict[str, str], dict[str, str]]:
    kept, removed = (
        in_fresh_process(f"{MODULE}:assembly", shape=shape, without_masks=without) for without in (False, True)
    )
    return kept, removed


def test_powers_of_two_compile_as_if_there_were_no_masks():
    kept, removed = assemblies([64, 128, 64, 128])
    for function, ptx in kept.items():
        assert ptx == removed[function], function


def test_other_widths_do_need_their_masks():
    kept, removed = assemblies([12, 96, 48, 80])
    for function, ptx in kept.items():
        assert ptx != removed[function], function


def test_token_and_sequence_counts_never_compile_again():
    counts = [*range(1, 18), 31, 32, 33, 48, 64, 100, 128, 255, 256, 1000, 1024, 4095, 4096]
    assert len(counts) == 30
    for case, compiles in in_fresh_process(f"{MODULE}:compiles_over_token_counts", counts=counts).items():
        assert compiles == 1, case


def test_launch_choice_depends_on_the_shape_alone():
    assert rows_launch(64, 0, 64) == rows_launch(64, 0, 128) == (16, 4)
    assert rows_launch(64, 0, 8) == (32, 8)
    assert rows_launch(64, 0, 1) == (16, 2)
    assert sum_blocks(64, 128) == (2, 16, 4)
    assert sum_blocks(64, 32) == (4, 8, 4)
    assert sum_blocks(64, 8) == (16, 2, 4)
    for emb_dim in (2, 4, 48, 64, 96, 128, 512, 4096):
        for heads in (1, 3, 12, 128):
            tokens, lanes, at_once = sum_blocks(emb_dim, heads)
            assert tokens * lanes in BLOCKS
            assert lanes <= 2 * heads
            assert at_once in (1, 2, 4)
            for nope_dim in (0, 1, 192, 512, 8192):
                rows, warps = rows_launch(emb_dim, nope_dim, heads)
                assert rows in BLOCKS
                assert warps in (1, 2, 4, 8)
            for copy in (False, True):
                tokens, block_heads, warps = key_value_blocks(emb_dim, 192, 256, heads, copy)
                assert tokens * block_heads in BLOCKS
                assert warps in (1, 2, 4, 8)
