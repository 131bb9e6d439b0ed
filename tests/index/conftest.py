"""Kernels are compiled here, where it is in no test's time."""

from hypothesis import settings

from hf_refspec.index.kernels import compile_kernels

compile_kernels()
settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")
