"""Datasets: rows as dicts, from files, the Hugging Face Hub, or memory.

Plain JSON and JSON Lines are read here, without importing `datasets`, which takes about a second;
everything else is read by `datasets`.
"""

from __future__ import annotations

import bz2
import gzip
import json
import logging
import lzma
import os
import re
import shutil
import sys
import zlib
from abc import abstractmethod
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import chain, islice
from os.path import commonprefix
from pathlib import Path
from tempfile import SpooledTemporaryFile
from typing import IO, TYPE_CHECKING, Any, TypeAlias, overload

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tuner.config.keys import hub_or_cache
from tuner.config.source import (
    COMPRESSED,
    DATA_FILES,
    MOST_LEVELS,
    path_or_name,
    uncompressed,
)
from tuner.encoding import NotText, decoded, file_text, show_all
from tuner.errors import ConfigError, DatasetError
from tuner.tasks.functions import shown
from tuner.traces.store import same_text

# Rows read when a step takes them, for datasets that do not fit in memory.


IN_MEMORY = 64 << 20
"""Datasets of at most this many bytes are read at once."""
_ALL = 100_000
_SAMPLE = 1_000
_KEPT = 8_192
"""Number of stream rows that can be read again without restarting the stream."""

Row: TypeAlias = dict[str, Any]


