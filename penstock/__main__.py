"""Runs the command line as `python -m penstock`, for when `penstock` is not on the path."""

from penstock.cli import main

main(prog_name="penstock")
