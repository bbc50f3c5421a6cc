"""`Weights`: values of real models from safetensors files, read range by range."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

from fsdp_lab.core.errors import SpecError

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


class Weights:
    """A folder with `model.safetensors`, or with its parts and their index, as transformers writes them.

    `read(name, start, stop)` gives elements [start, stop) of a flattened parameter; only the rows that hold them are read.
    Given to `fsdp_lab.engine.load_ranges`, each rank reads its own shards and no more.

    Raises:
        SpecError: there are no such files.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if (self.folder / _INDEX).is_file():
            index = json.loads((self.folder / _INDEX).read_text(encoding="utf-8"))
            self._files: dict[str, str] = dict(index["weight_map"])
        elif (self.folder / _SINGLE).is_file():
            from safetensors import safe_open

            with safe_open(self.folder / _SINGLE, framework="pt") as f:
                self._files = dict.fromkeys(f.keys(), _SINGLE)
        else:
            raise SpecError("workload.model", f"{self.folder} has neither {_SINGLE} nor {_INDEX}",
                            "give a folder that save_pretrained has written")  # fmt: skip

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._files)

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """[stop - start], in the dtype of the file. Raises SpecError for a name that no file has."""
        from safetensors import safe_open

        if name not in self._files:
            raise SpecError(
                "workload.model", f"{self.folder} has no values for {name}", "give the weights of this model"
            )
        with safe_open(self.folder / self._files[name], framework="pt") as f:
            part = f.get_slice(name)
            shape = part.get_shape()
            if not shape:
                values: Tensor = f.get_tensor(name).reshape(1)
                return values[start:stop]
            row = max(1, torch.Size(shape[1:]).numel())
            first, last = start // row, -(-stop // row)
            rows: Tensor = part[first:last]
            return rows.reshape(-1)[start - first * row : stop - first * row]
