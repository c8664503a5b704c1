"""Operations on torch.fx graphs: analysis, the cut into B and W, symbolic sizes. Nothing here runs a module."""
