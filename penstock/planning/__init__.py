"""From a program and devices to a plan."""
