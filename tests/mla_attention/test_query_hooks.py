"""A hook on the rotated query, a view rotated in place: torch 2.13 crashes where such a view's history lags."""

import subprocess
import sys

CODE = """
import torch
from mla_attention import MLASelfAttention
from mla_attention.configs import tiny
layer = MLASelfAttention(tiny())
seen = []
for tensor in layer.get_query_key_value_tensors(torch.randn(8, 1, tiny().hidden_size)):
    tensor.register_hook(lambda gradient: seen.append(gradient.shape))
    tensor.sum().backward(retain_graph=True)
def watch(_, given):
    given[0].register_hook(lambda gradient: seen.append(gradient.shape))
layer.core_attention.register_forward_pre_hook(watch)
layer(torch.randn(8, 1, tiny().hidden_size))[0].sum().backward()
print(len(seen))
"""


def test_hooks_on_what_core_attention_is_given() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "6"
