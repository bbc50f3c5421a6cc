"""`Columns`: bounded, numbered, and readable from where a reader stopped."""

from hypothesis import given, strategies as st

from fsdp_lab.dashboard.panels.base import Columns


def test_rows_come_back_in_columns_with_their_numbers():
    table = Columns("t", ["x", "y"], texts=["word"], limit=10)
    table.append([[i, i + 0.5] for i in range(12)], {"word": [str(i) for i in range(12)]})
    block = table.all()
    assert (block.generation, block.first, block.rows, block.next) == (0, 2, 10, 12)
    assert block.numbers[:, 0].tolist() == [2, 2.5] and block.texts == {"word": [str(i) for i in range(2, 12)]}


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
