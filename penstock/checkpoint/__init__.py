"""Checkpoints: what of a training run is saved, by whom, and how it is put back."""
