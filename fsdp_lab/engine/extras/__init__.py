"""What makes the engine a drop-in: sharded tensors for torch's optimizers and checkpoints, refusals, ties, loss scaling."""
