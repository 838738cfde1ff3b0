"""The portable path, Triton kernels: ``backend`` keeps the contract, ``plans`` choose, ``launch`` launches."""
