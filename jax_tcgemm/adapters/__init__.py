"""Hooks for qwix, Flax and Keras; each module needs its library, so the package imports none."""
