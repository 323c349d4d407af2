"""The table of kernels. It imports only the standard library: the build runs it."""
