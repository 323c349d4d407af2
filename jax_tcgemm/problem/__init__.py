"""Describes products: axes, strides, activations and arithmetic; lowers nothing."""
