"""Building stores: sources, tokenising, shards, embeddings."""
