"""The measured comparisons that `penstock bench` runs and draws."""
