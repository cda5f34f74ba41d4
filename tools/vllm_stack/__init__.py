"""Maintain a stack of git patches on a pinned upstream and build verified wheels from it."""

__version__ = "0.1.0"
