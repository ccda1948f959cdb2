"""What differs between kinds of device (`kind.py`): streams, memory, random numbers; cores too."""
