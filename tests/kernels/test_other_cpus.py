"""The narrow kernels as they are compiled for CPUs without AVX-512 or bfloat16."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hf_refspec.kernels import narrow_product

AVX2 = "+avx,+avx2,+fma,+f16c,+sse4.2"
AVX512 = f"{AVX2},+avx512f,+avx512bw,+avx512dq,+avx512vl"
# Files and the names of their tests.
PRODUCTS = "product", "small_integers or int8 or same_bits or rounded or infinities"
ATTENTION = "attention", "plain_python or row_alone or hidden or overflow or finite"


@pytest.mark.skipif(narrow_product.LANES < 16, reason="this is such a CPU")
@pytest.mark.parametrize(
    ("cpu", "features", "tested", "passed"),
    [
        ("haswell", AVX2, [PRODUCTS, ATTENTION], 22 + 26),
        pytest.param("skylake-avx512", AVX512, [PRODUCTS], 22, marks=pytest.mark.nightly),
    ],
)
def test_they_compute_the_same(tmp_path, cpu, features, tested, passed):
    of_cpu = {"NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": features}
    environment = {**os.environ, **of_cpu, "NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "pytest", "--noconftest", "-p", "no:xdist"]
    command += [Path(__file__).with_name(f"test_narrow_{kernel}.py") for kernel, _ in tested]
    command += ["-k", " or ".join(names for _, names in tested)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout
    assert f"{passed} passed" in done.stdout
