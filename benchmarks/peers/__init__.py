"""Scripts of requests that real routers and their descriptions both run; see ``script``."""
