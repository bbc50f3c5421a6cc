"""Fully Sharded Data Parallel as its paper describes it (arXiv 2304.11277). README.md, beside this file, has the order of
reading, the walk of one step, and FSDP2 side by side.

It needs torch only. To install it alone, in a clone: `pip install torch && pip install --no-deps .`

    from fsdp_lab.engine import fully_shard

    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())

`AdamW(sharded_parameters(model))` steps the same values as a few flat tensors, which is faster.

What cannot be done raises a `ShardError`, which says what to do."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fsdp_lab.engine.extras import *  # noqa: F403
else:  # a type checker would take any name for one of `__getattr__`

    def __getattr__(name: str) -> object:
        """Imports them at the first use of one: Specs and the planner read the schedule where torch is not installed."""
        import fsdp_lab.engine.extras as extras

        value = globals()[name] = getattr(extras, name)  # the next access does not come here
        return value

    def __dir__() -> list[str]:
        import fsdp_lab.engine.extras as extras

        return sorted({*globals(), *dir(extras)})
