"""The portable path: Triton kernels. ``backend`` keeps the contract, ``launch`` launches, the rest is one file a pass."""
