"""What a training loop needs beside the passes: optimizer, scaling, groups."""
