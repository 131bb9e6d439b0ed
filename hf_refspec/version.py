"""The version of the package, and the versions of transformers that it is tested with.

This module stands alone, so that a build can read it without importing torch, and a call can
compare versions before it imports anything that another transformers may lack.
"""

from __future__ import annotations

__version__ = "0.3.0"

# The minor releases of transformers that the tests pass with; setup.cfg has the same bounds.
OLDEST_TRANSFORMERS = (5, 20)
NEWEST_TRANSFORMERS = (5, 24)


def untested_transformers() -> str | None:
    """Why nothing is drafted with the imported transformers; `None` if it was tried."""
    import transformers

    release = transformers.__version__
    minor = tuple(int(part) for part in release.split(".")[:2])
    if OLDEST_TRANSFORMERS <= minor <= NEWEST_TRANSFORMERS:
        return None
    oldest, newest = (
        ".".join(map(str, bound)) for bound in (OLDEST_TRANSFORMERS, NEWEST_TRANSFORMERS)
    )
    return (
        f"hf_refspec {__version__} is tested with transformers {oldest} to {newest}; this is "
        f"{release}. Install one of these (pip install 'transformers=={newest}.*') or a newer "
        "hf_refspec"
    )
