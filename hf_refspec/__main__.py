"""`python -m hf_refspec` is `hf-refspec`."""

from __future__ import annotations

import sys

from .apps.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
