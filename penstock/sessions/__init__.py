"""Sequences of passes that share states which stay with the workers, such as one generation."""
