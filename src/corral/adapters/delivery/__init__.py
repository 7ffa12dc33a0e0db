"""Adapters of `ports.delivery`."""
