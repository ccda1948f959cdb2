"""What differs between kinds of device: which there are, cores, the allocator."""
