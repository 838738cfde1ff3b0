"""The portable path, Triton kernels: ``backend`` keeps the contract, ``forward_plan`` and ``backward_plan`` choose, ``launch`` launches."""
