"""Tables hold what the entries that they were made of said."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from loadmaster.checkpoint.table import Entry, TensorColumns, TensorTable

ROWS = st.lists(
    st.tuples(
        st.text(max_size=9).filter(str.isprintable),
        st.sampled_from([("F32", 4), ("BF16", 2), ("U8", 1)]),
        st.integers(0, 3),
    ),
    max_size=8,
)


def entries_of(rows: list[tuple[str, tuple[str, int], int]], file: str) -> list[Entry]:
    """Entries one behind the other."""
    entries, offset = [], 100
    for name, (dtype, size), count in rows:
        entries.append(Entry(name, dtype, (count, 3), file, offset, 3 * count * size))
        offset += 3 * count * size
    return entries


@given(rows=ROWS)
def test_a_table_gives_its_entries_back(rows: list[tuple[str, tuple[str, int], int]]) -> None:
    entries = entries_of(rows, "file")
    table = TensorTable.of("file", entries)
    assert table.entries() == [table.entry(row) for row in range(len(table))] == entries
    assert table.num_bytes.tolist() == [entry.num_bytes for entry in entries]
    assert table.take(np.arange(len(table))[::-1]).entries() == entries[::-1]
    assert len(table.kinds) == len({(entry.dtype, entry.shape) for entry in entries})


@given(tables=st.lists(ROWS, min_size=1, max_size=3))
def test_columns_are_the_tables_one_behind_the_other(tables: list[list[tuple[str, tuple[str, int], int]]]) -> None:
    entries = [entries_of(rows, f"file{number}") for number, rows in enumerate(tables)]
    columns = TensorColumns([TensorTable.of(f"file{number}", part) for number, part in enumerate(entries)])
    whole = [entry for part in entries for entry in part]
    assert [columns.entry(row) for row in range(len(whole))] == whole
    assert columns.offset.tolist() == [entry.offset for entry in whole]
    assert [columns.files[number] for number in columns.file] == [entry.file for entry in whole]
    for one, first in zip(columns.kind.tolist(), whole, strict=True):
        for other, second in zip(columns.kind.tolist(), whole, strict=True):
            assert (one == other) == (first[1:3] == second[1:3])
    assert [columns.begin(number) for number in range(len(tables))] == [
        sum(map(len, entries[:number])) for number in range(len(tables))
    ]
