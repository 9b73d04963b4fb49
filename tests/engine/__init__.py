"""Tests on real vLLM engines. One Ray cluster and one service serve the whole package."""
