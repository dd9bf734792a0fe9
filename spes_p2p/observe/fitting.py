"""Tables that fit a narrow terminal: they leave out whole columns before ids and numbers are cut."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table


@dataclass(frozen=True)
class FittingTable:
    """Renders the widest form of a table in which no column that must not wrap is cut."""

    make: Callable[[Collection[str]], Table]
    """Makes the table without these columns."""
    optional: Sequence[str]
    """Names of columns, the first to be left out first."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the table."""
        unbounded = options.update(max_width=10**6)
        for count in range(len(self.optional) + 1):
            table = self.make(self.optional[:count])
            for column in table.columns:
                if column.no_wrap:
                    cells = (column.header, *column.cells)
                    column.min_width = max(Measurement.get(console, unbounded, cell).maximum for cell in cells)
            if Measurement.get(console, unbounded, table).minimum <= options.max_width:
                break
        yield table
