"""A simulated accelerator: the real engine runs on it, on any machine.

| | |
|---|---|
| `machine.py` | streams, events, the seeded scheduler, the caching allocator |
| `tensors.py` | tensors whose operators are queued on streams |
| `module.py` | `torch.sim`, as PyTorch has a module for every kind; `simulated` starts a machine |
| `detector.py` | the same events for PyTorch's race detector |
| `apart.py` | links as between processes, with both ends in this one |
| `hosts.py` | the threads that give work, one at a time, in an order that is seeded too |

Every operator runs twice. At once it runs in memory that no stream has anything to do with, as if
all streams were one; that tells shapes, strides and what shares memory, and nothing else of it is
ever read. Later, when its stream has come to it, it runs in the device's memory. Whatever reads
values (`item`, a copy to the CPU) reads the device's.
"""
