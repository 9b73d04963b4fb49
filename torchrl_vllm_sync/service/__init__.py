"""The one object a user holds: launches replicas and keeps them alive."""
