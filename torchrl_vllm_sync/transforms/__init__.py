"""TorchRL transforms that read the stamps of ``vLLMWrapper``: age of rows, and how they were made.

``keys.py`` lists the stamps.
"""

from torchrl_vllm_sync.transforms.generation_statistics import GenerationStatistics
from torchrl_vllm_sync.transforms.staleness_filter import StalenessFilter
from torchrl_vllm_sync.transforms.staleness_weight import StalenessWeight
from torchrl_vllm_sync.transforms.version_stamp import VersionStamp

__all__ = ["GenerationStatistics", "StalenessFilter", "StalenessWeight", "VersionStamp"]
