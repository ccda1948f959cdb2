"""Penstock in the trainers of other packages, one module each."""
