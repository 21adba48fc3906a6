"""Starting ranks, their process group, and how they end."""
