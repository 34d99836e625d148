"""A progress bar for Python sessions: in a notebook as HTML in its cell, in a terminal as a line."""

from __future__ import annotations

import contextlib
import html
import sys
from collections.abc import Callable, Iterator
from typing import Any

from fedbraid.simulation.result import Progress
from fedbraid.units import format_rate

__all__ = ["progress_bar"]


@contextlib.contextmanager
def progress_bar(rounds: int) -> Iterator[Callable[[Progress], None]]:
    """A bar that is shown until the context ends. It yields a function for ``on_progress``.

    A notebook needs no further package (not ipywidgets): its cell shows HTML that is replaced. Other sessions show a
    line on stderr.
    """
    display = _notebook()
    if display is not None:
        handle = display.display(display.HTML(_html(0, rounds, "compiling")), display_id=True)
        yield lambda now: handle.update(display.HTML(_html(now.round, rounds, news(now))))
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (MofNCompleteColumn(), BarColumn(bar_width=24), TextColumn("{task.fields[news]}"), TimeRemainingColumn())
    with Progress(TextColumn("round"), *columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=rounds, news="compiling")
        yield lambda now: bar.update(task, completed=now.round, news=news(now))


def _notebook() -> Any:
    """The module ``IPython.display`` if this process is the kernel of a notebook; else None."""
    if "IPython" not in sys.modules:  # a notebook has imported it
        return None
    import IPython  # type: ignore[import-not-found]
    from IPython import display  # type: ignore[import-not-found]

    return display if getattr(IPython.get_ipython(), "kernel", None) is not None else None


def news(now: Progress) -> str:
    """The newest numbers of a run, in a few words.

    >>> news(Progress(10, {"train/loss": 0.5, "test_accuracy": 0.91, "test_accuracy_client_mean": 0.9}, 2.0))
    'train/loss 0.500  test_accuracy 0.910  5.0 rounds/s'
    >>> news(Progress(10, {"train/loss": 0.5}, 2.0, evaluating=True))
    'train/loss 0.500  evaluating'
    """
    shown = [name for name in now.row if name.endswith("/loss")][:1]
    scores = ("test_personal_accuracy", "test_accuracy", "test_personal_loss", "test_loss")
    shown += [name for name in scores if name in now.row][:1]
    words = [f"{name} {now.row[name]:.3f}" for name in shown]
    if now.evaluating:
        return "  ".join([*words, "evaluating"])
    return "  ".join([*words, *([format_rate(now.round / now.seconds)] if now.round and now.seconds > 0 else [])])


def _html(done: int, rounds: int, words: str) -> str:
    return (
        f'<progress value="{done}" max="{rounds}" style="width:16em"></progress> round {done} of {rounds} '
        f"&nbsp; {html.escape(words)}"
    )
