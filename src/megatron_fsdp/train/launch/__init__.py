"""Starting ranks, what they know of each other, and how they end."""
