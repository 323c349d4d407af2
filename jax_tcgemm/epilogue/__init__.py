"""User functions as epilogues: traced, translated to CUDA, compiled and cached."""
