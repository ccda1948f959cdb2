"""What stays exact when a model is trained on two devices: Penstock and others on the same cases.

    python -m benchmarks.contract

writes docs/exactness.md and docs/exactness.json. Every case (in `cases`) is a small training
script. One device runs it, accumulating the micro-batches in order, and so do the contenders, each
on two workers; what they have in the end is compared with what the one device has. To add a case,
write one function there.
"""
