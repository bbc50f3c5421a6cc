"""Which engine becomes which rank, and the names and addresses of hosts."""

import pytest

from fsdp_lab.cluster import StartError
from fsdp_lab.cluster.addresses import Endpoint, fastest, reached_by_all, unique_names
from fsdp_lab.cluster.assembly import rank_order


def endpoint(address: str, interface: str = "eth0"):
    return Endpoint(address=address, port=4000, interface=interface)


def test_ranks_of_one_host_stand_together():
    reports = {i: {"id": host} for i, host in enumerate("abab")}
    assert rank_order(reports) == [0, 2, 1, 3]


def test_an_address_is_good_where_all_others_reach_it():
    endpoints = {
        "a": [endpoint("10.0.0.1"), endpoint("10.1.0.1")],
        "b": [endpoint("10.0.0.2")],
        "c": [endpoint("10.0.0.3")],
    }
    tried = {(x, y): [""] * len(endpoints[y]) for x in endpoints for y in endpoints if x != y}
    tried["c", "a"] = ["no answer", ""]
    found = reached_by_all(endpoints, tried)
    assert found["a"] == [endpoint("10.1.0.1")] and found["b"] == endpoints["b"]


def test_a_host_that_another_does_not_reach_is_named_with_address_and_port():
    endpoints = {"a": [endpoint("10.0.0.1"), endpoint("10.1.0.1", "eth1")], "b": [endpoint("10.0.0.2")]}
    tried = {("a", "b"): [""], ("b", "a"): ["no answer", "Connection refused"]}
    with pytest.raises(StartError) as refused:
        reached_by_all(endpoints, tried)
    assert str(refused.value).startswith(
        "b does not reach a: 10.0.0.1 port 4000 (eth0): no answer, 10.1.0.1 port 4000 (eth1): Connection refused; open"
    )


def test_hosts_without_one_network_in_common_are_said():
    endpoints = {
        "a": [endpoint("10.0.0.1"), endpoint("10.1.0.1")],
        "b": [endpoint("10.0.0.2")],
        "c": [endpoint("10.1.0.3")],
    }
    tried = {(x, y): [""] * len(endpoints[y]) for x in endpoints for y in endpoints if x != y}
    tried["b", "a"], tried["c", "a"] = ["", "no answer"], ["no answer", ""]
    with pytest.raises(StartError, match="no address of a .*b reaches 10.0.0.1; c reaches 10.1.0.1.*one network"):
        reached_by_all(endpoints, tried)
    with pytest.raises(StartError, match="c has no network"):
        reached_by_all({**endpoints, "c": []}, tried | {("c", "a"): ["", ""], ("b", "a"): ["", ""]})


def test_the_first_address_is_taken_unless_another_is_clearly_faster():
    slow, fast = endpoint("10.0.0.1"), endpoint("10.1.0.1")
    assert fastest([slow, fast], [1e9, 1.5e9]) == slow
    assert fastest([slow, fast], [1e8, 1e9]) == fast


def test_hosts_of_one_name_get_different_ones():
    hosts = {"1": ("gpu", "10.0.0.1"), "2": ("gpu", "10.0.0.2"), "3": ("login", "10.0.0.3")}
    assert unique_names(hosts) == {"1": "gpu (10.0.0.1)", "2": "gpu (10.0.0.2)", "3": "login"}
    assert unique_names({"1": ("gpu", ""), "2": ("gpu", "")}) == {"1": "gpu", "2": "gpu #2"}
