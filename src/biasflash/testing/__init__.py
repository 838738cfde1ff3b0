"""Named cases, the measured error budget, conformance suites and refusals; shipped, for backends elsewhere too."""
