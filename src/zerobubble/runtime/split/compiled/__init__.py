"""Parts of a graph made fast: compiled by inductor, or replayed as CUDA graphs."""
