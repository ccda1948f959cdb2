"""The board: what every worker is doing, in memory that others read without asking it. No torch."""
