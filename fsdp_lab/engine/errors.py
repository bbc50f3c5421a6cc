"""`ShardError`: something was done with a sharded model that cannot be."""


class ShardError(RuntimeError):
    """`str()` is a sentence that names the parameter or module, and says what to do.

    Where ranks could disagree, every one of them raises it.
    """
