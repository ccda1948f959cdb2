"""The peers that Penstock is compared with, in processes of their own.

They train the same model from the same weights on the same batch, and their processes keep freed
memory as Penstock's do (`penstock.devices.allocator`).
"""
