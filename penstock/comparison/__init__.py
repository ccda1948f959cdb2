"""One device beside the pipeline: how it is run, and how the two are compared."""
