"""Reads a training script and changes it so that a pipeline trains its model. No torch here.

`source.py` has the text and its syntax tree, `variables.py` says which names mean the same model,
`training.py` finds the steps, `example.py` the batch that the pipeline is built with, and
`port.py` makes the edits.
"""

from penstock.porting.port import Note, Options, Ported, port

__all__ = ["Note", "Options", "Ported", "port"]
