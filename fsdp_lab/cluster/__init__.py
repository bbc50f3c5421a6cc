"""The ranks as ipyparallel engines: started or taken, placed on devices, joined, called, supervised and ended.

The only package that uses ipyparallel. Read cluster.py first. Only the errors are imported here, because the guardian is a
module of this package too and has to start in a few milliseconds."""

from fsdp_lab.cluster.errors import ClusterError, Interrupted, RankError, RankHung, RankLost, RankStuck, StartError

__all__ = ["ClusterError", "Interrupted", "RankError", "RankHung", "RankLost", "RankStuck", "StartError"]
