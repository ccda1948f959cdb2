"""The command line. The module of a command, and with it torch, is imported when it runs."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from penstock import __version__

try:
    import click
except ModuleNotFoundError as error:
    raise SystemExit(
        "penstock: the command line needs click and rich: pip install 'penstock[cli]'"
    ) from error

_COMMANDS = {
    "doctor": "Say what this machine has, what would hinder a pipeline, and what to do.",
    "init": "Write a copy of a training script that trains with a pipeline.",
    "inspect": "Show what a model does, call by call, and where it can be cut.",
    "profile": "Measure what every call of a model costs on these devices.",
    "plan": "Profile a model and say how to run it on these devices.",
    "simulate": "Predict the step of a model on machines that you do not have.",
    "serve": "Serve a model over HTTP, with OpenAI's interface for completions.",
    "top": "Show what the workers of running pipelines do now.",
    "report": "Say where the time of a run's steps went, and why.",
    "verify": "Prove that the split model computes the same bits as the whole one.",
    "bench": "Measure one device and pipelines side by side, and draw the figures.",
}
_INTERRUPTED = 130  # what a shell expects of a program that Ctrl-C ended


class _Lazy(click.Group):
    """A group that imports the module of a command only when that command is used."""

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

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            ctx.exit(_INTERRUPTED)


@click.group(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="penstock")
def main() -> None:
    """Split one PyTorch model over many devices, and keep all of them busy.

    A MODEL is package.module:name or file.py:name, the name of a module, of a function or class
    that returns one, also with arguments (train.py:Net(32)), or of a configuration of transformers.
    Or it is a kind of model in transformers, such as gpt2.

    Exit codes: 0 all is well, 1 the work failed, 2 the command was used wrongly.
    """
