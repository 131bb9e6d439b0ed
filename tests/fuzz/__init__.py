"""Attacks on stored folders: damaged ones are opened, and their writers are killed.

    python -m tests.fuzz mutate --count 10000     damages folders, then opens and uses them
    python -m tests.fuzz kill --count 500         kills every writer at its file operations

And on decoding: drafted calls are compared with plain ones.

    python -m tests.fuzz decode --count 10000     random models, calls, and changes in between

Each prints how often it ended how, and exits with 1 if anything ended in a way that it may not. All
of it is determined by a number: `mutate --first N --count 1` does the Nth mutation again. With
NUMBA_BOUNDSCHECK=1 (and a NUMBA_CACHE_DIR of its own) the kernels check each index as well.
"""
