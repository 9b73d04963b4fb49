"""TorchRL transforms that read the stamps of ``vLLMWrapper``: age of rows, and how they were made.

``keys.py`` lists the stamps.
"""

from torchrl_vllm_sync.rl.staleness import StalenessFilter, StalenessWeight, VersionStamp
from torchrl_vllm_sync.rl.statistics import GenerationStatistics

__all__ = ["GenerationStatistics", "StalenessFilter", "StalenessWeight", "VersionStamp"]
