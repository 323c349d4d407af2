"""The JAX primitives, a file each, with their rules for derivatives, batching and lowering."""
