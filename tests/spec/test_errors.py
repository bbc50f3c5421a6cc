"""The errors for refused values: `SpecError` for fields of a Spec, `ArgumentError` for all other arguments."""

from __future__ import annotations

import ast
import functools
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest

import fsdp_lab
from fsdp_lab.cluster.calls import Outcome, verdict
from fsdp_lab.cluster.remote import described
from fsdp_lab.core.errors import ArgumentError, FieldError, SpecError
from fsdp_lab.core.spec import Spec
from tests.test_house import REPO, modules

FIELDS = {*Spec().to_dict(), "spec"} - {"workload", "strategy"}  # "spec": the text of one as a whole


@pytest.mark.parametrize("kind", [ArgumentError, SpecError])
def test_an_error_keeps_its_parts_across_processes(kind: type[FieldError]):
    error = pickle.loads(pickle.dumps(kind("a", "is wrong", "mend it", {"b": 1})))
    assert type(error) is kind and str(error) == "a: is wrong; mend it" and isinstance(error, ValueError)
    assert (error.field, error.reason, error.hint, error.fix) == ("a", "is wrong", "mend it", {"b": 1})


@pytest.mark.parametrize("kind", [ArgumentError, SpecError])
def test_a_rank_s_error_is_the_same_error_in_the_kernel(kind: type[FieldError]):
    error = verdict("it", {0: Outcome(error=described(kind("a", "is wrong", "mend it", {"b": 1})))})
    assert type(error) is kind and str(error) == "a: is wrong; mend it" and error.fix == {"b": 1}


def test_both_are_public():
    assert fsdp_lab.ArgumentError is ArgumentError and fsdp_lab.SpecError is SpecError


@functools.cache
def calls() -> list[tuple[Path, ast.Call]]:
    nodes = ((path, node) for path in modules() for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    return [(path, node) for path, node in nodes if isinstance(node, ast.Call) and node.args]


def raised(name: str) -> Iterator[tuple[str, str]]:
    """(place, field) of each call of that error whose field is written there, or begins there."""
    for path, node in calls():
        if getattr(node.func, "id", "") == name:
            first = node.args[0]
            first = first.values[0] if isinstance(first, ast.JoinedStr) else first
            if isinstance(first, ast.Constant):
                yield f"{path.relative_to(REPO)}:{node.lineno}", str(first.value)


def of_a_spec(field: str) -> bool:
    return field in FIELDS or field.startswith(("workload.", "strategy."))


def test_spec_errors_name_fields_of_a_spec_and_argument_errors_do_not():
    assert not [place for place, field in raised("SpecError") if not of_a_spec(field)]
    arguments = list(raised("ArgumentError"))
    assert len(arguments) > 30 and not [place for place, field in arguments if of_a_spec(field)]
