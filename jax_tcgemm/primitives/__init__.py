"""The JAX primitives: a file each, with their rules for differentiation, batching and lowering."""
