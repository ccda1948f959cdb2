"""Training runs that are killed at random moments, and end with the bits of one that was not."""
