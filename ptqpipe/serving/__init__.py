"""serve: a checkpoint becomes a service."""
