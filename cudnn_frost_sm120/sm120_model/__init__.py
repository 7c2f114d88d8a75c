"""A static model of SM120: what a query tile asks of each pipe, counted in the compiled SASS, ours and the baseline's.

Each SM sub-partition runs two warps of a CTA that work on a tile; the pipe that needs most cycles is the bound. What
the loop really takes is more, as waits and latencies are not in the counts: `calibration` fits that to a run on the
Hopper stand-in. The model tells a choice that the stand-in flatters (faster tensor pipe, relatively slower shared
memory) from one that helps SM120. No GPU is needed, only the CUDA binary tools (cubin.py).

Not in it: the rate of fp32 adds in L2, bank conflicts, tiles that only some warps of a CTA skip.
"""
