"""Kernels are compiled here, where it is in no test's time."""

from hypothesis import settings

from hf_refspec.generation.warmup import warmup

warmup()
settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")
