"""Kernels whose result for a row does not depend on the rows beside it, one file for each provider."""
