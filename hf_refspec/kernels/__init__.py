"""What numba compiles: kernels, when they are compiled, and products of a few tokens."""
