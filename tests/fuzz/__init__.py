"""Hostile messages to everything that listens in real jobs: `python -m tests.fuzz`."""
