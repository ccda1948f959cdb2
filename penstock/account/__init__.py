"""Where the time of steps went, why, and what would change it. No torch."""
