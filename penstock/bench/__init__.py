"""Every benchmark: those that `penstock bench` runs and draws, and those of `python -m`."""
