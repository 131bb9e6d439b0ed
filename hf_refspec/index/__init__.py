"""Indexes over token sequences: growing buffers and the compiled loops that search them."""
