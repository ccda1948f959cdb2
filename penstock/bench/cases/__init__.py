"""The cases of what stays exact: small training scripts with their models, for all trainers."""
