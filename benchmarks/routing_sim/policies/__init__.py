"""Routers to compare: this library's own, and others re-described from their public sources."""
