"""Answers to the exercises of the course; each passes its check (tests/lab/test_exercises.py). Others pass as well."""

# 01: switch while it trains, to one of these. Half the bytes of a value are half the traffic.
SENDS_LESS = [{"precision": "bf16-pure"}, {"precision": "bf16", "sharding": "shard_grad_op"}]

# 02: parameters x bytes each x the part that a rank sends. bf16 has 2 bytes; precision bf16 reduces in fp32, which has 4.
TRAFFIC = {"all_gather": 973_568 * 2 / 2, "reduce_scatter": 973_568 * 4 / 2}

# 03: what is kept after the forward need not be gathered for the backward.
ORDER = ["unshard", "compute", "compute", "reshard", "reduce"]

# 04: fewer bytes on the link, and no more of them in memory.
FASTER = [{"precision": "bf16-pure"}, {"precision": "bf16"}]

# 05: what every rank has, no rank can take along.
REPEATS_NOTHING = {"sharding": "no_shard"}

# 06: activations were what did not fit. What is recomputed need not be kept; then the memory left keeps parameters gathered.
FITS = {"sharding": "shard_grad_op", "recompute": "full", "micro_batch": 4, "accumulate": 2}

# 07: everything but transformer.h.3.
FREEZE = ["transformer.h.[0-2].*", "transformer.wte.*", "transformer.wpe.*", "transformer.ln_f.*"]

# 08: the loop's inner part. What is not synchronised stays on each rank until the last micro-batch.
LOOP = """
            for i in range(4):
                net.set_requires_gradient_sync(i == 3)
                value = net(torch.randn(32, 64)).square().mean() / 4
                value.backward()
"""

# 09: as many ranks as a host has GPUs share one copy.
INSIDE_HOSTS = {"sharding": "hybrid_shard", "shard_size": 8}

# 11: gradients pile up between reductions, and gathers fill the link. A replica gathers nothing. Where it is too large, one
# gather and one reduction a step send no more: "sharding": "shard_grad_op", "micro_batch": 2, "accumulate": 1.
HEALS = {"sharding": "no_shard"}
