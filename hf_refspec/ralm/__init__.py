"""Speculative retrieval (RaLMSpec, arXiv 2401.14021): Algorithm 1, iterative RaLM and kNN-LM."""
