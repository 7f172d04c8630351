"""Kernels of DeepSeek sparse attention: indexer scores, exact top-k, sparse MLA, the indexer KL."""
