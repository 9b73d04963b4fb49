"""An OpenAI server over a service: vLLM's own serving classes, and one port that is guarded."""
