"""What a step needs and how long it takes, before anybody measures it; on hardware that need not be here. No torch.

To be read in this order: `devices`, `fabric` and `compute` (with `moved`) are the physics of one operation, by the few
free `rates` that `calibrate` finds; `timeline` puts the actions of the engine's own schedule into a step, `step` says how
long each takes; `memory` plays a model's tape under a backend's `behaviour`; `plan` is both together, `search` the best of
many. `rows`, `known` and `dense` read published tables, which `validate` and `memory_rows` hold predictions against and
`batch` fills in; `here` is the machine that you have. `words` says it all.
"""
