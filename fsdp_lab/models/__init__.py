"""Models, their initial values, their data and their FLOPs. Floor 1: torch, numpy, transformers.

`presets`, `check` and `data` import neither torch nor transformers."""
