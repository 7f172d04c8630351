"""Kernel groups of a profile."""

import pytest


@pytest.mark.parametrize(
    ("kernel", "group"),
    [
        ("nvjet_tst_256x128_64x4_2x1_v_bz_TNT", "gemm"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "gemm"),
        ("void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal>", "gemm"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_128x128x192", "attention"),
        ("fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention)", "attention"),
        ("void pytorch_flash::flash_bwd_dot_do_o_kernel", "attention"),
        ("sparse_mla_forward_kernel", "attention"),
        ("void at::native::vectorized_elementwise_kernel<4, add>", "rest"),
        ("rope_rows_kernel", "rest"),
        ("Memcpy DtoD (Device -> Device)", "rest"),
    ],
)
def test_group_of(script, kernel, group):
    assert script("breakdown").group_of(kernel) == group


def test_shares_sum_to_the_total(script):
    breakdown = script("breakdown")
    kernels = [("nvjet_a", 30.0), ("sdpa_b", 60.0), ("nvjet_a", 30.0), ("rope", 6.0), ("copy", 4.0)]
    parts = breakdown.summarise(kernels, steps=2, top=2)
    assert parts["total_us"] == 65.0
    assert parts["groups"] == {"attention": 30.0, "gemm": 30.0, "rest": 5.0}
    assert sum(parts["shares"].values()) == pytest.approx(1.0)
    assert [k["name"] for k in parts["kernels"]] == ["nvjet_a", "sdpa_b"]
    assert parts["kernels"][0]["calls"] == 1.0
    assert breakdown.lines("x", parts)[0].startswith("x: 0.07 ms on the device")


def test_nothing_measured(script):
    assert script("breakdown").summarise([])["shares"] == {"attention": 0.0, "gemm": 0.0, "rest": 0.0}


def test_idle_is_what_no_range_covers(script):
    idle = script("breakdown").idle
    assert idle([(10.0, 20.0), (15.0, 18.0), (25.0, 30.0), (20.0, 21.0)]) == 4.0
    assert idle([]) == 0.0
