"""``python -m jax_tcgemm``: as ``jax-tcgemm``."""

import sys

from jax_tcgemm.cli import main

if __name__ == "__main__":
    sys.exit(main())
