"""Predictions of memory and step time, without measurements, for any hardware. No torch.

Reading order:

- `devices`, `costs`: hardware, and the seconds of one operation on it at given `Rates`.
- `step`: a step, simulated from the actions of the engine's own schedule.
- `memory`: a model's allocation tape, replayed with the backend's model in `memory_models`.
- `plan`, `search`: predictions, and the best of many. `questions` serves the command line and the dashboard.
- `calibration`: `Rates` and curves from measurements of the local machine.
- `shapes`: the `ModelShape` of a model. Recording one needs torch; presets are read from a file.

The published measurements behind `devices.PUBLISHED` and `bands.PUBLISHED_ERRORS`, and how these were fitted to them, are in
`tests/planner/research`."""
