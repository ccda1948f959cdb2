"""The benchmarks of `penstock bench`, and those of `python -m penstock.bench NAME`."""
