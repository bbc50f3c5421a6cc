"""`ShardError`: something was done with a sharded model that cannot be."""


class ShardError(RuntimeError):
    """`str()` is a sentence that names the parameter or module, and says what to do.

    Where ranks could disagree, every one of them raises it.
    """


class Unanswered(ShardError):
    """A collective that other ranks did not come to, or left. `str()` is what its process group said."""

    def __init__(self, said: str, waited_s: float) -> None:
        super().__init__(said)
        self.waited_s = waited_s
