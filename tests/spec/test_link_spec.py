"""An emulated link as it is asked for: one spelling, what is refused, and what a scaled one comes to."""

from __future__ import annotations

import math
from typing import Any

import pytest

from fsdp_lab.base.errors import SpecError
from fsdp_lab.spec.link import OFFERED, LinkError, LinkSpec, format_latency, format_rate, split_list
from fsdp_lab.spec.spec import Spec


@pytest.mark.parametrize(
    ("text", "spelt", "bytes_per_s", "latency_s"),
    [
        ("0.25 GB/s", "0.25 GB/s", 0.25e9, 0.0),
        ("  250MB/s ", "250 MB/s", 0.25e9, 0.0),
        ("0.25GB/s,50us", "0.25 GB/s, 50 us", 0.25e9, 50e-6),
        ("0.25 GB/s, 0.05 µs", "0.25 GB/s, 0.05 us", 0.25e9, 0.05e-6),
        ("NVLink of A100", "nvlink of a100", 300e9, 0.0),
        ("pcie4 of t4, 1 ms", "pcie4 of t4, 1 ms", 31.5e9, 1e-3),
    ],
)
def test_what_it_takes(text: str, spelt: str, bytes_per_s: float, latency_s: float) -> None:
    asked = LinkSpec.parse(text)
    assert asked.text == spelt and LinkSpec.parse(spelt) == asked
    assert asked.bytes_per_s == pytest.approx(bytes_per_s, rel=1e-3) and asked.latency_s == pytest.approx(latency_s)
    assert Spec(link=text) == Spec(link=spelt) == Spec.from_json(Spec(link=text).to_json())
    assert Spec(link=text).id == Spec(link=spelt).id != Spec().id
    assert Spec(link=text).replace(lr=0.1).difference(Spec().replace(lr=0.1)) == {"link": (spelt, None)}


REFUSED: dict[str, tuple[Any, ...]] = {
    "is refused": ("0 GB/s", "nan GB/s", "1e308 TB/s", "1 GB/s, -1 us"),
    "is no link": ("", 0.25, "0.25", "fast", "1 GB/s, 5"), "'GiB' is no unit": ("1 GiB",),
    "use one of gb200": ("1 GB/s of rtx",), "nvlink of h100": ("nvlink",), "has no NVLink": ("nvlink of t4",),
}  # fmt: skip


@pytest.mark.parametrize(("says", "text"), [(says, text) for says, texts in REFUSED.items() for text in texts])
def test_what_it_refuses(says: str, text: Any) -> None:
    with pytest.raises(SpecError, match=says) as e:
        Spec(link=text)
    assert e.value.field == "link" and Spec().replace(**e.value.fix) == Spec()


def test_a_list_keeps_each_latency_with_its_link() -> None:
    assert split_list("none,0.25 GB/s, 50 us,nvlink of h100") == ["none", "0.25 GB/s, 50 us", "nvlink of h100"]


def test_scaled_to_the_same_dtype_where_the_gpu_has_it() -> None:
    h100, t4 = LinkSpec.parse("100 Gb/s of h100"), LinkSpec.parse("pcie4 of t4")
    assert h100.scale(66.9e9, "fp32") == pytest.approx(1e-3)
    assert h100.scale(989.4e9, "bf16") == pytest.approx(1e-3)
    assert t4.reference("bf16") == (65e12, "fp16")  # it has no bf16
    assert LinkSpec.parse("0.1 GB/s").scale(None, "fp32") == 1.0
    for unknown in (None, 0.0, math.nan):
        with pytest.raises(LinkError, match="not known"):
            h100.scale(unknown, "fp32")


def test_what_is_offered_can_be_had() -> None:
    for text in OFFERED:
        assert LinkSpec.parse(text).text == text


def test_rates_and_times_for_people() -> None:
    assert [format_rate(r) for r in (0.25e9, 31.94e6, 4.5e3)] == ["0.25 GB/s", "31.9 MB/s", "4.5 kB/s"]
    assert [format_latency(t) for t in (50e-6, 2e-3, 1.5)] == ["50 µs", "2 ms", "1.5 s"]
