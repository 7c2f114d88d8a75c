"""Small in-kernel classes and functions, one job each. Traced inline into the kernels of `kernels/`."""
