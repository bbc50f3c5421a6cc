"""What each backend allocates and frees at each point of a step: subclasses of `base.MemoryModel`."""
