"""The choice of a display."""

from __future__ import annotations

from rich.console import Console

from sparkdl.driver.display.notebook import HtmlDisplay
from sparkdl.driver.display.progress import Display, LineDisplay
from sparkdl.driver.display.terminal import BarDisplay


def choose_display(verbose: str | int, epochs: int) -> Display:
    """Return the display for a value of ``verbose``.

    Args:
        verbose: 0 is silent, 1 a progress bar, 2 one line per epoch; "auto" is 1 in terminals and notebooks,
            and 2 elsewhere.
        epochs: number of epochs.
    """
    console = Console()
    if verbose == "auto":
        verbose = 1 if console.is_terminal or console.is_jupyter else 2
    if verbose == 1:
        return HtmlDisplay(epochs) if console.is_jupyter else BarDisplay(epochs, console)
    return LineDisplay(epochs) if verbose else Display(epochs)
