"""Read-only views of a service: status, page, metrics and timeline."""
