"""The public functions of the package."""
