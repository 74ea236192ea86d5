"""Every op that decides a bit, forward and backward, for CPUs and GPUs, and the numerics contract."""
