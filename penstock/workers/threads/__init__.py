"""Workers that are threads of this process."""
