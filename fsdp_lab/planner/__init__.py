"""Predictions of memory and step time before anything is measured, for hardware that need not be present. No torch.

Reading order:

- `devices`, `fabric`, `compute`, `memory_traffic`: the time of one operation, from the free `rates` that `calibrate` fits.
- `timeline`, `step`: the actions of the engine's own schedule, simulated as a step.
- `memory`: a model's allocation tape, played through the backend's model in `memory_models`.
- `plan`, `search`: both together, and the best of many. `questions` answers for the command line and the dashboard.
- `published`, `named_models`, `dense`: published measurements, which `validate` and `memory_rows` compare with predictions
  and `batch` fills in.
- `calibration`: the machine at hand.
- `shapes`: what the planner needs of a model. Recording one runs torch; presets come from a file.
"""
