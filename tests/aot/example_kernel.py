"""A kernel for testing the test support itself."""

from typing import Any

import torch
import triton
import triton.language as tl

from tests.aot.harness import TARGETS, compile_kernel


@triton.jit
def double_kernel(p_in, p_out, n, BLOCK: tl.constexpr, UPCAST: tl.constexpr, BARRIER: tl.constexpr):
    o_element = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_element = o_element < n
    b_in = tl.load(p_in + o_element, mask=m_element, other=0.0)
    if UPCAST:
        b_in = b_in.to(tl.float32)
    if BARRIER:
        tl.debug_barrier()
    tl.store(p_out + o_element, b_in + b_in, mask=m_element)


def facts() -> list[dict[str, Any]]:
    """What the harness reports for each target, with and without a barrier."""
    t = torch.empty(64, dtype=torch.bfloat16)
    found = []
    for target in TARGETS:
        for barrier in (False, True):
            compiled = compile_kernel(double_kernel, (t, t, 64), target, BLOCK=1024, UPCAST=True, BARRIER=barrier)
            found.append(
                {
                    "order": compiled.memory_order,
                    "spills": compiled.spills,
                    "registers": compiled.registers,
                    "shared": compiled.shared,
                    "barrier": barrier,
                }
            )
    return found
