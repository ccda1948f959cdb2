"""`python -m penstock` is `penstock`, where scripts are not on the path."""

from penstock.cli import main

main(prog_name="penstock")
