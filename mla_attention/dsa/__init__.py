"""DSA, DeepSeek sparse attention: the absorbed form, the indexer, sparse attention and the indexer's loss."""
