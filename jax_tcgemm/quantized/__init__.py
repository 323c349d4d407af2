"""Arrays with scales, and weights packed for the kernels."""
