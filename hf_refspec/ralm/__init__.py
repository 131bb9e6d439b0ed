"""Speculative retrieval (RaLMSpec, arXiv 2401.14021): the engine, iterative RaLM and kNN-LM."""
