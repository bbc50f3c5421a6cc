"""Which engine becomes which rank, and where they meet."""

from fsdp_lab.cluster.assembly import another_machine, rank_order


def report(host: str, address: str = "10.0.0.1"):
    return {"host": host, "address": address}


def test_ranks_of_one_machine_stand_together():
    assert rank_order({0: report("a"), 1: report("b"), 2: report("a"), 3: report("b")}) == [0, 2, 1, 3]


def test_ranks_of_one_machine_need_no_address():
    assert another_machine([report("a"), report("a")]) is None


def test_two_machines_meet_where_rank_0_is_reached_from_the_other():
    assert another_machine([report("a", "10.0.0.1"), report("a", "10.0.0.1"), report("b", "10.0.0.2")]) == "10.0.0.2"
