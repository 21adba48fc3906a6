"""Options of a run: flags, configuration files, presets; checked together and completed."""
