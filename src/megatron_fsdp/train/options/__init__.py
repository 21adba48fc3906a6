"""What a user may say about a run: flags, configuration files, presets; checked together and completed. Pure."""
