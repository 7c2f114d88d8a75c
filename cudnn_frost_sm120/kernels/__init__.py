"""The kernels, one launch per module, and the chain that launches them."""
