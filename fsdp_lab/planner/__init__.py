"""Predictions of memory and step time before anything is measured, for hardware that need not be present. No torch.

Reading order:

- `devices`, `costs`: hardware, and the seconds of one operation on it, with the free `Rates` that `calibrate` fits.
- `timeline`, `step`: a step, simulated from the actions of the engine's own schedule.
- `memory`: a model's allocation tape, played through the backend's model in `memory_models`.
- `plan`, `search`: predictions, and the best of many. `questions` serves the command line and the dashboard.
- `published`, `named_models`, `dense`: published measurements, which `validate` and `memory_rows` compare with predictions.
- `calibration`: measurements of the local machine.
- `shapes`: `ModelShape` of a model. Recording one runs torch; presets are read from a file.
"""
