"""Weights of a wrapped model: what is refused, and the same tensors under their own names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fsdp_lab.base.errors import ArgumentError
from fsdp_lab.models.weights import unwrap_names


def folder(path: Path, *files: dict[str, torch.Tensor]) -> Path:
    path.mkdir()
    weight_map = {}
    for number, tensors in enumerate(files):
        name = f"model-{number}.safetensors"
        save_file(tensors, path / name, {"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (path / "config.json").write_text("{}")
    return path


def test_every_file_is_written_with_the_model_s_own_names(tmp_path: Path) -> None:
    a, b = torch.randn(3, 2), torch.randn(4)
    source = folder(tmp_path / "from", {"module._orig_mod.h.0.weight": a}, {"module.ln.weight": b})
    to = unwrap_names(source, tmp_path / "to")
    assert torch.equal(load_file(to / "model-0.safetensors")["h.0.weight"], a)
    assert torch.equal(load_file(to / "model-1.safetensors")["ln.weight"], b)
    index = json.loads((to / "model.safetensors.index.json").read_text())["weight_map"]
    assert index == {"h.0.weight": "model-0.safetensors", "ln.weight": "model-1.safetensors"}
    assert (to / "config.json").read_text() == "{}"


def test_what_cannot_be_unwrapped_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    value, to = torch.zeros(2), tmp_path / "to"
    plain = folder(tmp_path / "plain", {"h.weight": value})
    twice = folder(tmp_path / "twice", {"h.weight": value, "module.h.weight": value.clone()})
    wrapped = folder(tmp_path / "wrapped", {"module.h.weight": value})
    with pytest.raises(ArgumentError, match="with and without a wrapper"):
        unwrap_names(twice, to)
    with pytest.raises(ArgumentError, match="has no safetensors"):
        unwrap_names(tmp_path, to)
    assert not to.exists()
    with pytest.raises(ArgumentError, match="exists; give a new folder"):
        unwrap_names(wrapped, plain)
