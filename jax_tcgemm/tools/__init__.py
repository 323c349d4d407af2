"""Timing and self-test."""
