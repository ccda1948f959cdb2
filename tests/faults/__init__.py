"""What goes wrong in processes, made to go wrong: at random moments, by the hundred."""
