"""Weights by NCCL or Gloo: the group, its members, and the buckets that travel."""
