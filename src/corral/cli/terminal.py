"""What the command line writes: results to stdout as exact bytes, everything else to stderr.

stdout carries only the result. Progress and colours appear only on a terminal. Text that may come from a sandbox never reaches a
terminal with its control characters (`plain`); pass-through bytes do, as they are the user's program speaking.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from corral.cli.leaving import answer
from corral.errors import CorralError

Json = dict[str, Any]


class OutputGone(Exception):
    """Whoever read our output has left (EPIPE), or it cannot be written (`cause` has the errno)."""

    def __init__(self, descriptor: int, cause: OSError) -> None:
        why = "it is closed" if cause.errno == errno.EBADF else cause.strerror
        super().__init__(f"cannot write to {'stdout' if descriptor == 1 else 'stderr'}: {why}")
        self.broken_pipe = cause.errno == errno.EPIPE


def claim_standard_streams() -> None:
    """Make sure that 0, 1 and 2 are open, so that no file that we open later can be taken for one of them."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:  # what is opened takes the lowest free number, which is this one
            os.open(os.devnull, os.O_RDONLY if descriptor == 1 else os.O_RDWR)  # a lost result must fail


def write(descriptor: int, data: bytes) -> None:
    """All of `data`, also to a pipe that somebody made non-blocking."""
    view = memoryview(data)
    while view:
        wait_writable(descriptor)
        view = view[write_some(descriptor, view) :]


def wait_writable(descriptor: int) -> None:
    """Return when `write_some` will not block."""
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    poll.poll()


def write_some(descriptor: int, view: memoryview) -> int:
    """As much as goes without blocking after `wait_writable`: what a pipe takes in one piece. -> bytes written."""
    stop_progress()
    try:
        return os.write(descriptor, view[: select.PIPE_BUF])
    except BlockingIOError:
        return 0
    except OSError as error:
        raise OutputGone(descriptor, error) from error


def put(text: str) -> None:
    """Text of the result."""
    write(1, text.encode("utf-8", "surrogateescape"))


def put_json(document: Any) -> None:
    """The one document; indented for people."""
    indent = 2 if os.isatty(1) else None
    try:
        data = json.dumps(document, ensure_ascii=False, indent=indent).encode()
    except UnicodeEncodeError:  # lone surrogates stand for bytes that are not UTF-8
        data = json.dumps(document, indent=indent).encode()
    answer.given = True
    write(1, data + b"\n")


def say(text: str) -> None:
    """One line for people on stderr; a stderr that is gone is no reason to fail."""
    with contextlib.suppress(OutputGone):
        write(2, f"{plain(text)}\n".encode("utf-8", "backslashreplace"))


def complain(error: CorralError) -> None:
    """`corral: CODE: detail (hint)`."""
    field = f"{error.field}: " if error.field and error.field not in error.detail else ""
    hint = f" ({error.hint})" if error.hint else ""
    say(f"corral: {error.code}: {field}{error.detail}{hint}")


def plain(text: str) -> str:
    """One line without control characters."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or 0xDC80 <= ord(c) <= 0xDCFF else _escaped(c) for c in text.strip("\n"))


def _escaped(char: str) -> str:
    return " " if char in "\n\t" else char.encode("unicode_escape", "backslashreplace").decode("ascii")


def table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str], *, empty: str, style: str = "") -> None:
    """Rows for people: a table on a terminal, else plain columns with a header line.

    `style` names the field of a row that holds the colour of its verdict (on a terminal only).
    """
    if not rows:
        say(empty)
        return
    cells = [[plain(_cell(row.get(column))) for column in columns] for row in rows]
    if os.isatty(1):
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        grid = Table(box=None, pad_edge=False, header_style="bold")
        for column in columns:
            grid.add_column(column.upper().replace("_", " "), overflow="fold")
        for row, line in zip(rows, cells, strict=True):
            coloured = str(row.get(style) or "") if style else ""
            shown = (
                Text(cell, coloured if name in ("verdict", "grade") else "")
                for name, cell in zip(columns, line, strict=True)
            )
            grid.add_row(*shown)
        Console(file=sys.__stdout__).print(grid)
        return
    header = [column.upper() for column in columns]
    widths = [max(_width(line[i]) for line in [header, *cells]) for i in range(len(columns))]
    for line in [header, *cells]:
        padded = (cell + " " * (width - _width(cell)) for cell, width in zip(line, widths, strict=True))
        put("  ".join(padded).rstrip() + "\n")


def _width(text: str) -> int:
    """Columns of a terminal that the text takes: Chinese characters take two, accents on the one before none."""
    if text.isascii():
        return len(text)
    import unicodedata

    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def size(count: int | None) -> str:
    """Bytes in words; None is not known."""
    if count is None:
        return "an unknown size"
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.1f} {unit}" if unit != "B" else f"{count} B"


def _cell(value: Any) -> str:
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict | list):
        return json.dumps(value, ensure_ascii=False)
    return str(value)


class Progress:
    """Long set-up tells where it is; silent unless stderr is a terminal. Call it with (sentence, fraction or None), from any thread.

    The first byte that we write takes it off the screen for good.
    """

    def __init__(self) -> None:
        self._bar: Any = None
        self._task: Any = None
        self._over = False
        self._guard = threading.RLock()  # a signal may find us inside

    def __call__(self, sentence: str, fraction: float | None) -> None:
        with self._guard:
            if self._over or not os.isatty(2):
                return
            if self._bar is None:
                self._start()
            if fraction is None:
                self._bar.update(self._task, description=plain(sentence), total=None)
            else:
                self._bar.update(self._task, description=plain(sentence), total=1.0, completed=fraction)

    def _start(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar

        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(24), TimeElapsedColumn())
        self._bar = Bar(*columns, console=Console(file=sys.__stderr__), transient=True)
        self._task = self._bar.add_task("", total=None)
        self._bar.start()

    def stop(self) -> None:
        """Take it off the screen; nothing is shown any more."""
        if self._over:
            return
        with self._guard:
            self._over = True
            bar, self._bar = self._bar, None
            if bar is not None:
                bar.stop()


_on_screen: Progress | None = None


def stop_progress() -> None:
    """Take what is shown off the screen, for good."""
    if _on_screen is not None:
        _on_screen.stop()


@contextlib.contextmanager
def progress() -> Iterator[Progress]:
    """A progress display that is gone afterwards."""
    global _on_screen
    _on_screen = shown = Progress()
    try:
        yield shown
    finally:
        _on_screen = None
        shown.stop()
