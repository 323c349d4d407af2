"""What kernels there are. Needs the standard library alone: the build runs it."""
