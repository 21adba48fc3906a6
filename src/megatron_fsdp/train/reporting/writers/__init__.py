"""Where the numbers of a run are written: files in its folder, and trackers that were asked for."""
