"""The portable path, Triton kernels: ``backend`` keeps the contract, the plans choose, ``launch`` launches."""
