"""Workers that are actors of a Ray cluster, driven by the script; each of them is a rank inside."""
