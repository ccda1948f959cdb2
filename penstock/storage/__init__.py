"""Checkpoints on disk: folders that change at once, and the parts that workers write there."""
