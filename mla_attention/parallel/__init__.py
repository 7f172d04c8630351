"""Tensor, sequence and context parallelism, applied from outside the module."""
