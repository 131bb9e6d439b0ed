"""Sessions: finished calls that are remembered and drafted from."""
