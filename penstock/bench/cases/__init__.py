"""What stays exact: a case is a small training script that everybody runs, with its model."""
