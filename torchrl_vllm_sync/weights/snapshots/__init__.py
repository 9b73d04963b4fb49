"""Weights by memory-mapped TensorDicts: a writer, any number of readers, whole versions only."""
