"""The rule by which `core_attention_backend="auto"` chooses, for devices that are not there."""

from itertools import accumulate

import pytest
import torch

from mla_attention import PackedSeqParams
from mla_attention.core_attention.choose import AutoAttention
from mla_attention.core_attention.varlen import VarlenAttention
from mla_attention.token_layout import TokenLayout

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
HALF, FULL, DOUBLE = torch.bfloat16, torch.float32, torch.float64
SHORT, LONG = PackedSeqParams([0, 8, 16]), PackedSeqParams([0, 2048, 4096])
UNREAD = PackedSeqParams(torch.tensor([0, 8, 16]), max_seqlen_q=8, validate=False)
NOTHING = torch.empty(0)


def lengths(of: list[int]) -> PackedSeqParams:
    return PackedSeqParams([0, *accumulate(of)])


def layout(packed: PackedSeqParams | None, rows: int = 4096) -> TokenLayout:
    return TokenLayout(1, rows, NOTHING, NOTHING, packed)


@pytest.mark.parametrize(
    ("device", "packed", "dtype", "chosen"),
    [
        (CUDA, None, HALF, "sdpa"),
        (CUDA, LONG, HALF, "sdpa"),
        (CUDA, SHORT, HALF, "varlen"),
        (CUDA, UNREAD, HALF, "varlen"),
        (CUDA, SHORT, torch.float16, "varlen"),
        (CUDA, lengths([256] * 16), HALF, "sdpa"),  # one call of 4096 rows
        (CUDA, lengths([256, 0, 256, 0] * 8), HALF, "sdpa"),
        (CUDA, lengths([255, 257] * 8), HALF, "varlen"),  # sixteen calls
        (CUDA, lengths([64] * 4096), HALF, "varlen"),  # less than a tile each
        (CUDA, lengths([0, 0]), HALF, "sdpa"),  # no call at all: flash refuses a batch of none
        (CUDA, PackedSeqParams([0]), HALF, "sdpa"),
        (CUDA, SHORT, FULL, "sdpa"),  # flash attention is for half precision alone
        (CUDA, UNREAD, FULL, "flex"),
        (CUDA, UNREAD, DOUBLE, "reference"),
        (CPU, SHORT, FULL, "sdpa"),
        (CPU, UNREAD, FULL, "reference"),
    ],
)
def test_rule(device: torch.device, packed: PackedSeqParams | None, dtype: torch.dtype, chosen: str) -> None:
    assert AutoAttention(192, 128, 0.1).choice(device, layout(packed), dtype) == chosen


def test_dropout_is_never_dropped() -> None:
    core = AutoAttention(192, 128, 0.1, dropout=0.1)
    assert core.choice(CUDA, layout(UNREAD), HALF) == "reference"
    assert core.choice(CUDA, layout(SHORT), HALF) == "sdpa"


def test_varlen_refuses_full_precision_in_one_line() -> None:
    query, value = torch.zeros(16, 2, 24), torch.zeros(16, 2, 16)
    with pytest.raises(ValueError, match=r"given 'varlen' for torch\.float32.* allowed are .*bfloat16") as refusal:
        VarlenAttention(24, 16, 0.1)(query, query, value, layout(SHORT, 16))
    assert "\n" not in str(refusal.value)
