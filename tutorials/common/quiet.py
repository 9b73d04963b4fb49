"""Keeps other libraries from talking over a tutorial's own output.

Import it first: some of them read these settings while they are imported.
"""

from __future__ import annotations

import logging
import os
import warnings

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # a local cluster of one user
os.environ.setdefault("RL_LOGGING_LEVEL", "ERROR")  # TorchRL's logger
os.environ.setdefault("MPLBACKEND", "Agg")  # draws files, needs no screen
logging.getLogger("vllm").setLevel(logging.ERROR)  # while vLLM is imported

UPSTREAM_WARNINGS = [
    # TorchRL 0.14 will append an InitTracker to the environment from 0.15 on.
    ("The env passed to LLMCollector is missing transforms", FutureWarning),
    # TorchRL 0.14 prefers weight_sync_schemes, which its LLMCollector does not take.
    ("Using WeightUpdaterBase is deprecated", DeprecationWarning),
    # TorchRL 0.14 adds the missing dimension to its wrapper's own output.
    ("Response history should have one more batch dimension", UserWarning),
    # torch warns of random numbers that differ between meshes, where only being random counts.
    ("DTensor random operators may not have complete support", UserWarning),
    # TensorDict pads ragged rows through torch's nested tensors.
    ("The PyTorch API of nested tensors is in prototype stage", UserWarning),
]


def keep_quiet() -> None:
    """Silences other libraries' notes about themselves, and progress bars of loading."""
    from transformers.utils import logging as transformers_logging

    for message, category in UPSTREAM_WARNINGS:
        warnings.filterwarnings("ignore", message, category)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
