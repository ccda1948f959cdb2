"""Workers that are processes of this machine, which this one drives."""
