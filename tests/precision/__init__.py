"""Mixed precision: what the tests of threads, processes and ranks have in common is in steps.py."""
