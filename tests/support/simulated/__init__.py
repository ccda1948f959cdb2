"""A simulated accelerator: the real engine runs on it, on any machine.

| | |
|---|---|
| `machine.py` | streams, events, the seeded scheduler, the caching allocator |
| `tensors.py` | tensors whose operators are queued on streams, as PyTorch has them on accelerators |
| `module.py` | `torch.sim`, what PyTorch has for every kind of accelerator; `simulated` starts a machine |
| `detector.py` | the same events for PyTorch's race detector |
| `hosts.py` | the threads that give work, one at a time, in an order that is seeded too |

Every operator runs twice. At once it runs in memory that no stream has anything to do with, as if
all streams were one; that tells shapes, strides and what shares memory, and nothing else of it is
ever read. Later, when its stream has come to it, it runs in the device's memory. Whatever reads
values (`item`, a copy to the CPU) reads the device's.
"""