class LazyRows(Sequence[Row]):
    """Rows by number, not kept in memory."""

    @abstractmethod
    def row(self, index: int) -> Row:
        """The row with a number from 0; raises DatasetError if it cannot be read."""

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
        """Rows that identify this dataset: for large ones a sample, with their number."""
        count = len(self)
        if count <= _ALL:
            return self
        return [{"rows": count}, *(self[i * count // _SAMPLE] for i in range(_SAMPLE))]


class ArrowRows(LazyRows):
    """Rows of a `datasets.Dataset`, in memory-mapped files."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def row(self, index: int) -> Row:
        with _as_dataset_error(f"row {index}"):
            return dict(self._dataset[index])


class JsonLines(LazyRows):
    """Lines of a JSON Lines file, each parsed once at the start as a check.

    Every row has the columns of all rows, None for missing ones.

    Args:
        path: Location of the file.
        file: Its content, decompressed; stays open.

    Raises:
        DatasetError: A line is not a JSON object. Later also: the file has changed.
    """

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        self._path = path
        self._starts = array("Q")
        self._columns: Row = {}
        self._file = file
        self._state = self._seen()
        start = 0
        for number, line in enumerate(self._file, 1):
            if line.strip():
                self._starts.append(start)
                self._columns |= dict.fromkeys(self._read(line, number))
            start += len(line)

    def __len__(self) -> int:
        return len(self._starts)

    def row(self, index: int) -> Row:
        if self._seen() != self._state:
            raise DatasetError(
                f"dataset {str(self._path)!r} has changed since the run began, and is too large to "
                "be kept in memory, so steps would take arbitrary rows; start again"
            )
        self._file.seek(self._starts[index])
        return {**self._columns, **self._read(self._file.readline(), index + 1)}

    def _seen(self) -> tuple[int, int]:
        status = self._path.stat()
        return status.st_size, status.st_mtime_ns

    def _read(self, line: bytes, number: int) -> Row:
        at = f"{self._path}:{number}"
        try:
            row = json.loads(decoded(line, number))
        except NotText as error:
            raise DatasetError(f"dataset {str(self._path)!r} cannot be read: {error}") from None
        except (ValueError, RecursionError) as error:
            raise DatasetError(f"{at}: not valid JSON: {_fault(error)}") from None
        return check_row(row, at)


class StreamRows(LazyRows):
    """Rows of a `datasets.IterableDataset` in order; their number is unknown.

    An old row is found by reading the stream again from its beginning.

    Raises:
        DatasetError: Later: the stream has ended before a requested row, or an item is not a dict.
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
            self._kept[self._next] = check_row(row, f"row {self._next} of the stream")
            self._kept.pop(self._next - _KEPT, None)
            self._next += 1
        if self._next <= index:
            raise DatasetError(
                f"the stream given as dataset ended after {self._next} rows, and row {index} is "
                "needed: lower buffer.total_steps, or let it repeat (dataset.repeat())"
            )

    def sample(self) -> Iterable[Row]:
        return self[:1]


logger = logging.getLogger("tuner")

JSON_FILES = (".jsonl", ".json")
# One row, passed to the workflow and the judge as `task`.
Task: TypeAlias = dict[str, Any]
# The default if there are several subsets and none is named.
MAIN_SUBSETS = ("default", "main")


class PublicSettings(BaseModel):
    """Base of the settings given in Python: unknown fields are rejected, as in the file."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=(), allow_inf_nan=False)

    # Type checkers see pydantic's own constructor, with the fields as parameters.
    if not TYPE_CHECKING:

        def __init__(self, **data: Any) -> None:
            from tuner.config.keys import describe

            try:
                super().__init__(**data)
            except ValidationError as error:
                name, known = type(self).__name__, tuple(type(self).model_fields)
                problems = describe(error, type(self), (*known, *data))
                lines = "; ".join(f"{name}.{problem.text}" for problem in problems)
                raise ConfigError(f"{lines} (fields: {', '.join(known)})") from None


class DatasetConfig(PublicSettings):
    """Which rows to use, as in AgentScope 1.x. `Dataset` is the same class.

    `total_epochs` and `total_steps` override the configuration file only if given; `path`, `name`
    and `split` belong together and replace the file's.
    """

    path: str = Field(
        description="A folder, a .json, .jsonl or .csv file, which may be compressed (.jsonl.gz), "
        "a .parquet file, or a Hub name."
    )
    name: str | None = Field(
        default=None, description="Subset (the Hub's config), where there are several."
    )
    split: str | None = Field(
        default="train", description="Split, in a folder or on the Hub; a file has only one."
    )
    total_epochs: int = Field(default=1, ge=1, description="How often to go through the rows.")
    total_steps: int | None = Field(
        default=None, ge=1, description="Steps to run; wins over `total_epochs`."
    )

    def preview(self, n: int = 5) -> list[Task]:
        """Print the first `n` rows as JSON, column by column, and return them.

        Raises:
            DatasetError: The dataset cannot be read.
        """
        rows = list(read_rows(self.path, self.name, self.split)[:n])
        columns = list(dict.fromkeys(key for row in rows for key in row))
        table = {column: [row.get(column) for row in rows] for column in columns}
        show_all(sys.stdout)
        print(json.dumps(table, indent=2, ensure_ascii=False, default=str))
        return rows


Dataset = DatasetConfig


def load_tasks(source: Any, *, role: str, endless: bool = False) -> Sequence[Task]:
    """All rows of a dataset. Those of a large one stay on disk until they are used.

    Args:
        source: A `Dataset`, a `datasets.Dataset` or `IterableDataset`, a list of dicts, or a path.
        role: The user's name for the dataset; begins every error.
        endless: Whether it may be a stream of unknown length.

    Raises:
        DatasetError: There is no such dataset, subset or split; it cannot be read; it is empty; or
            a row is not a dict or cannot be serialised.
    """
    if isinstance(source, (str, Path)):
        source = DatasetConfig(path=str(source))
    try:
        rows = _rows_of(source)
    except DatasetError as error:
        raise DatasetError(f"{role}: {error}") from None
    if not rows:
        raise DatasetError(f"{role}: {described(source)} is empty; it needs at least one row")
    if isinstance(rows, StreamRows) and not endless:
        raise DatasetError(
            f"{role}: {described(source)} is an endless stream; pass a list, as in "
            "list(data.take(n))"
        )
    if isinstance(rows, LazyRows):
        return rows
    for index, row in enumerate(rows):
        check_row(row, f"{role}: row {index} of {described(source)}")
    return rows


def check_row(row: Any, at: str) -> Row:
    """The row, which traces can hold.

    Raises:
        DatasetError: It is not a dict, or what it holds cannot be written and read again.
    """
    if not isinstance(row, dict):
        raise DatasetError(f"{at} is {shown(row)}; every row must be a dict")
    layers = list(islice(_layers(row), MOST_LEVELS + 1))
    for one in chain(*layers):
        for key in one if isinstance(one, dict) else ():
            if not isinstance(key, str):
                raise DatasetError(
                    f"{at} has the key {shown(key)}: keys must be strings, because rows are stored "
                    f"as JSON; write {str(key)!r}, here and where the functions read it"
                )
    try:
        row_text(row)
    except (ValueError, TypeError, RecursionError) as error:
        raise DatasetError(
            f"{at} cannot be serialised ({_fault(error)}): no value may contain itself"
        ) from None
    if len(layers) > MOST_LEVELS:
        raise DatasetError(f"{at} is nested in more than {MOST_LEVELS} levels: make it flatter")
    return row


def _layers(value: Any) -> Iterator[list[Any]]:
    """The lists and dicts in a value by depth, each once at a depth; endless for circles."""
    layer = [value]
    while layer := [one for one in layer if isinstance(one, dict | list | tuple)]:
        layer = list({id(one): one for one in layer}.values())
        yield layer
        layer = [item for one in layer for item in (one.values() if isinstance(one, dict) else one)]


def _fault(error: Exception) -> str:
    """Why a value cannot be read from JSON, or written."""
    if isinstance(error, RecursionError):
        return f"it is nested in more than {MOST_LEVELS} levels"
    if isinstance(error, json.JSONDecodeError):
        return str(error)
    if "integer string conversion" in str(error):
        most = sys.get_int_max_str_digits()
        return f"an integer has more than {most} digits; give it as a text"
    return str(error)


def row_text(row: Task) -> str:
    """A row as one JSON text, objects of other types as their `repr`: its identity."""
    return json.dumps(row, sort_keys=True, default=same_text)


ALIKE = 40
"""Number of characters from which on texts are said to begin alike."""
_HEAD = 20


def told_apart(texts: Sequence[str]) -> list[str]:
    """The texts, each in one line, without most of a beginning that others of them share.

    State the final answer to the following problem: 12 + 30   ->   State the final … 12 + 30
    """
    lines = [" ".join(text.split()) for text in texts]
    groups: dict[str, set[str]] = {}
    for line in lines:
        groups.setdefault(line[:ALIKE], set()).add(line)
    common = {key: common_beginning(group) for key, group in groups.items() if len(group) > 1}
    return [shortened(line, common.get(line[:ALIKE], 0)) for line in lines]


def common_beginning(lines: Iterable[str]) -> int:
    """How many characters all lines begin with."""
    return len(commonprefix(list(lines)))  # noqa: RUF071  # of characters, not of folders


def shortened(line: str, common: int) -> str:
    """A line without most of its first `common` characters, which other lines share."""
    if common < ALIKE:
        return line
    # From the beginning of the word that differs, if it has one.
    cut = max(line.rfind(" ", 0, common) + 1, common - _HEAD)
    return f"{line[:_HEAD].rpartition(' ')[0] or line[:_HEAD]} … {line[cut:]}"


def check_fills_a_batch(tasks: Sequence[Task], batch_size: int, name: str) -> None:
    """Raise DatasetError for a dataset with fewer rows than one step takes."""
    if len(tasks) < batch_size:
        raise DatasetError(
            f"{name} has {len(tasks)} rows but batch_size is {batch_size}: no step can run; "
            "lower buffer.batch_size (AlgorithmConfig.batch_size) or add rows"
        )


def described(source: Any) -> str:
    """Name of a dataset in error messages."""
    if hasattr(source, "path") and hasattr(source, "split"):
        return f"dataset {source.path!r}"
    if isinstance(source, (str, Path)):
        return f"dataset {str(source)!r}"
    return f"the {type(source).__name__} given as dataset"


def _rows_of(source: Any) -> Sequence[Any]:
    if hasattr(source, "path") and hasattr(source, "split"):  # AgentScope's DatasetConfig too
        return read_rows(source.path, source.name, source.split)
    if type(source).__module__.split(".")[0] == "datasets":
        if isinstance(source, dict):
            splits = ", ".join(source)
            raise DatasetError(f"it is a DatasetDict; pass one of its splits ({splits})")
        return _arrow_rows(source) if hasattr(source, "__len__") else StreamRows(source)
    if isinstance(source, Sequence):
        return list(source)
    raise DatasetError(
        f"it is {shown(source)}; pass a Dataset, a datasets.Dataset, a list of dicts or a path"
    )


def _arrow_rows(dataset: Any) -> Sequence[Any]:
    if dataset.data.nbytes > IN_MEMORY:
        return ArrowRows(dataset)
    with _as_dataset_error(described(dataset)):
        return list(dataset)


def read_rows(path: str, subset: str | None, split: str | None) -> Sequence[Task]:
    """The rows of one split, in order.

    Args:
        path: A folder or file, or a name on the Hub. A file is one split, whatever `split` says.
        subset: Subset, or None for the only or main one.
        split: Split, or None if there is only one.

    Raises:
        DatasetError: There is no such dataset, subset or split, or it cannot be read.
    """
    local = Path(path_or_name(path, Path.cwd())).expanduser()
    if local.is_file():
        return _read_file(local)
    if local.is_dir():
        return _read_folder(local, subset, split)
    if local.is_absolute():
        raise DatasetError(f"dataset {path!r} does not exist (looked for {local})")
    return _read_hub(path, subset, split)


def _read_file(path: Path) -> Sequence[Task]:
    suffix = uncompressed(path).suffix
    kind = suffix.removeprefix(".")
    if suffix in JSON_FILES:
        file = _opened(path)
        if suffix == ".jsonl" and _size(file) > IN_MEMORY:
            return JsonLines(path, file)
        with file:
            return list(_filled(_read_json(path, file)))
    packed = path.suffix != suffix and suffix == ".parquet"  # which compresses its columns itself
    if packed or suffix not in DATA_FILES:
        raise DatasetError(
            f"dataset {str(path)!r} is a {path.suffix[1:] or 'nameless'} file; supported are "
            f".parquet, and .json, .jsonl and .csv, also compressed ({', '.join(COMPRESSED)})"
        )
    if kind == "csv":
        with _opened(path) as file:
            if b"\0" in file.read(1 << 16):  # pandas before 3.1 reads it
                file.seek(0)
                _text_of(path, file)
    try:
        return _from_datasets(str(path), kind, data_files=str(path), split="train")
    except DatasetError:
        if kind == "csv":
            with _opened(path) as file:
                _text_of(path, file)  # a reason why it cannot be parsed
        raise


_COMPRESSIONS: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}


def _opened(path: Path) -> IO[bytes]:
    """A file. What is compressed is first unpacked, into memory or a temporary file."""
    suffix = path.suffix
    try:
        if suffix not in COMPRESSED:
            return path.open("rb")
        content = SpooledTemporaryFile(IN_MEMORY)  # noqa: SIM115  # the caller closes it
        with _COMPRESSIONS[suffix](path) as packed:
            shutil.copyfileobj(packed, content)
    except (EOFError, zlib.error, lzma.LZMAError, OSError) as error:
        # Errors of the system have a number, those of a damaged file none.
        damaged = getattr(error, "errno", None) is None
        known = f"it is not a whole {suffix} file ({error}): compress it again"
        raise DatasetError(
            f"dataset {str(path)!r} cannot be read: {known if damaged else error}"
        ) from None
    content.seek(0)
    return content


def _size(file: IO[bytes]) -> int:
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    return size


def _read_folder(folder: Path, subset: str | None, split: str | None) -> Sequence[Task]:
    inner = folder / subset if subset is not None and (folder / subset).is_dir() else folder
    files = {
        uncompressed(file).stem: file
        for compression in (*COMPRESSED, "")
        for suffix in reversed(JSON_FILES)
        for file in sorted(inner.glob(f"*{suffix}{compression}"))
    }
    # Files that only `datasets` reads: of other kinds, deeper, or one part of a split.
    others = [
        file
        for file in inner.rglob("*")
        if uncompressed(file).suffix in DATA_FILES
        and (file not in files.values() or _PART.search(uncompressed(file).stem))
    ]
    if split is None and len(files) == 1 and not others:
        (split,) = files
    if split in files and (subset is None or inner != folder):
        return _read_file(files[split])
    card = (folder / "README.md").exists()  # it may name the files, in a copy of a Hub dataset
    if split is None or (files and not others and not card and "[" not in split):
        there = ", ".join(sorted(files))
        found = f": name a split ({there})"
        if split is not None:
            found = f" has no split {split!r}; it has: {there}"
        raise DatasetError(f"dataset {str(folder)!r}{found}")
    return _read_subset(str(folder), subset, split)


_PART = re.compile(r"-\d+-of-\d+$")


def _read_hub(path: str, subset: str | None, split: str | None) -> Sequence[Task]:
    if split is None:
        raise DatasetError(f"dataset {path!r}: name a split, such as split='train'")
    if re.fullmatch(r"[\w.-]+(/[\w.-]+)?[:@][\w.:@-]+", path):
        raise DatasetError(
            f"dataset {path!r} is neither a file nor a name on the Hugging Face Hub: give the name "
            "alone (openai/gsm8k), and beside it the subset (Dataset(name=...) or subset_name) and "
            "the split (split)"
        )
    return _read_subset(path, subset, split)


def _read_subset(path: str, subset: str | None, split: str) -> Sequence[Task]:
    """The rows of a dataset on the Hub, or in a folder."""
    if subset is None:
        subset = _main_subset(path)
    return _from_datasets(path, path, name=subset, split=split)


def _main_subset(path: str) -> str | None:
    """The default subset; logged, since there was a choice."""
    import datasets

    with _asking_datasets(path):
        subsets = list(datasets.get_dataset_config_names(path))
    if len(subsets) < 2:
        return None
    for name in MAIN_SUBSETS:
        if name in subsets:
            logger.warning("dataset %r: taking subset %r of %s", path, name, ", ".join(subsets))
            return name
    raise DatasetError(
        f"dataset {path!r} has several subsets ({', '.join(subsets)}): name one "
        "(Dataset(name=...) or subset_name)"
    )


def _from_datasets(said: str, path: str, **options: Any) -> Sequence[Task]:
    import datasets

    with _asking_datasets(said):
        loaded = datasets.load_dataset(path, **options)
        if loaded.info.builder_name == "csv":
            loaded = _with_zeros(loaded, path, options)
        return _arrow_rows(loaded)


def _with_zeros(loaded: Any, path: str, options: dict[str, Any]) -> Any:
    """A CSV dataset whose columns with leading zeros (007, 02139) are texts, not numbers."""
    import datasets
    import pyarrow.compute as pc

    names, table = loaded.column_names, loaded.data.table
    numbers = [name for name in names if loaded.features[name].dtype in ("int64", "float64")]
    if not numbers:
        return loaded
    options |= {"converters": dict.fromkeys(names, str), "na_filter": False}
    if "name" in options:
        options["name"] = loaded.info.config_name
    try:
        written = datasets.load_dataset(path, **options)
    except ValueError as error:
        if "Couldn't find cache" not in str(error):
            raise
        logger.warning(
            "dataset %r comes from the Hub's cache, which has no texts of the columns %s: numbers "
            "there have no leading zeros; read it once with a network",
            path,
            ", ".join(numbers),
        )
        return loaded
    for name in numbers:
        texts = pc.cast(written.data[name], "string")
        texts = pc.if_else(pc.is_null(table[name]), None, texts)
        if pc.any(pc.match_substring_regex(texts, r"^\s*[+-]?0\d")).as_py():
            table = table.set_column(names.index(name), name, texts)
    # Other columns stay on disk. The schema's metadata has the old types.
    return datasets.Dataset(datasets.table.InMemoryTable(table.replace_schema_metadata()))


@contextmanager
def _asking_datasets(path: str) -> Iterator[None]:
    """While the block runs, `datasets` shows no progress bars and logs nothing, its errors are
    DatasetErrors, and a name on the Hub comes from the cache if the Hub cannot be reached."""
    import datasets

    shown, level = datasets.is_progress_bar_enabled(), datasets.logging.get_verbosity()
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(logging.CRITICAL)
    reaching = nullcontext() if Path(path).is_absolute() else hub_or_cache()
    try:
        with _as_dataset_error(f"dataset {path!r}"), reaching:
            yield
    finally:
        datasets.logging.set_verbosity(level)
        if shown:
            datasets.enable_progress_bars()


@contextmanager
def _as_dataset_error(what: str) -> Iterator[None]:
    """Turn what `datasets` raises into a `DatasetError` that names the dataset."""
    try:
        yield
    except DatasetError:
        raise
    except Exception as error:
        name = type(error).__name__
        # The cause says more than "an error occurred while generating the dataset".
        lines = str(error.__cause__ or error).strip().splitlines()
        reason = lines[0] if lines else name
        # `LocalEntryNotFoundError`: the Hub did not answer, and the cache has no such file.
        unreached = isinstance(error, ConnectionError) or "LocalEntryNotFound" in reason
        if "NotFound" in name and not unreached:
            text = f"does not exist, as a path or on the Hugging Face Hub ({reason})"
        elif unreached or "Offline" in name or "Connect" in name:
            text = (
                f"is not a local path, and the Hugging Face Hub cannot be reached ({reason}); "
                "check the path, or download the dataset and give its folder"
            )
        else:
            text = f"cannot be read: {reason}"
        raise DatasetError(f"{what} {text}") from error


def _text_of(path: Path, file: IO[bytes]) -> str:
    try:
        return file_text(file.read())
    except (OSError, NotText) as error:
        raise DatasetError(f"dataset {str(path)!r} cannot be read: {error}") from None


def _read_json(path: Path, file: IO[bytes]) -> list[Any]:
    """A JSON file with a list, or one value per line."""
    text = _text_of(path, file)
    one_list = uncompressed(path).suffix == ".json" and text.lstrip().startswith("[")
    values: list[Any] = []
    for before, part in enumerate([text] if one_list else text.split("\n")):
        try:
            values += [json.loads(part)] if part.strip() else []
        except json.JSONDecodeError as error:
            line = before + error.lineno
            raise DatasetError(f"{path}:{line}: not valid JSON: {error.msg}") from None
        except (ValueError, RecursionError) as error:
            at = f"{path}" if one_list else f"{path}:{before + 1}"
            raise DatasetError(f"{at}: not valid JSON: {_fault(error)}") from None
    return values[0] if one_list else values


def _filled(rows: list[Any]) -> Iterator[Any]:
    """Rows that all have the same columns, None for missing values, as in `datasets`."""
    columns = dict.fromkeys(key for row in rows if isinstance(row, dict) for key in row)
    for row in rows:
        yield {**dict.fromkeys(columns), **row} if isinstance(row, dict) else row
