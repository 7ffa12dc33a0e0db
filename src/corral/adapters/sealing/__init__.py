"""Adapters of `corral.ports.sealing`."""
