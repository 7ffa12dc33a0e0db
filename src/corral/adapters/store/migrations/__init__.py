"""Alembic's steps; `pre` runs before and `post` after the roll-out of the version that needs it."""
