"""What all figures have in common. matplotlib is an extra; without it, a figure is an error."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import InputError, PenstockError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def require_figure(path: Path) -> None:
    """Raise if there can be no figure of this name, before the work that it would show.

    Raises:
        InputError: its ending means no kind of picture that can be drawn.
        PenstockError: matplotlib is not installed.
    """
    require_matplotlib()
    from matplotlib.backend_bases import FigureCanvasBase

    kinds = sorted(FigureCanvasBase.get_supported_filetypes())
    if path.suffix[1:].lower() not in kinds:
        raise InputError(
            f"the figure {path} ends in {path.suffix!r}: give one of .{', .'.join(kinds)}, like "
            f"{path.with_suffix('.png').name}"
        )


def require_matplotlib() -> None:
    """Raise if there can be no figures, before the work that they would show.

    Raises:
        PenstockError: matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        raise PenstockError("figures need matplotlib: pip install 'penstock[report]'") from error


def canvas(width: float, height: float, panels: int = 1) -> tuple[Figure, Any]:
    """A figure of so many inches, and its axes: an array of them if there are several panels.

    Raises:
        PenstockError: matplotlib is not installed.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height))
    return figure, figure.subplots(1, panels)


def save(figure: Figure, path: Path) -> None:
    """Write it as the name says, `step.png` as a PNG.

    Raises:
        PenstockError: it cannot be written there, or not in that format.
    """
    try:
        figure.savefig(path, dpi=140, bbox_inches="tight")
    except (OSError, ValueError) as error:
        raise PenstockError(f"cannot write the figure {path}: {error}") from error


def bare(axes: Axes, *sides: str) -> None:
    """Leave out the frame on these sides, by default at the top and on the right."""
    for side in sides or ("top", "right"):
        axes.spines[side].set_visible(False)
