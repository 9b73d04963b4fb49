"""The engine side: everything that runs inside a replica's actor and its vLLM workers."""
