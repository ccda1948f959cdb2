"""Workers that are the ranks of a launch by torchrun; none drives the others."""
