"""Fast execution of graph parts: compiled by inductor or replayed as CUDA graphs."""
