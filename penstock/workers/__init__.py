"""Who runs the stages: one interface, and a folder for each kind that implements it."""
