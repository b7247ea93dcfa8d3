"""Rows that are read when a step takes them, of datasets that memory would not hold."""

from __future__ import annotations

import json
from abc import abstractmethod
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias, overload

from tuner.errors import DatasetError

IN_MEMORY = 64 << 20
"""Bytes up to which a dataset is read at once."""
_ALL = 100_000
_SAMPLE = 1_000
_KEPT = 8_192
"""Rows of a stream that can be asked for again without beginning anew."""

Row: TypeAlias = dict[str, Any]


class LazyRows(Sequence[Row]):
    """Rows by their number, which are not in memory."""

    @abstractmethod
    def row(self, index: int) -> Row:
        """The row of a number from 0; raises DatasetError where it cannot be read."""

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self.row(i) for i in range(*index.indices(len(self)))]
        place = index + len(self) if index < 0 else index
        if not 0 <= place < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        return self.row(place)

    def sample(self) -> Iterable[Row]:
        """Rows that tell this dataset from others: of very many some, with how many there are."""
        count = len(self)
        if count <= _ALL:
            return self
        return [{"rows": count}, *(self[i * count // _SAMPLE] for i in range(_SAMPLE))]


class ArrowRows(LazyRows):
    """Rows of a `datasets.Dataset`, which lie in files that are mapped into memory."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def row(self, index: int) -> Row:
        return dict(self._dataset[index])


class JsonLines(LazyRows):
    """Lines of a JSON Lines file, each read once at the beginning to know that it can be.

    Every row has the columns of all, None where it says nothing.

    Raises:
        DatasetError: A line is no JSON object. Later also: the file has changed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._starts = array("Q")
        self._columns: Row = {}
        self._file = path.open("rb")
        self._state = self._seen()
        start = 0
        for number, line in enumerate(self._file, 1):
            if line.strip():
                self._starts.append(start)
                self._columns |= dict.fromkeys(self._read(line, f"{path}:{number}"))
            start += len(line)

    def __len__(self) -> int:
        return len(self._starts)

    def row(self, index: int) -> Row:
        if self._seen() != self._state:
            raise DatasetError(
                f"dataset {str(self._path)!r} has changed since the run began, and is too large to "
                "be kept in memory: which rows a step takes would be by chance; start again"
            )
        self._file.seek(self._starts[index])
        return {**self._columns, **self._read(self._file.readline(), str(self._path))}

    def _seen(self) -> tuple[int, int]:
        status = self._path.stat()
        return status.st_size, status.st_mtime_ns

    @staticmethod
    def _read(line: bytes, at: str) -> Row:
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DatasetError(f"{at}: not valid JSON: {error}") from None
        if not isinstance(row, dict):
            raise DatasetError(f"{at} is {row!r:.80}; every row must be a dict")
        return row


class StreamRows(LazyRows):
    """Rows of a `datasets.IterableDataset` in their order; how many there are nobody knows.

    A row that was taken long ago is found by reading the stream again from its beginning.

    Raises:
        DatasetError: Later: the stream has ended before a row that is asked for, or what it gives
            is no dict.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._rows: Iterator[Any] = iter(())
        self._next = -1
        self._kept: dict[int, Row] = {}

    def __len__(self) -> int:
        return 1 << 62

    def row(self, index: int) -> Row:
        if index not in self._kept:
            self._read_to(index)
        return dict(self._kept[index])

    def _read_to(self, index: int) -> None:
        if not 0 <= self._next <= index:
            self._rows = iter(self._dataset.skip(max(0, index - _KEPT // 2)))
            self._next = max(0, index - _KEPT // 2)
            self._kept.clear()
        for row in islice(self._rows, index + 1 - self._next):
            if not isinstance(row, dict):
                raise DatasetError(f"row {self._next} of the stream is {row!r:.80}, and no dict")
            self._kept[self._next] = row
            self._kept.pop(self._next - _KEPT, None)
            self._next += 1
        if self._next <= index:
            raise DatasetError(
                f"the stream given as dataset ended after {self._next} rows, and row {index} is "
                "asked for: lower buffer.total_steps, or let it repeat (dataset.repeat())"
            )

    def sample(self) -> Iterable[Row]:
        return self[:1]
