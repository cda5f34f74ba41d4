"""The installed plugin's own environment; nothing is interpreted here."""

import unhurried  # noqa: F401 - imported for what it sets
