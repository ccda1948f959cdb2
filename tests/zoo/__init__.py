"""Real models, each captured, cut and compared with itself bit for bit; see `__main__`."""
