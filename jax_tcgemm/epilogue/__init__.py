"""Functions of the user as epilogues: traced, translated to CUDA, compiled and kept."""
