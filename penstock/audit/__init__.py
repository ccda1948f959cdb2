"""Micro-batches of real passes, run by the model's own forward as well."""
