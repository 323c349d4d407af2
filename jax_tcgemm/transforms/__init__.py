"""Transformations of whole functions."""
