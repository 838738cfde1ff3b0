"""Hopper (sm_90): warp-specialised kernels in Gluon, fed by the bulk tensor copy engine."""
