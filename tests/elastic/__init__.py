"""Training runs whose workers die, leave and join, and that end with the bits of one device."""
