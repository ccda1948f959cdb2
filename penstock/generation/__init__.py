"""Generation by the model's own `generate`, many groups of sequences at a time."""
