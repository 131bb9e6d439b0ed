"""Kernels that numba compiles, and when: drafting, products and attention of a few tokens."""
