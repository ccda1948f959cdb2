"""Reads a training script and changes it so that a pipeline trains its model. No torch here.

`source.py` has the text and its syntax tree, `variables.py` says which names mean the same model,
`training.py` finds the steps, `example.py` the batch that the pipeline is built with, and
`model.py` where the model is created and trained. `port.py` changes the script: `changes.py`
collects edits and notes, `ranks.py` takes wrappers away, `building.py` builds the pipeline and
`optimizers.py` its optimizers, `train_step.py` changes the steps, and `uses.py` all else.
"""

from penstock.porting.building import Options
from penstock.porting.changes import Note
from penstock.porting.port import Ported, port

__all__ = ["Note", "Options", "Ported", "port"]
