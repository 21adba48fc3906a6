"""Why a target is missed where it is: by its title, filled in after a run is published (pure)."""

from __future__ import annotations

REASONS: dict[str, str] = {}
"""One sentence each, shown where the target is missed; a test holds every title to a target that exists."""
