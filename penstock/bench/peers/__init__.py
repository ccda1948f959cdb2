"""Others that `penstock bench` measures beside Penstock, in processes of their own.

A peer is started once and then runs one training step per call of `step()`, so that contestants
can take turns in one run; between its steps its processes wait without using a processor.
"""
