"""The lowering of a product on a platform: a custom call, or XLA's own operations."""
