"""`Columns`: bounded, numbered, and readable from where a reader stopped."""

from __future__ import annotations

from hypothesis import given, strategies as st

from fsdp_lab.dashboard.panels.base import Columns


def test_rows_come_back_in_columns_with_their_numbers():
    table = Columns("t", ["x", "y"], texts=["word"], limit=10)
    table.append([[0, 1.5], [1, 2.5]], {"word": ["a", "b"]})
    block = table.all()
    assert (block.generation, block.first, block.rows, block.next) == (0, 0, 2, 2)
    assert block.numbers.tolist() == [[0, 1], [1.5, 2.5]]
    assert block.texts == {"word": ["a", "b"]}
    assert table.column("y").tolist() == [1.5, 2.5]
    table.append([[float(i), 0] for i in range(10)], {"word": [str(i) for i in range(10)]})
    assert (table.first, table.next, len(table)) == (2, 12, 10)
    assert table.all().texts["word"] == [str(i) for i in range(10)], "only the limit is kept"


@given(
    limit=st.integers(1, 8), batches=st.lists(st.tuples(st.integers(0, 12), st.booleans(), st.booleans()), max_size=40)
)
def test_a_reader_that_asks_now_and_then_holds_what_the_table_holds(limit, batches):
    """However rows, clears and reads interleave, following `since` gives the last `limit` rows."""
    table = Columns("t", ["x"], limit=limit)
    held: list[float] = []
    generation, row, value = 0, 0, 0.0
    for count, clear, read in batches:
        if clear:
            table.clear()
        table.append([[value + i] for i in range(count)])
        value += count
        if not read:
            continue
        block = table.since(generation, row)
        if block.generation != generation or block.first > row:
            held = []
        held = [*held, *block.numbers[0].tolist()][-limit:]
        generation, row = block.generation, block.next
        assert held == table.all().numbers[0].tolist()
