"""The list of seeded faults fits the source, and a fault is found where a test can see it."""

from tests.seeded_faults import FAULTS, REPO, sources


def test_every_snippet_is_in_the_source_once() -> None:
    texts = [p.read_text(encoding="utf-8") for p in sources(REPO)]
    wrong = [f.name for f in FAULTS if sum(text.count(f.old) for text in texts) != 1 or f.old == f.new]
    assert not wrong, f"write these faults anew in tests/seeded_faults.py: {wrong}"
    assert len({f.name for f in FAULTS}) == len(FAULTS) >= 20
    assert not [name for f in FAULTS for name in f.tests if not (REPO / name).exists()]
