"""Examples that were read once, kept in a temporary file: bounded memory, and the user's file may change or go."""

from __future__ import annotations

import json
import tempfile
from array import array
from collections.abc import Iterable, Iterator

from budgetformer.data.examples import Example
from budgetformer.errors import DataError


class Spool:
    """The usable rows of one table, one JSON array per line. The file has no name: it goes with this object or,
    however the process ends, with the process."""

    def __init__(self, file: str) -> None:
        self.file = file
        self._stream = tempfile.TemporaryFile(prefix="budgetformer-rows-", buffering=2**17)  # noqa: SIM115
        self._starts = array("Q", [0])

    def append(self, example: Example) -> None:
        row = json.dumps([example.line, example.text, example.text_pair, example.label], ensure_ascii=False)
        data = row.encode("utf-8", "surrogatepass") + b"\n"
        try:
            self._stream.write(data)
        except OSError as error:
            raise self._unusable(error) from None
        self._starts.append(self._starts[-1] + len(data))

    def read(self, rows: Iterable[int]) -> Iterator[Example]:
        """The rows of these numbers, from 0. Several readers may take turns."""
        for row in rows:
            start, end = self._starts[row], self._starts[row + 1]
            try:
                self._stream.seek(start)
                data = self._stream.read(end - start)
            except OSError as error:  # seeking writes what is still buffered
                raise self._unusable(error) from None
            line, text, pair, label = json.loads(data.decode("utf-8", "surrogatepass"))
            yield Example(text, pair, tuple(label) if isinstance(label, list) else label, line, self.file)

    def _unusable(self, error: OSError) -> DataError:
        folder = tempfile.gettempdir()
        return DataError(f"{self.file}: its rows cannot be kept in {folder} ({error.strerror}): set TMPDIR to another")
