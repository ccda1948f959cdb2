"""The command line. Each command is a file; it, and torch, are imported when it is run."""

from __future__ import annotations

from importlib import import_module

import click

_COMMANDS = {
    "inspect": "Show what a model does, call by call, and where it can be cut.",
    "plan": "Profile a model and say how to run it on these devices.",
    "verify": "Prove that the split model computes the same bits as the whole one.",
    "bench": "Measure one device, two devices and pipelines, and draw the figures.",
}


class _Lazy(click.Group):
    """A group that imports a command when it is asked for, and not for its own help."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command: click.Command = import_module(f"penstock.cli.{cmd_name}_command").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))


@click.group(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="penstock")
def main() -> None:
    """Split one PyTorch model over many devices, and keep all of them busy.

    A MODEL is package.module:callable, a function or class that returns an nn.Module.
    """
